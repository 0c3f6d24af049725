"""What each rank runs to show that a checkpoint of other ranks is the same state.

Two batches are trained and saved on one rank and on two; then each world loads the other's
checkpoint and trains the third batch.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.learner_ranks import free_port, weights_of
from tests.integration.plain_learner import SOME, Weights, make_batches, make_config

CASES = [(1, "float32"), (2, "float32"), (3, "float32"), (1, "bfloat16")]
WORLDS = (1, 2)
DEADLINE_S = 400.0


def make_engine(home: Path, stage: int, dtype: str) -> Any:
    from learner.engine import TrainEngine

    config = make_config(stage, SOME, model={"dtype": dtype}, weight_decay=0.01)
    return TrainEngine(config, home / "tied")


def train(engine: Any, home: Path, version: int) -> None:
    engine.set_learning_rate(version + 1)
    batch = make_batches(home / "tied", 1)[version]
    engine.train_batch(batch.part(engine.rank, engine.world), version)


def optimizer_state(engine: Any) -> dict[str, Weights]:
    """Master weights and both moments of every parameter, whole."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    state: dict[str, Weights] = {}
    for name, parameter in engine._weights.parameters:
        state[name] = {
            "weight": safe_get_full_fp32_param(parameter).detach().cpu().clone(),
            "exp_avg": safe_get_full_optimizer_state(parameter, "exp_avg").cpu().clone(),
            "exp_avg_sq": safe_get_full_optimizer_state(parameter, "exp_avg_sq").cpu().clone(),
        }
    return state


def saved(home: Path, stage: int, dtype: str, world: int) -> Path:
    return home / f"saved_{stage}_{dtype}_{world}"


def save_case(home: Path, stage: int, dtype: str) -> dict[str, Any]:
    engine = make_engine(home, stage, dtype)
    for version in (0, 1):
        train(engine, home, version)
    engine.save(saved(home, stage, dtype, engine.world))
    state = optimizer_state(engine)
    train(engine, home, 2)
    return {"state": state, "weights": weights_of(engine)}


def load_case(home: Path, stage: int, dtype: str, other: int) -> dict[str, Any]:
    from learner.reshape import discard, for_ranks

    engine = make_engine(home, stage, dtype)
    directory = saved(home, stage, dtype, other)
    folder = [str(for_ranks(directory, engine.world))] if engine.rank == 0 else [""]
    dist.broadcast_object_list(folder)
    engine.load(Path(folder[0]))
    if engine.rank == 0:
        discard(Path(folder[0]))
    steps, state = engine.steps, optimizer_state(engine)
    train(engine, home, 2)
    return {
        "state": state,
        "weights": weights_of(engine),
        "steps": steps,
        "converted": Path(folder[0]) != directory,
        "left": Path(folder[0]).exists(),
    }


def run_rank(rank: int, world: int, port: int, home: Path, other: int | None) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    from learner import runtime

    runtime.PERSIST_BELOW = 1200  # so that ZeRO-3 cuts some weights and keeps others whole
    results = {
        case: load_case(home, *case, other) if other else save_case(home, *case) for case in CASES
    }
    if rank == 0:
        torch.save(results, home / f"{'loaded' if other else 'saved'}_{world}.pt")


def spawn(world: int, home: Path, other: int | None = None) -> dict[Any, Any]:
    """Save on so many ranks, or load what as many others have saved; what rank 0 measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["learner.engine", "learner.reshape"])
    port = free_port()
    ranks = [
        context.Process(target=run_rank, args=(rank, world, port, home, other))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * world
    path = home / f"{'loaded' if other else 'saved'}_{world}.pt"
    loaded: dict[Any, Any] = torch.load(path, weights_only=False)
    return loaded
