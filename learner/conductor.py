"""Rank 0 decides each turn and tells the other ranks, so that collectives never interleave.

Turns travel over a gloo group of their own as length-prefixed JSON. Rank 0 tells one at least
every few seconds (`wait` if there is nothing to do), so that no watchdog fires on an idle learner.
What rank 0 does alone (a round's handshake, writing a manifest) counts against the deadline.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from learner.runtime import COLLECTIVE_S


@dataclass
class Turn:
    """One thing that all ranks do together."""

    do: str
    version: int = 0
    plan: dict[str, Any] = field(default_factory=dict)


class Conductor:
    """Rank 0 speaks, the others listen; with one rank it is silent."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        limit = timedelta(seconds=COLLECTIVE_S)
        self._group = dist.new_group(backend="gloo", timeout=limit) if self.world > 1 else None

    def tell(self, turn: Turn) -> Turn:
        """Rank 0: announce a turn to all."""
        if self._group is not None:
            data = torch.frombuffer(bytearray(json.dumps(asdict(turn)).encode()), dtype=torch.uint8)
            dist.broadcast(torch.tensor([data.numel()]), 0, group=self._group)
            dist.broadcast(data, 0, group=self._group)
        return turn

    def hear(self) -> Turn:
        """Other ranks: wait for the next turn."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        return Turn(**json.loads(data.numpy().tobytes()))

    def go_on(self, mine: bool) -> bool:
        """Rank 0's answer, on every rank: whether a loop in step goes on."""
        return bool(self._agree(int(mine) if self.rank == 0 else 1, dist.ReduceOp.MIN))

    def all_well(self, mine: bool) -> bool:
        """Whether every rank says yes."""
        return bool(self._agree(int(mine), dist.ReduceOp.MIN))

    def _agree(self, value: int, operation: Any) -> int:
        if self._group is None:
            return value
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, op=operation, group=self._group)
        return int(tensor)
