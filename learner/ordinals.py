"""Which ordinal goes out next: holes of a crash first, then prompts that came back, then new ones.

No I/O. A prompt that was lost comes back under an ordinal of its own, later in its epoch and not at
the head of the queue: sent out again at once, slow prompts would be started more often than others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable

from common.ledger import Line
from common.messages import is_deadly
from common.order import base_ordinal, generation, recycled


class Ordinals:
    """The sequence of a run. `recycles` is how often a prompt may come back, `after` how many new
    ordinals later; `taken` says whether an ordinal is open or has its fate."""

    def __init__(self, recycles: int, after: int, taken: Callable[[int], bool]) -> None:
        self.recycles, self.after, self.taken = recycles, after, taken
        self.next_new = 0
        self.holes: deque[int] = deque()
        self._pool: deque[tuple[int, int]] = deque()

    def restore(self, known: Collection[int], lines: Iterable[Line]) -> None:
        """After a restart: `known` are open or have a fate, `lines` are the ledger's."""
        self.next_new = max(map(base_ordinal, known), default=-1) + 1
        self.holes.extend(o for o in range(self.next_new) if not self.taken(o))
        for line in lines:
            self.give_back(line)

    def next(self) -> int:
        """The ordinal to dispatch now; the caller opens it."""
        if self.holes:
            return self.holes.popleft()
        if self._pool and self._pool[0][0] <= self.next_new:
            return self._pool.popleft()[1]
        self.next_new += 1
        return self.next_new - 1

    def give_back(self, line: Line) -> None:
        """The prompt of a group that was lost comes back, if its budget allows.

        One that its workers died of does not: each time it would take some more of them along.
        """
        child = recycled(line.ordinal)
        if line.fate not in ("stale", "failed") or self.taken(child) or is_deadly(line.reason):
            return
        if generation(child) <= self.recycles:
            self._pool.append((base_ordinal(line.ordinal) + self.after, child))

    @property
    def coming_back(self) -> int:
        """Prompts that will go out again."""
        return len(self._pool)
