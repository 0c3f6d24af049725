"""What the tests of the training engine train on, and the same training in plain torch.

The model is a tiny random Qwen2 in fp32, tied and untied. Nothing here is the learner's but the
trajectories: sequences alone and unpadded, token losses one by one, means taken by hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common.algorithm import AlgorithmSection
from common.config import Config, parse_config
from common.messages import Span
from learner.batch import Trajectory, mini_batches, share
from learner.rows import Layout

VOCABULARY = 96
TEMPERATURE = 0.8
RATE = 1e-3
CLIP_NORM = 0.5
ONE, SOME, ALL = 1, 64, 10**6
"""Micro-batch budgets: one sequence at a time, a few, everything at once."""
STAGES = (1, 2, 3)
WORLDS = (1, 2, 3)
PAIR = 2
"""Ranks of the tests that are about one split only."""
UPDATES = {"tied": 1, "untied": 3}
TERMS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"kl_coefficient": 0.5, "entropy_coefficient": 0.02},
}
CASES = [(kind, stage) for kind in UPDATES for stage in STAGES]
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
}
Weights = dict[str, torch.Tensor]


class Objective(NamedTuple):
    """Keys of [algorithm], and which samples the last rank has (see `Batch`)."""

    keys: dict[str, Any]
    uneven: str = ""

    @property
    def updates(self) -> int:
        return int(self.keys.get("updates_per_batch", 1))


BOUNDS: dict[str, Any] = {"mask_low": 0.8, "mask_high": 1.2}
THREE: dict[str, Any] = {"updates_per_batch": 3}
OBJECTIVES = {
    "token": Objective({}, "masked"),
    "group": Objective({"loss_aggregation": "group"}, "masked"),
    "sequence": Objective({"loss_aggregation": "sequence"}, "masked"),
    "constant": Objective({"loss_aggregation": "constant", "loss_constant": 7.0}, "masked"),
    "mask": Objective({"correction": "mask", **BOUNDS, "loss_aggregation": "group"}, "absent"),
    "sequence mask": Objective({"correction": "sequence_mask", **BOUNDS}),
    "kl and entropy": Objective(
        {"kl_coefficient": 0.3, "entropy_coefficient": 0.1, "loss_aggregation": "sequence"},
        "absent",
    ),
    "decoupled and masked": Objective({**THREE, "correction": "mask", **BOUNDS}),
    "direct, three updates": Objective({**THREE, "ratio": "direct"}),
}
SPLITS: dict[str, list[tuple[Layout, int]]] = {
    name: [("padded", SOME), ("packed", ALL)] for name in OBJECTIVES
}
SPLITS["token"] += [("padded", ONE), ("padded", ALL), ("packed", SOME)]


def make_config(
    stage: int,
    budget: int,
    algorithm: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **learner: Any,
) -> Config:
    return parse_config(
        {
            "model": {"path": "tiny", "dtype": "float32", **(model or {})},
            "data": {"train": []},
            "sampling": {"temperature": TEMPERATURE},
            "algorithm": {"groups_per_batch": 6, **(algorithm or {})},
            "learner": {
                "learning_rate": RATE,
                "grad_clip": CLIP_NORM,
                "zero_stage": stage,
                "micro_batch_tokens": budget,
                "logit_chunk": 7,
                **learner,
            },
        },
        "test",
    )


def make_model(directory: Path, tied: bool) -> None:
    torch.manual_seed(1 if tied else 2)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def plain_scores(model: Any, item: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a response and entropy, out of the whole logits of one unpadded sequence."""
    ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.response_ids])).long()
    logits = model(input_ids=ids[None]).logits[0, len(item.prompt_ids) - 1 : -1] / TEMPERATURE
    logp = logits.log_softmax(-1)
    labels = ids[len(item.prompt_ids) :, None]
    return logp.gather(1, labels)[:, 0], -(logp.exp() * logp).sum(-1)


def plain_logprobs(model: Any, item: Trajectory) -> torch.Tensor:
    return plain_scores(model, item)[0]


@functools.cache
def make_groups(directory: Path, batch: int) -> list[list[Trajectory]]:
    """Six groups of two with lengths from 1 to 20, some tokens unusable, two ages."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rng = np.random.default_rng(batch)
    groups = []
    for group in range(6):
        prompt = rng.integers(0, VOCABULARY, rng.integers(2, 8)).astype(np.int32)
        members = []
        for sample in range(2):
            response = rng.integers(0, VOCABULARY, rng.integers(1, 21)).astype(np.int32)
            empty = Trajectory(
                group, sample, prompt, response, np.zeros(len(response), np.float32), 0.0,
                [Span(0, batch, 0, len(response))],
            )  # fmt: skip
            with torch.no_grad():
                behaviour = plain_logprobs(model, empty).numpy()
            behaviour = behaviour + rng.normal(0, 0.3, len(response))
            if sample == 0:
                behaviour[rng.integers(len(response))] = np.nan
            cut = len(response) // 2
            spans = [Span(0, batch - 1, 0, cut), Span(0, batch, cut, len(response))]
            members.append(
                replace(
                    empty,
                    logprobs=behaviour.astype(np.float32),
                    advantage=float(rng.normal()),
                    spans=[span for span in spans if span.end > span.start],
                )
            )
        groups.append(members)
    return groups


class Batch:
    """The mini-batches of one batch, and who trains which part of them.

    `uneven` "absent" leaves the last of several ranks without a sample, "masked" gives it
    nothing but masked ones.
    """

    def __init__(self, groups: list[list[Trajectory]], updates: int, uneven: str = "") -> None:
        self.minis = mini_batches(groups, updates, seed=3, version=0)
        self.uneven = uneven
        if uneven == "masked":
            for mini in self.minis:
                mini[-1] = [replace(item, masked=True) for item in mini[-1]]

    def whole(self) -> list[list[Trajectory]]:
        return [[item for group in mini for item in group] for mini in self.minis]

    def part(self, rank: int, world: int) -> list[list[Trajectory]]:
        if world == 1:
            return self.whole()
        return [self._share(mini, rank, world) for mini in self.minis]

    def _share(self, mini: list[list[Trajectory]], rank: int, world: int) -> list[Trajectory]:
        last = rank == world - 1
        if self.uneven == "masked":
            groups = mini[-1:] if last else share(mini[:-1], world - 1, rank)
        elif self.uneven == "absent":
            groups = [] if last else share(mini, world - 1, rank)
        else:
            groups = share(mini, world, rank)
        return [item for group in groups for item in group]


def make_batches(directory: Path, updates: int) -> list[Batch]:
    """Three optimizer steps, as three batches of one or as one batch of three."""
    if updates == 3:
        return [Batch(make_groups(directory, 0), 3)]
    kinds = ["", "absent", "masked"]
    return [Batch(make_groups(directory, index), 1, kind) for index, kind in enumerate(kinds)]


def reference(directory: Path, kind: str) -> dict[str, Any]:
    """Losses, gradients, norms and final weights of three steps, in plain torch."""
    model, start = (AutoModelForCausalLM.from_pretrained(directory) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    updates = UPDATES[kind]
    algorithm = make_config(1, ALL, TERMS[kind] | {"updates_per_batch": updates}).algorithm
    record: dict[str, Any] = {"loss": [], "grad_norm": [], "gradients": []}
    for batch in make_batches(directory, updates):
        for loss in plain_losses(model, batch, algorithm, start):
            optimizer.zero_grad()
            loss.backward()
            record["loss"].append(loss.item())
            record["gradients"].append(gradients_of(model))
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            record["grad_norm"].append(norm.item())
            optimizer.step()
    record["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record


def plain_objective(home: Path, objective: Objective) -> dict[str, Any]:
    """Losses and gradients of one batch whose steps change nothing."""
    model, other = (AutoModelForCausalLM.from_pretrained(home / d) for d in ("tied", "untied"))
    algorithm = make_config(1, ALL, objective.keys).algorithm
    batch = Batch(make_groups(home / "tied", 0), objective.updates, objective.uneven)
    record: dict[str, Any] = {"loss": [], "gradients": []}
    for loss in plain_losses(model, batch, algorithm, other):
        model.zero_grad()
        loss.backward()
        record["loss"].append(loss.item())
        record["gradients"].append(gradients_of(model))
    return record


def gradients_of(model: Any) -> Weights:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def plain_losses(
    model: Any, batch: Batch, algorithm: AlgorithmSection, reference_model: Any
) -> Iterator[torch.Tensor]:
    """The loss of each mini-batch, made when it is asked for: after the step before it."""
    starts = {}
    if algorithm.updates_per_batch > 1 and algorithm.ratio != "direct":
        with torch.no_grad():
            items = [item for mini in batch.whole() for item in mini]
            starts = {(t.group, t.sample): plain_logprobs(model, t) for t in items}
    for mini in batch.whole():
        responses = {
            (t.group, t.sample): plain_response(model, t, algorithm, starts, reference_model)
            for t in mini
        }
        yield plain_aggregate({key: part for key, part in responses.items() if part}, algorithm)


def plain_response(
    model: Any, item: Trajectory, algorithm: AlgorithmSection, starts: dict[Any, Any], other: Any
) -> list[torch.Tensor]:
    """The loss of each token of a response that counts."""
    if item.masked:
        return []
    logprobs, entropies = plain_scores(model, item)
    start = starts.get((item.group, item.sample), logprobs.detach())
    usable = [i for i, value in enumerate(item.logprobs) if math.isfinite(value)]
    if not usable:
        return []
    gaps = [float(start[i]) - float(item.logprobs[i]) for i in usable]
    mean = math.exp(sum(gaps) / len(gaps))
    with torch.no_grad():
        others = plain_logprobs(other, item)
    losses = []
    for i, gap in zip(usable, gaps, strict=True):
        old = float(start[i]) if starts else float(item.logprobs[i])
        ratio, advantage = torch.exp(logprobs[i] - old), item.advantage
        objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        if advantage < 0:
            objective = objective.clamp(min=10.0 * advantage)
        weight = math.exp(gap)
        factor = {
            "auto": min(weight, 2.0) if starts else 1.0,
            "mask": (weight if starts else 1.0) * (0.8 <= weight <= 1.2),
            "sequence_mask": float(0.8 <= mean <= 1.2),
        }[algorithm.correction]
        loss = -factor * objective - algorithm.entropy_coefficient * entropies[i]
        delta = others[i] - logprobs[i]
        losses.append(loss + algorithm.kl_coefficient * (torch.exp(delta) - 1 - delta))
    return losses


def plain_aggregate(
    responses: dict[tuple[int, int], list[torch.Tensor]], algorithm: AlgorithmSection
) -> torch.Tensor:
    """The loss out of the token losses of each response (group, sample)."""
    tokens = [loss for part in responses.values() for loss in part]
    match algorithm.loss_aggregation:
        case "token":
            return torch.stack(tokens).mean()
        case "sequence":
            return torch.stack([torch.stack(part).mean() for part in responses.values()]).mean()
        case "constant":
            return torch.stack(tokens).sum() / (7.0 * len(responses))
    groups: dict[int, list[torch.Tensor]] = {}
    for (group, _), part in responses.items():
        groups.setdefault(group, []).extend(part)
    return torch.stack([torch.stack(part).mean() for part in groups.values()]).mean()
