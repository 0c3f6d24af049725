"""What a checkpoint holds of a training engine: weights, optimizer, random numbers of every rank.

`checkpoint` makes the directory durable; this is what is in it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common.errors import CheckpointError
from learner.checkpoint import saving

STATE, FACTS = "state", "learner.json"
UNIVERSAL = "universal"
"""A fact of a copy that any number of ranks can load (`learner.reshape`)."""


def save_state(engine: Any, directory: Path, facts: dict[str, Any]) -> None:
    """Every rank writes its part; `facts` is what a reader must have in common with the writer."""
    rank = dist.get_rank()
    with saving(directory):
        engine.save_checkpoint(str(directory), tag=STATE, save_latest=False)
        torch.save(random_state(), directory / f"random_{rank}.pt")
        if rank == 0:
            (directory / FACTS).write_text(json.dumps(facts))
    dist.barrier()


def load_state(engine: Any, directory: Path, facts: dict[str, Any]) -> None:
    """Restore what `save_state` wrote, into an engine that has not trained yet.

    Raises:
        CheckpointError: missing or unreadable, or other facts; the message names the remedy.
    """
    try:
        written = json.loads((directory / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} holds no learner state: {error}") from None
    universal = written.get(UNIVERSAL, False)
    for key, here in facts.items():
        if written.get(key) != here and not (universal and key == "learner.ranks"):
            there = written.get(key)
            raise CheckpointError(
                f"{directory} was saved with {key} = {there}, this learner has {here}; "
                f"set {key} = {there}, or `dapo export` it and start a new run from there"
            )
    # a rank that was not there before has the numbers of one that was
    numbers = directory / f"random_{dist.get_rank() % written['learner.ranks']}.pt"
    engine._config.load_universal_checkpoint = universal
    loaded, _ = engine.load_checkpoint(str(directory), tag=STATE)
    engine._config.load_universal_checkpoint = False
    if loaded is None or not numbers.exists():
        raise CheckpointError(f"{directory} is incomplete; use an older checkpoint")
    set_random_state(torch.load(numbers, weights_only=True))
    dist.barrier()


def random_state() -> dict[str, Any]:
    """State of every generator, as tensors and plain numbers: readable without pickle."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
