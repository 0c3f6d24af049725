"""What is done to a run, in which order: a pure function of a seed.

A blow is due after so many batches since the last one, and then a little later, so that it falls
into any phase of a batch. Blows that are due after no batch at all come upon the one before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "cut"]

KILLED = {"generator": 45, "verifier": 25, "learner": 12, "server": 13, "supervisor": 5}
"""Roles that are killed (-9), by weight."""
STOPPED = {"generator": 40, "verifier": 25, "learner": 15, "server": 20}
"""Roles that are stopped for a while and go on, by weight."""
CUT = {"client": 3, "clients": 1}
"""Connections to the server that are cut: one, or all."""
MIX: Mapping[Kind, int] = {"kill": 4, "stop": 1, "cut": 1}
LONGEST_STOP_S = 7.0
"""Beyond the lease, the timeout of a call and the deadlines of a round of the recipe."""


@dataclass(frozen=True)
class Blow:
    """One fault. `pick` chooses among several of a role; `seconds` is how long it stands still."""

    kind: Kind
    target: str
    after: int
    delay_s: float
    pick: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.target}{f' for {self.seconds:.1f} s' if self.seconds else ''}"


def blows(
    seed: int, gap: float = 1.0, mix: Mapping[Kind, int] = MIX, spared: frozenset[str] = frozenset()
) -> Iterator[Blow]:
    """Blows without end, `gap` batches apart on average; roles in `spared` get none."""
    rng = random.Random(f"chaos:{seed}")
    targets: dict[Kind, Mapping[str, int]] = {"kill": KILLED, "stop": STOPPED, "cut": CUT}
    while True:
        kind = _draw(rng, mix)
        target = _draw(rng, {name: n for name, n in targets[kind].items() if name not in spared})
        yield Blow(
            kind=kind,
            target=target,
            after=int(rng.expovariate(1 / gap) + 0.5),
            delay_s=rng.uniform(0.0, 1.0),
            pick=rng.randrange(1000),
            seconds=round(rng.uniform(0.3, LONGEST_STOP_S), 1) if kind == "stop" else 0.0,
        )


def _draw(rng: random.Random, weights: Mapping[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
