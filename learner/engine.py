"""The training engine: DeepSpeed behind a small interface; with `runtime`, all that knows it.

- Every method is called on every rank, in the same order; a rank with less work runs idle
  micro-batches, so that collectives pair up.
- A loss or gradient that is not finite changes no weight, on any rank.
- One optimizer step per mini-batch, with one denominator: its count of unmasked tokens over all
  ranks. The result does not depend on ranks, ZeRO stage or micro-batches beyond rounding.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from common.buckets import plan_buckets
from common.config import Config
from common.errors import CheckpointError, NumericalError
from learner.batch import (
    MicroBatch,
    Reals,
    Rows,
    Tokens,
    Trajectory,
    collate,
    idle_micro_batch,
    pack_rows,
    plan_micro_batches,
)
from learner.export import TOKENIZER_FILES, copy_files
from learner.loss import (
    Clip,
    gap_sums,
    importance_sums,
    importance_weights,
    token_loss,
    usable_tokens,
)
from learner.policy import Policy
from learner.runtime import (
    deepspeed,
    deepspeed_settings,
    join_ranks,
    load_model,
    random_state,
    set_random_state,
)
from learner.tally import Tally

Shape = tuple[int, ...]

_EXPORT_BYTES = 2**30
_STATE = "state"
_FACTS = "learner.json"


class _Update(NamedTuple):
    """One mini-batch: this rank's trajectories and plan, and what all ranks agree on."""

    items: Sequence[Trajectory]
    old: list[Reals] | None
    plan: list[list[int]]
    tokens: int
    rounds: int


class TrainEngine:
    """A policy under DeepSpeed: scores, trains, hands out its weights, saves and loads itself.

    Reads RANK and WORLD_SIZE (torchrun sets them) or, without them, runs alone. `rank` and
    `world` are this process among all, `device` is where the model lives.

    Raises:
        ConfigError: a model that the learner does not support.
    """

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config = config
        torch.set_num_threads(config.learner.threads)
        self.device = join_ranks()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._stage = config.learner.zero_stage
        settings = deepspeed_settings(config, self.world)
        policy = Policy(load_model(config, model_dir, settings))
        with contextlib.redirect_stdout(io.StringIO()):  # its bf16 optimizer prints memory figures
            self._engine, *_ = deepspeed.initialize(
                model=policy, model_parameters=list(policy.parameters()), config=settings
            )
        self._engine.train()  # dropout is off; gradient checkpointing works in this mode only
        self._parameters: list[tuple[str, Any]] = list(policy.model.named_parameters())

    @property
    def steps(self) -> int:
        """Optimizer steps since the run began, restarts from a checkpoint included."""
        return int(self._engine.global_steps)

    def set_learning_rate(self, batch_number: int) -> float:
        """Set and return the rate of a batch, counted from 1: a linear rise, then constant.

        With `warmup_batches` = W, batch n trains at min(1, n / W) of the rate.
        """
        learner = self._config.learner
        rate = learner.learning_rate
        if learner.warmup_batches:
            rate *= min(1.0, batch_number / learner.warmup_batches)
        self._set_hyper_parameters(lr=rate)
        return rate

    # Scoring and training

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Tokens, Tokens]], temperature: float) -> list[Reals]:
        """Log-probs of each response given its prompt, in the order of `pairs`.

        Every rank passes pairs of its own, possibly none.
        """
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        plan = plan_micro_batches(lengths, self._config.learner.micro_batch_tokens)
        (rounds,) = self._agree([len(plan)], dist.ReduceOp.MAX)
        scores: list[Reals] = [np.zeros(0, dtype=np.float32)] * len(pairs)
        for turn in range(rounds):
            if turn >= len(plan):
                self._forward(idle_micro_batch().rows, temperature)
                continue
            chosen = [pairs[index] for index in plan[turn]]
            logprob_N, _ = self._forward(pack_rows(chosen), temperature)
            ends = np.cumsum([len(response) for _, response in chosen])[:-1]
            parts = np.split(logprob_N.cpu().numpy(), ends)
            for index, part in zip(plan[turn], parts, strict=True):
                scores[index] = part
        return scores

    def train_batch(
        self, mini_batches: Sequence[Sequence[Trajectory]], version: int
    ) -> dict[str, Any]:
        """Train one batch: one optimizer step for each mini-batch, in order.

        `mini_batches` holds this rank's share of each, possibly empty; `version` is the policy's
        version before the batch, from which the age of a token is counted. With one update the
        ratio is against the recorded log-probs; with more, against the learner's own at the
        start of the batch, and truncated importance weights correct for the difference.

        Returns the metrics of the whole batch, the same on every rank: floats, and under
        `gap_by_age` the mean |Δ log p| for each age in versions. A mini-batch without a token
        to train makes no step.

        Raises:
            NumericalError: a loss or a gradient norm is not finite. The weights are those of
                the last good step; gradients are left over, so load a checkpoint to go on.
        """
        updates, ages = self._plan(mini_batches, version)
        total, losses, norms = Tally(ages, self.device), [], []
        for index, update in enumerate(updates):
            if update.tokens == 0:  # a step without gradient would still follow the momentum
                continue
            tally = self._accumulate(update, version, ages)
            total.add(tally)
            losses.append(tally.sum_of("loss") / update.tokens)
            where = f"batch {version + 1}, mini-batch {index + 1} of {len(updates)}"
            norms.append(self._step(losses[-1], where))
        gaps, by_age = total.gaps()
        return {
            "loss": sum(losses) / max(1, len(losses)),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "optimizer_steps": float(len(norms)),
            **total.means(),
            **gaps,
            "gap_by_age": by_age,
        }

    def _plan(
        self, mini_batches: Sequence[Sequence[Trajectory]], version: int
    ) -> tuple[list[_Update], int]:
        """The updates of a batch, and how many ages its tokens have at most on any rank."""
        expected = self._config.algorithm.updates_per_batch
        if len(mini_batches) != expected:
            raise ValueError(f"{len(mini_batches)} mini-batches for updates_per_batch = {expected}")
        budget = self._config.learner.micro_batch_tokens
        plans = [plan_micro_batches([t.tokens for t in mini], budget) for mini in mini_batches]
        trained = [int(sum(t.trained().sum() for t in mini)) for mini in mini_batches]
        every = [trajectory for mini in mini_batches for trajectory in mini]
        oldest = max((int(t.ages(version).max(initial=0)) for t in every), default=0)
        tokens = self._agree(trained, dist.ReduceOp.SUM)
        *rounds, oldest = self._agree([*map(len, plans), oldest], dist.ReduceOp.MAX)
        olds: list[Any] = [None] * expected
        if expected > 1:
            pairs = [(t.prompt_ids, t.response_ids) for t in every]
            scores = iter(self.score(pairs, self._config.sampling.temperature))
            olds = [[next(scores) for _ in mini] for mini in mini_batches]
        rows = zip(mini_batches, olds, plans, tokens, rounds, strict=True)
        return [_Update(*row) for row in rows], oldest + 1

    def _accumulate(self, update: _Update, version: int, ages: int) -> Tally:
        """Gradients of one mini-batch, and its sums over all ranks."""
        tally = Tally(ages, self.device)
        for turn in range(update.rounds):
            batch = idle_micro_batch()
            if turn < len(update.plan):
                rows = update.plan[turn]
                old = None if update.old is None else [update.old[row] for row in rows]
                batch = collate([update.items[row] for row in rows], version, old)
            self._engine.set_gradient_accumulation_boundary(turn == update.rounds - 1)
            loss = self._count(batch, tally, ages)
            # DeepSpeed averages over ranks; the factor `world` makes it a sum.
            self._engine.backward(loss * (self.world / update.tokens), scale_wrt_gas=False)
        dist.all_reduce(tally.vector)
        dist.all_reduce(tally.largest, op=dist.ReduceOp.MAX)
        return tally

    def _count(self, batch: MicroBatch, tally: Tally, ages: int) -> Tensor:
        """Forward pass of a micro-batch: the token sum of the loss; its sums go into `tally`."""
        algorithm = self._config.algorithm
        logprob_N, entropy_N = self._forward(batch.rows, self._config.sampling.temperature)
        behaviour_N = batch.behaviour_N.to(self.device)
        mask_N, nonfinite = usable_tokens(batch.counted_N.to(self.device), behaviour_N)
        start_N = logprob_N.detach() if batch.old_N is None else batch.old_N.to(self.device)
        weight_N = importance_weights(start_N, behaviour_N, mask_N, algorithm.importance_cap)
        decoupled = batch.old_N is not None
        result = token_loss(
            logprob_N,
            start_N if decoupled else behaviour_N,
            batch.advantage_N.to(self.device),
            mask_N,
            Clip(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip),
            weight_N if decoupled else None,
        )
        with torch.no_grad():
            gaps = gap_sums(start_N, behaviour_N, mask_N, batch.age_N.to(self.device), ages)
            sums = {
                "loss": result.loss,
                "nonfinite": nonfinite,
                "entropy": torch.where(mask_N, entropy_N, 0.0).sum(),
                "probability": torch.where(mask_N, logprob_N.exp(), 0.0).sum(),
                **importance_sums(weight_N),
                **result.sums,
            }
            tally.count(sums, *gaps)
        return result.loss

    def _forward(self, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
        tensors = [tensor.to(self.device) for tensor in rows]
        logprob_N, entropy_N = self._engine(*tensors, temperature, self._config.learner.logit_chunk)
        return logprob_N, entropy_N

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

    def _agree(self, numbers: Sequence[int], operation: Any) -> list[int]:
        """Reduce small integers over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=operation)
        return [int(number) for number in tensor.tolist()]

    def _set_hyper_parameters(self, **values: Any) -> None:
        for group in self._engine.optimizer.param_groups:
            group.update(values)

    # Weights

    def manifest(self) -> list[tuple[str, Shape]]:
        """Name (as in the Hugging Face checkpoint) and shape of every parameter; tied ones once."""
        return [(name, tuple(_whole(parameter))) for name, parameter in self._parameters]

    def buckets(
        self, bucket_bytes: int, dtype: torch.dtype
    ) -> Iterator[tuple[list[tuple[str, Shape]], Tensor | None]]:
        """All weights in packs of whole tensors: (manifest entries, flat 1-D tensor).

        The flat tensor is on the device of rank 0 and None elsewhere. Iterate on all ranks in
        step; stopping early is allowed if all ranks stop at the same bucket. The cuts are
        `plan_buckets` of the sizes in `dtype`.

        Raises:
            NumericalError: before the first bucket, on all ranks, if a weight is not finite.
        """
        self._require_finite()
        manifest = self.manifest()
        sizes = [math.prod(shape) * dtype.itemsize for _, shape in manifest]
        for bucket in plan_buckets(sizes, bucket_bytes):
            parameters = [self._parameters[index][1] for index in bucket]
            yield [manifest[index] for index in bucket], self._gather(parameters, dtype)

    @torch.no_grad()
    def _gather(self, parameters: list[Any], dtype: torch.dtype) -> Tensor | None:
        with deepspeed.zero.GatheredParameters(parameters, enabled=self._stage == 3):
            if self.rank != 0:
                return None
            return torch.cat([parameter.flatten().to(dtype) for parameter in parameters])

    @torch.no_grad()
    def _require_finite(self) -> None:
        """Every rank checks what it owns, so that nothing has to be gathered for it."""
        owned = [self._owned(parameter) for _, parameter in self._parameters]
        finite = torch.stack([part.isfinite().all() for part in owned])
        bad = torch.arange(len(owned), device=finite.device).masked_fill(finite, len(owned)).min()
        (first,) = self._agree([int(bad)], dist.ReduceOp.MIN)
        if first < len(owned):
            raise NumericalError(
                f"weight {self._parameters[first][0]} is not finite: nothing is published; "
                "resume from the last checkpoint"
            )

    def _owned(self, parameter: Any) -> Tensor:
        """This rank's part of a parameter, without padding; all of it below ZeRO-3."""
        if self._stage < 3:
            return torch.as_tensor(parameter)
        part: Tensor = parameter.ds_tensor.flatten()
        rest = math.prod(_whole(parameter)) - self.rank * part.numel()
        return part[: max(0, rest)]

    # Checkpoints

    def save(self, directory: Path) -> None:
        """Write the state of weights, optimizer and random numbers of every rank."""
        self._engine.save_checkpoint(str(directory), tag=_STATE, save_latest=False)
        torch.save(random_state(), directory / f"random_{self.rank}.pt")
        if self.rank == 0:
            (directory / _FACTS).write_text(json.dumps(self._facts()))
        dist.barrier()

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, into an engine that has not trained yet.

        Raises:
            CheckpointError: missing or unreadable, or of another number of ranks, ZeRO stage or
                dtype; the message names the remedy.
        """
        try:
            facts = json.loads((directory / _FACTS).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory} holds no learner state: {error}") from None
        for key, here in self._facts().items():
            if facts.get(key) != here:
                there = facts.get(key)
                raise CheckpointError(
                    f"{directory} was saved with {key} = {there}, this learner has {here}; "
                    f"set {key} = {there}, or `dapo export` it and start a new run from there"
                )
        numbers = directory / f"random_{self.rank}.pt"
        loaded, _ = self._engine.load_checkpoint(str(directory), tag=_STATE)
        if loaded is None or not numbers.exists():
            raise CheckpointError(f"{directory} is incomplete; use an older checkpoint")
        # The optimizer state brings the hyper-parameters of its time; today's recipe decides.
        learner = self._config.learner
        self._set_hyper_parameters(betas=learner.betas, weight_decay=learner.weight_decay)
        set_random_state(torch.load(numbers, weights_only=True))
        dist.barrier()

    def _facts(self) -> dict[str, Any]:
        return {
            "learner.ranks": self.world,
            "learner.zero_stage": self._stage,
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
        dist.barrier()


def _whole(parameter: Any) -> Shape:
    """Shape of a parameter before ZeRO-3 cut it."""
    return getattr(parameter, "ds_shape", parameter.shape)
