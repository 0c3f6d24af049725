"""The words of admission: an open group, the answers to "may a batch be trained?", the counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["hold", "drop"]
"""What becomes of a batch that would cost a slower group its last slot: it waits, or goes ahead."""


@dataclass(slots=True)
class Group:
    """An open group. Read-only outside `learner.admission`, save to build one for `restore`."""

    ordinal: int
    oldest: int
    accepted: bool = False
    generated: bool = False
    started: bool = True  # claimed by a generator, or holding tokens; if unsure, say so


@dataclass(frozen=True, slots=True)
class Train:
    """Form the next batch of these B groups, in order."""

    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hold:
    """A batch is there, but would cost these pending groups their last slot: wait for them."""

    for_whom: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Starved:
    """So many accepted groups are missing to a batch."""

    missing: int


Decision = Train | Hold | Starved


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of groups. `pending = unclaimed + generating + judging` is what has no verdict;
    `open = pending + accepted + training` is what counts against `capacity`."""

    open: int
    unclaimed: int
    generating: int
    judging: int
    accepted: int
    training: int
    pending: int
    capacity: int
