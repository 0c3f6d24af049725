"""What a role says of itself besides its work: memory, event loop, errors, and where time goes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from common.broker import dead_letters_so_far
from common.log import errors_so_far
from common.process import rss_mib

TICK_S = 0.1
"""How often the event loop is asked to be on time."""


class Clock:
    """Seconds spent in each state of a role; it is in one of them at any time.

    Totals only grow, so that a rate can be taken of them. Shares are those since the oldest of the
    last `marks` calls of `mark`. Any thread may read while another one enters states.
    """

    def __init__(
        self, *states: str, marks: int = 12, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(states, 0.0)
        self._state, self._since = states[0], now()
        self._marks = deque([self.totals()], maxlen=marks)

    def enter(self, state: str) -> None:
        """The role is in this state from now on."""
        with self._lock:
            now = self._now()
            self._seconds[self._state] += now - self._since
            self._state, self._since = state, now

    def totals(self) -> dict[str, float]:
        """Seconds by state since the start, the present state included."""
        with self._lock:
            present = self._seconds[self._state] + self._now() - self._since
            return self._seconds | {self._state: present}

    def mark(self) -> None:
        """Begin another piece of the window that `shares` looks at."""
        self._marks.append(self.totals())

    def shares(self) -> dict[str, float]:
        """Share of the window by state; they add up to 1, or are 0 before any time has passed."""
        now, first = self.totals(), self._marks[0]
        spent = {state: seconds - first[state] for state, seconds in now.items()}
        whole = sum(spent.values()) or 1.0
        return {state: seconds / whole for state, seconds in spent.items()}


class Vitals:
    """The part of a role's report that every role has."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lag_s = 0.0

    async def watch_loop(self) -> None:
        """Measure, for ever, by how much the event loop is late; to be run as a task of it."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag_s = max(self._lag_s, time.monotonic() - due)

    def figures(self) -> dict[str, Any]:
        """Memory, the worst lag since the last call, seconds and shares by state, errors.

        `last_error` is text, empty if there was none, and `last_error_time` when it was logged.
        """
        lag, self._lag_s = self._lag_s, 0.0
        count, when, what = errors_so_far()
        return {
            "time": time.time(),
            "rss_mib": round(rss_mib()),
            "lag_s": round(lag, 3),
            "seconds": {name: round(value, 3) for name, value in self.clock.totals().items()},
            "shares": {name: round(value, 4) for name, value in self.clock.shares().items()},
            "errors_logged": count,
            "last_error": what,
            "last_error_time": when,
            "dead_letters": dead_letters_so_far(),
        }
