"""The learner on 1, 2 and 3 ranks, ZeRO 1 to 3, against plain torch in one process.

One spawn per number of ranks trains everything and returns what it measured; each test then
proves one sentence about it. The model is a tiny random Qwen2 in fp32, tied and untied.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common.buckets import plan_buckets
from common.config import Config, parse_config
from common.errors import CheckpointError, NumericalError
from common.messages import Span
from learner.batch import Trajectory, mini_batches, share

pytestmark = pytest.mark.slow

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
CASES = [("tied", stage, budget) for stage in STAGES for budget in (ONE, ALL)]
CASES += [("untied", stage, SOME) for stage in STAGES]
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
}
Weights = dict[str, torch.Tensor]


def make_config(
    stage: int, budget: int, updates: int = 1, model: dict[str, Any] | None = None, **learner: Any
) -> Config:
    return parse_config(
        {
            "model": {"path": "tiny", "dtype": "float32", **(model or {})},
            "data": {"train": []},
            "sampling": {"temperature": TEMPERATURE},
            "algorithm": {"groups_per_batch": 6, "updates_per_batch": updates},
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


def plain_logprobs(model: Any, item: Trajectory) -> torch.Tensor:
    """Log-probs of a response out of the whole logits of one unpadded sequence."""
    ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.response_ids])).long()
    logits = model(input_ids=ids[None]).logits[0, len(item.prompt_ids) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[len(item.prompt_ids) :, None])[:, 0]


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


# The plain reference


def reference(directory: Path, updates: int) -> dict[str, Any]:
    """Losses, gradients, norms and final weights of three steps, in plain torch."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    record: dict[str, Any] = {"loss": [], "grad_norm": [], "gradients": []}
    for batch in make_batches(directory, updates):
        olds = {}
        if updates > 1:
            with torch.no_grad():
                items = [item for mini in batch.whole() for item in mini]
                olds = {(t.group, t.sample): plain_logprobs(model, t) for t in items}
        for mini in batch.whole():
            optimizer.zero_grad()
            loss = plain_loss(model, mini, olds)
            loss.backward()
            record["loss"].append(loss.item())
            record["gradients"].append(
                {name: p.grad.clone() for name, p in model.named_parameters()}
            )
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            record["grad_norm"].append(norm.item())
            optimizer.step()
    record["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return record


def plain_loss(model: Any, mini: Sequence[Trajectory], olds: dict[Any, Any]) -> torch.Tensor:
    total, tokens = torch.zeros(()), 0
    for item in mini:
        for index, logprob in enumerate(plain_logprobs(model, item)):
            behaviour = float(item.logprobs[index])
            if item.masked or not math.isfinite(behaviour):
                continue
            old = olds[item.group, item.sample][index].item() if olds else behaviour
            weight = min(math.exp(old - behaviour), 2.0) if olds else 1.0
            ratio, advantage = torch.exp(logprob - old), item.advantage
            objective = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            if advantage < 0:
                objective = objective.clamp(min=10.0 * advantage)
            total = total - weight * objective
            tokens += 1
    return total / tokens


# What each rank runs


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run_rank(rank: int, world: int, port: int, home: Path) -> None:
    """Train every case; rank 0 writes what it measured."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    from learner import runtime

    runtime.PERSIST_BELOW = 1200  # so that ZeRO-3 cuts some weights and keeps others whole
    results: dict[Any, Any] = {}
    for kind, stage, budget in CASES:
        updates = 1 if kind == "tied" else 3
        results[kind, stage, budget] = train_case(home / kind, stage, budget, updates)
    for stage in STAGES if world == PAIR else ():
        results["resume", stage] = resume_case(home, stage)
        results["still", stage] = still_case(home / "tied", stage)
        results["poison", stage] = poison_case(home / "tied", stage)
        for kind, model in VARIANTS.items():
            results[kind, stage] = variant_case(home / "tied", stage, model)
    if rank == 0:
        torch.save(results, home / f"results_{world}.pt")


def recording_engine(directory: Path, config: Config) -> Any:
    """An engine that keeps the gradients it is about to step with."""
    from deepspeed.utils import safe_get_full_grad

    from learner.engine import TrainEngine

    class Recording(TrainEngine):
        def _step(self, loss: float, where: str) -> float:
            gradients = {name: safe_get_full_grad(p).clone() for name, p in self._parameters}
            norm = super()._step(loss, where)
            record["loss"].append(loss)
            record["grad_norm"].append(norm)
            record["gradients"].append(gradients)
            return norm

    record: dict[str, Any] = {"loss": [], "grad_norm": [], "gradients": []}
    engine = Recording(config, directory)
    engine.record = record  # type: ignore[attr-defined]
    return engine


def weights_of(engine: Any, bucket_bytes: int = 10_000) -> Weights:
    """Every weight out of `buckets`, in fp32; empty on other ranks than 0."""
    weights: Weights = {}
    for entries, flat in engine.buckets(bucket_bytes, torch.float32):
        assert (flat is None) == (engine.rank != 0)
        if flat is not None:
            assert flat.nbytes <= bucket_bytes or len(entries) == 1
            parts = flat.split([math.prod(shape) for _, shape in entries])
            for (name, shape), part in zip(entries, parts, strict=True):
                weights[name] = part.view(shape).clone()
    return weights


def train_case(directory: Path, stage: int, budget: int, updates: int) -> dict[str, Any]:
    engine = recording_engine(directory, make_config(stage, budget, updates))
    initial = weights_of(engine)  # before any forward pass: ZeRO-3 has gathered nothing yet
    groups = make_groups(directory, 0)
    pairs = [(t.prompt_ids, t.response_ids) for group in groups for t in group]
    scores = engine.score(pairs if engine.rank == 0 else pairs[:1], TEMPERATURE)
    metrics = [
        engine.train_batch(batch.part(engine.rank, engine.world), version)
        for version, batch in enumerate(make_batches(directory, updates))
    ]
    return {
        **engine.record,
        "initial": initial,
        "scores": scores,
        "metrics": metrics,
        "manifest": engine.manifest(),
        "weights": weights_of(engine),
        "steps": engine.steps,
    }


def resume_case(home: Path, stage: int) -> dict[str, Any]:
    """Three batches at once, and three with a save and a new engine after the first."""
    directory, saved = home / "tied", home / f"checkpoint_{stage}"
    batches = make_batches(directory, 1)

    def train(engine: Any, versions: Sequence[int]) -> None:
        for version in versions:
            engine.set_learning_rate(version + 1)
            engine.train_batch(batches[version].part(engine.rank, engine.world), version)

    config = make_config(stage, SOME, warmup_batches=2)
    first = recording_engine(directory, config)
    train(first, [0])
    first.save(saved)
    drawn = torch.rand(3), np.random.rand(3), random.random()
    train(first, [1, 2])
    second = recording_engine(directory, config)
    second.load(saved)
    again = torch.rand(3), np.random.rand(3), random.random()
    steps = second.steps
    train(second, [1, 2])
    exported = home / f"export_{stage}"
    second.export_hf(exported, directory)
    refused = ""
    other = home / f"other_{stage}"
    if first.rank == 0:
        other.mkdir()
        facts = json.loads((saved / "learner.json").read_text())
        (other / "learner.json").write_text(json.dumps(facts | {"learner.ranks": PAIR + 1}))
    torch.distributed.barrier()
    try:
        second.load(other)
    except CheckpointError as error:
        refused = str(error)
    return {
        "uninterrupted": weights_of(first),
        "resumed": weights_of(second),
        "steps": steps,
        "random": all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True)),
        "refused": refused,
        "exported": load_weights(exported) if first.rank == 0 else {},
    }


def spoil_gradient(engine: Any, factor: float) -> None:
    """Multiply the gradients of one rank, not the loss, by a factor."""

    def count(*args: Any) -> torch.Tensor:
        loss = type(engine)._count(engine, *args)
        loss.register_hook(lambda gradient: gradient * factor)
        return loss

    engine._count = count


def load_weights(directory: Path) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(directory)
    return {name: p.detach() for name, p in model.named_parameters()}


def still_case(directory: Path, stage: int) -> bool:
    engine = recording_engine(directory, make_config(stage, SOME, learning_rate=0.0))
    before = weights_of(engine)
    engine.train_batch(make_batches(directory, 1)[0].part(engine.rank, engine.world), 0)
    after = weights_of(engine)
    return engine.steps == 1 and all(torch.equal(before[name], after[name]) for name in before)


def variant_case(directory: Path, stage: int, model: dict[str, Any]) -> dict[str, Any]:
    """Scores and the figures of one batch under other settings of [model]."""
    engine = recording_engine(directory, make_config(stage, SOME, model=model))
    pairs = [(t.prompt_ids, t.response_ids) for g in make_groups(directory, 0) for t in g]
    scores = np.concatenate(engine.score(pairs, TEMPERATURE))
    batch = make_batches(directory, 1)[0]
    figures = engine.train_batch(batch.part(engine.rank, engine.world), 0)
    return {"scores": scores, "loss": figures["loss"], "grad_norm": figures["grad_norm"]}


def poison_case(directory: Path, stage: int) -> dict[str, Any]:
    """A gradient, a loss and a weight that are not finite, each on one rank only."""
    from learner.engine import deepspeed

    engine = recording_engine(directory, make_config(stage, SOME))
    part = make_batches(directory, 1)[0].part(engine.rank, engine.world)[0]
    infinite = [replace(part[0], advantage=math.inf), *part[1:]]
    before = weights_of(engine)
    messages = []
    for mini, factor in ((part, math.nan), (infinite if engine.rank else part, 1.0)):
        if engine.rank == 0:
            spoil_gradient(engine, factor)
        try:
            engine.train_batch([mini], version=4)
        except NumericalError as error:
            messages.append(str(error))
    after = weights_of(engine)
    name, parameter = engine._parameters[1]
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=stage == 3):
        if stage < 3 or engine.rank == 0:
            parameter.data[-1, -1] = math.nan
    seen = 0
    try:
        for _ in engine.buckets(10_000, torch.float32):
            seen += 1
    except NumericalError as error:
        messages.append(str(error))
    return {
        "messages": messages,
        "buckets_before_error": seen,
        "poisoned": name,
        "unchanged": all(torch.equal(before[key], after[key]) for key in before),
    }


# The tests


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("learner")
    make_model(directory / "tied", tied=True)
    make_model(directory / "untied", tied=False)
    return directory


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {"tied": reference(home / "tied", 1), "untied": reference(home / "untied", 3)}


def spawn(world: int, home: Path) -> dict[Any, Any]:
    """Results of `run_rank` on this many ranks."""
    path = home / f"results_{world}.pt"
    if not path.exists():
        # A fork server imports the heavy libraries once for all ranks of all spawns.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["learner.engine", "deepspeed.runtime.zero.utils"])
        port = free_port()
        ranks = [
            context.Process(target=run_rank, args=(rank, world, port, home))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + 240
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # a rank that hangs must not outlive the test
        assert [process.exitcode for process in ranks] == [0] * world
    loaded: dict[Any, Any] = torch.load(path, weights_only=False)
    return loaded


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world}ranks")
def results(request: pytest.FixtureRequest, home: Path) -> dict[Any, Any]:
    return spawn(request.param, home)


@pytest.fixture(scope="module")
def pair(home: Path) -> dict[Any, Any]:
    return spawn(PAIR, home)


def distance(found: Weights, wanted: Weights, scale: Weights | None = None) -> float:
    """Largest ‖found − wanted‖ / ‖scale‖ over the tensors; the scale is `wanted` itself."""
    assert list(found) == list(wanted)
    return max(
        float((found[name] - wanted[name]).norm() / (scale or wanted)[name].norm())
        for name in wanted
    )


def flat(weights: Weights) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in weights.values()])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_plain_torch_for_every_split(
    case: Any, results: dict[Any, Any], expected: dict[str, Any]
) -> None:
    """Losses, norms and gradients to 1e-5, weights to 1e-6, each tensor's movement to 1e-3.

    The movement is looser because Adam divides by the gradient's size: an element whose gradient
    is near zero moves by the sign of its rounding error. Biases start at zero, so all of their
    weight is movement.
    """
    found, wanted = results[case], expected[case[0]]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    for mine, plain in zip(found["gradients"], wanted["gradients"], strict=True):
        assert distance(mine, plain) < 1e-5
    weights, initial = wanted["weights"], found["initial"]
    difference = flat(found["weights"]) - flat(weights)
    assert difference.norm() / flat(weights).norm() < 1e-6
    moved = {name: weights[name] - initial[name] for name in initial}
    assert distance(found["weights"], weights, moved) < 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_buckets_hold_the_checkpoint_and_tied_weights_once(
    case: Any, results: dict[Any, Any], home: Path
) -> None:
    stored = load_file(home / case[0] / "model.safetensors")
    initial = results[case]["initial"]
    assert sorted(initial) == sorted(stored)
    assert all(torch.equal(initial[name], stored[name]) for name in stored)
    assert ("lm_head.weight" in initial) == (case[0] == "untied")
    manifest = results[case]["manifest"]
    assert manifest == [(name, tuple(tensor.shape)) for name, tensor in initial.items()]
    sizes = [4 * math.prod(shape) for _, shape in manifest]
    assert sum(plan_buckets(sizes, 10_000), []) == list(range(len(manifest)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_those_of_unpadded_sequences(
    case: Any, results: dict[Any, Any], home: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / case[0])
    items = [item for group in make_groups(home / case[0], 0) for item in group]
    with torch.no_grad():
        for item, score in zip(items, results[case]["scores"], strict=True):
            plain = plain_logprobs(model, item).numpy()
            np.testing.assert_allclose(score, plain, rtol=1e-5, atol=1e-5)


def test_metrics_are_the_same_for_every_split(results: dict[Any, Any]) -> None:
    plain = results["tied", 1, ALL]["metrics"]
    assert [figures["tokens_trained"] > 50 for figures in plain] == [True] * 3
    assert set(plain[1]["gap_by_age"]) == {0, 1}
    assert all(figures["tokens_nonfinite"] >= 5 for figures in plain)
    for _, stage, budget in [case for case in CASES if case[0] == "tied"]:
        for mine, other in zip(results["tied", stage, budget]["metrics"], plain, strict=True):
            assert mine["gap_by_age"] == pytest.approx(other["gap_by_age"], rel=1e-5, abs=1e-6)
            scalars = {key: value for key, value in other.items() if key != "gap_by_age"}
            same = {key: mine[key] for key in scalars}
            assert same == pytest.approx(scalars, rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    stage: int, pair: dict[Any, Any]
) -> None:
    found = pair["resume", stage]
    for name, weight in found["uninterrupted"].items():
        assert torch.equal(found["resumed"][name], weight), name
    assert found["steps"] == 1
    assert found["random"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_loads_in_transformers_with_the_same_weights(
    stage: int, pair: dict[Any, Any]
) -> None:
    found = pair["resume", stage]
    assert all(torch.equal(found["exported"][name], w) for name, w in found["resumed"].items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_other_ranks_is_refused_with_the_remedy(
    stage: int, pair: dict[Any, Any]
) -> None:
    assert "set learner.ranks = " in pair["resume", stage]["refused"]


@pytest.mark.parametrize("stage", STAGES)
def test_learning_rate_zero_leaves_the_weights_bit_identical(
    stage: int, pair: dict[Any, Any]
) -> None:
    assert pair["still", stage]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_changes_no_weight_and_is_not_published(
    stage: int, pair: dict[Any, Any]
) -> None:
    found = pair["poison", stage]
    norm, loss, weight = found["messages"]
    assert "batch 5, mini-batch 1" in norm and "gradient norm" in norm
    assert "batch 5, mini-batch 1" in loss and "the loss is" in loss
    assert found["poisoned"] in weight
    assert found["unchanged"] and found["buckets_before_error"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_gives_the_same_scores_in_every_zero_stage_and_nearly_the_loss_of_fp32(
    stage: int, pair: dict[Any, Any], expected: dict[str, Any]
) -> None:
    found = pair["bf16", stage]
    np.testing.assert_array_equal(found["scores"], pair["bf16", 1]["scores"])
    assert found["loss"] == pytest.approx(expected["tied"]["loss"][0], rel=0.05)
    assert found["grad_norm"] == pytest.approx(expected["tied"]["grad_norm"][0], rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_checkpointing_changes_memory_and_not_the_step(
    stage: int, pair: dict[Any, Any], expected: dict[str, Any]
) -> None:
    found = pair["checkpointing", stage]
    assert found["loss"] == pytest.approx(expected["tied"]["loss"][0], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["tied"]["grad_norm"][0], rel=1e-5)
