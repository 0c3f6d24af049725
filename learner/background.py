"""An event loop in a thread of its own: the streams go on while the main thread trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

CALL_S = 300.0
"""Limit of one call on a server that answers."""
Result = TypeVar("Result")


class Background:
    """A running loop; the main thread hands it coroutines and waits for their results.

    `patience_s` is how long a call may wait for a server that is away.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self.limit_s = CALL_S + patience_s
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="streams", daemon=True)
        self._thread.start()
        self._task: asyncio.Task[None] | None = None

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Run a coroutine in the loop and wait for it, `limit_s` by default.

        Raises:
            TimeoutError: it has not ended by then; what it did is not known.
            Exception: its own.
        """
        limit_s = self.limit_s if timeout_s is None else timeout_s
        name = getattr(work, "__qualname__", "a call")
        future = self.submit(work)
        done, _ = wait([future], limit_s)
        if not done:
            future.cancel()
            raise TimeoutError(f"{name} did not end within {limit_s:g} s; the learner starts again")
        return future.result()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the work that goes on for ever; `check` raises what ended it."""

        async def start() -> None:
            self._task = asyncio.create_task(work)

        self.call(start())

    def check(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """End the work that goes on, run `last`, and end the loop."""

        async def end() -> None:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            await last

        self.call(end(), timeout_s=10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
