"""What each rank of the learner's tests runs, and how ranks are started."""

from __future__ import annotations

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
import torch
from transformers import AutoModelForCausalLM

from common.config import Config
from common.errors import CheckpointError, NumericalError
from tests.integration.plain_learner import (
    CASES,
    OBJECTIVES,
    PAIR,
    SOME,
    SPLITS,
    STAGES,
    TEMPERATURE,
    TERMS,
    UPDATES,
    VARIANTS,
    Batch,
    Weights,
    make_batches,
    make_config,
    make_groups,
)


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
    for kind, stage in CASES:
        results[kind, stage] = train_case(home / kind, stage)
    for stage in STAGES:
        results["objectives", stage] = objective_case(home, stage)
    for stage in STAGES if world == PAIR else ():
        results["resume", stage] = resume_case(home, stage)
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
            named = self._weights.parameters
            gradients = {name: safe_get_full_grad(p).clone() for name, p in named}
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


def train_case(directory: Path, stage: int) -> dict[str, Any]:
    updates = UPDATES[directory.name]
    keys = TERMS[directory.name] | {"updates_per_batch": updates}
    engine = recording_engine(directory, make_config(stage, SOME, keys))
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


def objective_case(home: Path, stage: int) -> dict[Any, Any]:
    """Losses, gradients and figures of every objective in every split; and what became of the
    weights at learning rate 0."""
    from learner.reference import load_reference

    engine = recording_engine(home / "tied", make_config(stage, SOME, learning_rate=0.0))
    with_kl = make_config(stage, SOME, {"kl_coefficient": 1.0})
    other = load_reference(with_kl, home / "untied", engine.world, engine.device)
    before = weights_of(engine)
    found: dict[Any, Any] = {}
    for name, objective in OBJECTIVES.items():
        batch = Batch(make_groups(home / "tied", 0), objective.updates, objective.uneven)
        for layout, budget in SPLITS[name]:
            engine._config = make_config(stage, budget, objective.keys, learning_rate=0.0)
            engine._layout = layout
            engine._reference = other if "kl_coefficient" in objective.keys else None
            engine.record.update(loss=[], grad_norm=[], gradients=[])
            figures = engine.train_batch(batch.part(engine.rank, engine.world), 0)
            found[name, layout, budget] = dict(engine.record) | {"figures": figures}
    after = weights_of(engine)
    found["still"] = all(torch.equal(before[key], after[key]) for key in before)
    return found


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

    def forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprob_N, entropy_N = type(engine)._forward(engine, *args)
        logprob_N.register_hook(lambda gradient: gradient * factor)
        return logprob_N, entropy_N

    engine._forward = forward


def load_weights(directory: Path) -> Weights:
    model = AutoModelForCausalLM.from_pretrained(directory)
    return {name: p.detach() for name, p in model.named_parameters()}


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
    name, parameter = engine._weights.parameters[1]
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
        deadline = time.monotonic() + 500
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # a rank that hangs must not outlive the test
        assert [process.exitcode for process in ranks] == [0] * world
    loaded: dict[Any, Any] = torch.load(path, weights_only=False)
    return loaded
