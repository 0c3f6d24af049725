"""The training engine: DeepSpeed behind a small interface.

- Every method is called on every rank, in the same order; a rank with less work runs idle
  micro-batches, so that collectives pair up.
- A loss or gradient that is not finite changes no weight, on any rank.
- One optimizer step per mini-batch; the factor of each token in its loss comes from counts over
  all ranks. The result does not depend on ranks, ZeRO stage, micro-batches or the layout of their
  rows beyond rounding.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from common.config import Config
from common.errors import NumericalError
from learner.aggregation import Counts, counts, token_scales
from learner.batch import MiniBatch, Reals, Trajectory, collate, idle_micro_batch
from learner.export import TOKENIZER_FILES, carry_settings, copy_files, open_to_readers
from learner.objective import micro_batch_loss
from learner.policy import Policy
from learner.reference import load_reference
from learner.rows import Rows, Tokens, lay_out, plan_micro_batches
from learner.runtime import (
    agree,
    deepspeed,
    deepspeed_settings,
    join_ranks,
    load_model,
    row_layout,
)
from learner.schedule import learning_rate
from learner.state import load_state, save_state
from learner.tally import Tally
from learner.weights import Shape, Weights

_EXPORT_BYTES = 2**30


class _Update(NamedTuple):
    """One mini-batch: this rank's part and its plan, and what all ranks agree on."""

    mini: MiniBatch
    plan: list[list[int]]
    tokens: int
    rounds: int


class TrainEngine:
    """A policy under DeepSpeed: scores, trains, hands out its weights, saves and loads itself.

    Reads RANK and WORLD_SIZE (torchrun sets them) or, without them, runs alone. `rank` and
    `world` are this process among all, `device` is where the model lives, `vocabulary` the number
    of token ids that it knows.

    Raises:
        ConfigError: a model that the learner does not support.
    """

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config = config
        torch.set_num_threads(config.learner.threads)
        self.device = join_ranks()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._layout = row_layout(config)
        settings = deepspeed_settings(config, self.world)
        policy = Policy(load_model(config, model_dir, settings))
        self._reference = None
        with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory figures
            self._engine, *_ = deepspeed.initialize(
                model=policy, model_parameters=list(policy.parameters()), config=settings
            )
            if config.algorithm.kl_coefficient:
                self._reference = load_reference(config, model_dir, self.world, self.device)
        self._engine.train()  # dropout is off; gradient checkpointing works in this mode only
        self._weights = Weights(policy.model, partitioned=config.learner.zero_stage == 3)
        self.vocabulary = int(policy.model.config.vocab_size)

    @property
    def steps(self) -> int:
        """Optimizer steps since the run began, restarts from a checkpoint included."""
        return int(self._engine.global_steps)

    def set_learning_rate(self, batch_number: int) -> float:
        """Set and return the rate of a batch, counted from 1."""
        rate = learning_rate(batch_number, self._config.run.batches, self._config.learner)
        self._set_hyper_parameters(lr=rate)
        return rate

    def _set_hyper_parameters(self, **values: Any) -> None:
        for group in self._engine.optimizer.param_groups:
            group.update(values)

    # Scoring

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]], temperature: float) -> list[Reals]:
        """Log-probs of each response given its prompt, in the order of `pairs`.

        Every rank passes pairs of its own, possibly none.
        """
        return self._score(self._engine, pairs, temperature)

    @torch.no_grad()
    def _score(
        self, policy: Any, pairs: Sequence[tuple[Tokens, Tokens]], temperature: float
    ) -> list[Reals]:
        plan = self._plan_rows([len(prompt) + len(response) for prompt, response in pairs])
        (rounds,) = agree([len(plan)], dist.ReduceOp.MAX, self.device)
        scores: list[Reals] = [np.zeros(0, dtype=np.float32)] * len(pairs)
        for turn in range(rounds):
            if turn >= len(plan):
                self._forward(policy, idle_micro_batch().rows, temperature)
                continue
            chosen = [pairs[index] for index in plan[turn]]
            logprob_N, _ = self._forward(policy, lay_out(chosen, self._layout), temperature)
            ends = np.cumsum([len(response) for _, response in chosen])[:-1]
            parts = np.split(logprob_N.cpu().numpy(), ends)
            for index, part in zip(plan[turn], parts, strict=True):
                scores[index] = part
        return scores

    def _forward(self, policy: Any, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        chunk = self._config.learner.logit_chunk
        logprob_N, entropy_N = policy(*rows.to(self.device), temperature, chunk)
        return logprob_N, entropy_N

    def _plan_rows(self, lengths: Sequence[int]) -> list[list[int]]:
        budget = self._config.learner.micro_batch_tokens
        return plan_micro_batches(lengths, budget, self._layout)

    # Training

    def train_batch(
        self, mini_batches: Sequence[Sequence[Trajectory]], version: int
    ) -> dict[str, Any]:
        """Train one batch: one optimizer step for each mini-batch, in order.

        `mini_batches` holds this rank's share of each in whole groups, possibly none; `version` is
        the policy's version before the batch, from which the age of a token is counted.

        Returns the metrics of the whole batch, the same on every rank: floats, and under
        `gap_by_age` the mean |Δ log p| for each age in versions. A mini-batch without a token
        to train makes no step.

        Raises:
            NumericalError: a loss or a gradient norm is not finite. The weights are those of
                the last good step; gradients are left over, so load a checkpoint to go on.
        """
        every = [trajectory for mini in mini_batches for trajectory in mini]
        oldest = max((int(t.ages(version).max(initial=0)) for t in every), default=0)
        ages = 1 + agree([oldest], dist.ReduceOp.MAX, self.device)[0]
        updates = self._plan(mini_batches)
        total = Tally(ages, self.device)
        losses: list[float] = []
        norms: list[float] = []
        for index, update in enumerate(updates):
            if update.tokens == 0:  # a step without gradient would still follow the momentum
                continue
            tally = self._accumulate(update, version, ages)
            # After a step the gap to the engine is no more that of the version that sampled.
            total.add(tally, gaps=not norms or update.mini.start is not None)
            losses.append(tally.sum_of("loss"))
            where = f"batch {version + 1}, mini-batch {index + 1} of {len(updates)}"
            norms.append(self._step(losses[-1], where))
        gaps, by_age = total.gaps()
        figures = {
            "loss": sum(losses) / max(1, len(losses)),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "optimizer_steps": float(len(norms)),
            **total.means(),
            **gaps,
            "gap_by_age": by_age,
        }
        if self._reference is None:
            del figures["kl_reference"]
        return figures

    def _plan(self, mini_batches: Sequence[Sequence[Trajectory]]) -> list[_Update]:
        """The updates of a batch: factors of tokens, log-probs of other policies, micro-batches."""
        algorithm, constant = self._config.algorithm, self._config.loss_constant
        expected = algorithm.updates_per_batch
        if len(mini_batches) != expected:
            raise ValueError(f"{len(mini_batches)} mini-batches for updates_per_batch = {expected}")
        own = [number for mini in mini_batches for number in counts(mini)]
        summed = agree(own, dist.ReduceOp.SUM, self.device)
        totals = [Counts(*part) for part in np.reshape(summed, (expected, -1)).tolist()]
        plans = [self._plan_rows([item.tokens for item in mini]) for mini in mini_batches]
        rounds = agree([len(plan) for plan in plans], dist.ReduceOp.MAX, self.device)
        starts = self._logprobs(self._engine if algorithm.decoupled else None, mini_batches)
        references = self._logprobs(self._reference, mini_batches)
        updates = []
        for index, (items, total) in enumerate(zip(mini_batches, totals, strict=True)):
            scales = token_scales(items, total, algorithm.loss_aggregation, constant)
            mini = MiniBatch(items, scales, starts[index], references[index])
            updates.append(_Update(mini, plans[index], total.tokens, rounds[index]))
        return updates

    def _logprobs(
        self, policy: Any | None, mini_batches: Sequence[Sequence[Trajectory]]
    ) -> list[list[Reals] | None]:
        """Log-probs of every response under a policy, by mini-batch; None each without a policy."""
        if policy is None:
            return [None] * len(mini_batches)
        pairs = [(t.prompt_ids, t.response_ids) for mini in mini_batches for t in mini]
        scores = iter(self._score(policy, pairs, self._config.sampling.temperature))
        return [[next(scores) for _ in mini] for mini in mini_batches]

    def _accumulate(self, update: _Update, version: int, ages: int) -> Tally:
        """Gradients of one mini-batch, and its sums over all ranks."""
        tally = Tally(ages, self.device)
        for turn in range(update.rounds):
            batch = idle_micro_batch()
            if turn < len(update.plan):
                batch = collate(update.mini, update.plan[turn], version, self._layout)
            self._engine.set_gradient_accumulation_boundary(turn == update.rounds - 1)
            scored = self._forward(self._engine, batch.rows, self._config.sampling.temperature)
            loss, *figures = micro_batch_loss(
                *scored, batch.to(self.device), self._config.algorithm, ages
            )
            tally.count(*figures)
            # DeepSpeed averages over ranks; the factor `world` makes it a sum.
            self._engine.backward(loss * self.world, scale_wrt_gas=False)
        dist.all_reduce(tally.vector)
        dist.all_reduce(tally.largest, op=dist.ReduceOp.MAX)
        return tally

    def _step(self, loss: float, where: str) -> float:
        """Step unless loss or gradient norm is not finite; the gradient norm before clipping."""
        # Loss and norm are sums over all ranks, so all ranks agree.
        cure = "weights are as before this step; resume from a checkpoint with a lower rate"
        if not math.isfinite(loss):
            raise NumericalError(f"{where}: the loss is {loss}; {cure}")
        self._engine.step()
        if not self._engine.was_step_applied():  # DeepSpeed refuses a norm that is not finite
            raise NumericalError(f"{where}: the gradient norm is not finite; {cure}")
        return float(self._engine.get_global_grad_norm())

    # Weights and checkpoints

    def manifest(self) -> list[tuple[str, Shape]]:
        """As `Weights.manifest`."""
        return self._weights.manifest()

    def buckets(
        self, bucket_bytes: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[tuple[str, Shape]], Tensor | None]]:
        """As `Weights.buckets`."""
        return self._weights.buckets(bucket_bytes, dtype)

    def save(self, directory: Path) -> None:
        """Write the state of weights, optimizer and random numbers of every rank."""
        save_state(self._engine, directory, self._facts())

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, into an engine that has not trained yet.

        Raises:
            CheckpointError: missing or unreadable, or of another number of ranks, ZeRO stage or
                dtype; the message names the remedy.
        """
        load_state(self._engine, directory, self._facts())
        # The optimizer state brings the hyper-parameters of its time; today's recipe decides.
        learner = self._config.learner
        self._set_hyper_parameters(betas=learner.betas, weight_decay=learner.weight_decay)

    def _facts(self) -> dict[str, Any]:
        return {
            "learner.ranks": self.world,
            "learner.zero_stage": self._config.learner.zero_stage,
            "model.dtype": self._config.model.dtype,
        }

    def export_hf(self, directory: Path, tokenizer_dir: Path) -> None:
        """Write a Hugging Face folder: safetensors, configurations and the tokenizer's files."""
        state: dict[str, Tensor] = {}
        dtype = getattr(torch, self._config.model.dtype)
        for entries, flat in self.buckets(_EXPORT_BYTES, dtype):
            if flat is None:
                continue
            parts = flat.cpu().split([math.prod(shape) for _, shape in entries])
            for (name, shape), part in zip(entries, parts, strict=True):
                state[name] = part.view(shape).clone()
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            save_torch_state_dict(state, directory, metadata={"format": "pt"})
            model = self._engine.module.model
            model.config.save_pretrained(directory)
            model.generation_config.save_pretrained(directory)
            copy_files(tokenizer_dir, directory, TOKENIZER_FILES)
            carry_settings(directory, self._config)
            open_to_readers(directory)
        dist.barrier()
