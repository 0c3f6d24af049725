"""Who may be inside an engine: so many samples at a time, and nobody new during a weight round."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Gate:
    """A waiting room in front of a limited number of places.

    Samples wait here and not in the engine's own queue, because a sample that has not started
    must not be tied to the weights, and the cached prefixes, of the moment it was asked for.
    For use in one asyncio loop.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._shut = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold one place; waits, first come first served, while there is none or it is shut."""
        while self._shut or self._free <= 0:
            await self._wait()
        self._free -= 1
        try:
            yield
        finally:
            self._free += 1
            self._call()

    def shut(self) -> None:
        """Let nobody in until `open`; who is inside stays."""
        self._shut = True

    def open(self) -> None:
        self._shut = False
        self._call()

    def turn_away(self, error: Exception) -> None:
        """Raise an error like `error` in everyone who waits now."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(type(error)(*error.args))  # each with its own traceback

    async def _wait(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        except BaseException:
            self._waiting.remove(waiter)
            self._call()  # it may have been called already: its turn goes to the next
            raise
        self._waiting.remove(waiter)

    def _call(self) -> None:
        """Wake as many as there are places; who was woken and has not yet come in counts too."""
        if self._shut:
            return
        for _, waiter in zip(range(self._free), self._waiting, strict=False):
            if not waiter.done():
                waiter.set_result(None)
