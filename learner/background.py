"""An event loop in a thread of its own: the streams go on while the main thread trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Background:
    """A running loop; the main thread hands it coroutines and waits for their results."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="streams", daemon=True)
        self._thread.start()
        self._task: asyncio.Task[None] | None = None

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float = 300.0) -> Result:
        """Run a coroutine in the loop and wait for it. Its error is raised here."""
        return self.submit(work).result(timeout_s)

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
