"""Killable processes for checkers that may hang, crash or eat memory.

Every check has a hard deadline; a process past it is killed, joined and replaced by another,
and the sample's outcome is "error: timeout". Processes have a memory limit and die with the
process that started the pool. Fast checkers run in the caller's process. No signals are used
for deadlines: they fail off the main thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
import resource
import signal
from collections.abc import Callable, Mapping
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from common.process import die_with_parent
from verifier import own_checkers, registry
from verifier.outcome import Verdict, error, shorten

_MIB = 2**20
# A worker that dies between two checks breaks pebble's pool, which is then built anew.
_ATTEMPTS = 3


class CheckerPool:
    """Runs checkers by name; construct and use it in a thread that outlives it.

    The workers ask the kernel to be killed with the thread that started them, hence the
    thread. `deadline_s` is the time for one check once a worker has begun it, `memory_mib`
    the address space of a worker, `warm` the checkers that workers load before their first
    check, so that no deadline pays for an import.
    """

    def __init__(
        self,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mib: int = 2048,
        max_checks_per_worker: int = 1000,
        warm: tuple[str, ...] = ("math_verify",),
    ) -> None:
        if workers < 1 or deadline_s <= 0 or memory_mib < 256:
            raise ValueError(
                f"a checker pool needs workers >= 1, a deadline > 0 s and memory >= 256 MiB; "
                f"got {workers}, {deadline_s} and {memory_mib}"
            )
        self.workers = workers
        self.deadline_s = deadline_s
        self._memory_bytes, self._warm = memory_mib * _MIB, warm
        self._max_checks = max_checks_per_worker
        self._pool: ProcessPool | None = None
        self._closed = False
        self._flying: dict[ProcessFuture[Verdict], ProcessPool] = {}
        self._ending: set[asyncio.Task[None]] = set()
        # pebble's queue is unbounded; a waiter here can be cancelled without a trace
        self._slots = asyncio.Semaphore(workers)

    async def check(
        self, name: str, response: str, gold: str, options: Mapping[str, Any] | None = None
    ) -> Verdict:
        """The verdict of the checker `name`; whatever goes wrong in it is the outcome "error".

        Raises `registry.UnknownChecker` for a name that nothing provides.
        """
        options = dict(options or {})
        if not registry.get(name).pooled:
            return registry.run(name, response, gold, options)
        return await self._in_worker(registry.run, name, response, gold, options)

    async def try_out(self, place: str) -> str:
        """Load FILE.py:FUNCTION in a worker, by the rules of a check; why it fails, or ""."""
        verdict = await self._in_worker(own_checkers.try_out, place)
        return verdict.reason if verdict.outcome == "error" else ""

    async def _in_worker(self, function: Callable[..., Verdict], *args: Any) -> Verdict:
        async with self._slots:
            for _ in range(_ATTEMPTS):
                verdict = await self._attempt(function, args)
                if verdict is not None:
                    return verdict
        return error("the worker pool broke repeatedly; workers may lack memory to start")

    async def _attempt(
        self, function: Callable[..., Verdict], args: tuple[Any, ...]
    ) -> Verdict | None:
        """One try; None if the pool was broken before the check could be judged."""
        if self._closed:
            return error("the checker pool is closed")
        pool = self._running()
        future = None
        try:
            future = pool.schedule(function, args=args, timeout=self.deadline_s)
            self._flying[future] = pool
            return await asyncio.wrap_future(future)
        except (concurrent.futures.process.BrokenProcessPool, RuntimeError):
            self._discard(pool)
            return None
        except TimeoutError:
            return error("timeout")
        except ProcessExpired as problem:
            return error(f"died with exit code {problem.exitcode}")
        except Exception as problem:  # what a worker sent back instead of a verdict
            return error(f"{type(problem).__name__}: {shorten(str(problem))}")
        finally:
            if future is not None:
                self._flying.pop(future, None)

    def _running(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self.workers,
                max_tasks=self._max_checks,
                initializer=_start_worker,
                initargs=(self._memory_bytes, self._warm, registry.installed()),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool

    def _discard(self, pool: ProcessPool) -> None:
        if self._pool is pool:
            self._pool = None
            self._end(pool)

    def _end(self, pool: ProcessPool) -> None:
        task = asyncio.create_task(self._ended(pool))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _ended(self, pool: ProcessPool) -> None:
        """Kill a pool's workers and end its checks."""
        pool.stop()
        await asyncio.to_thread(pool.join)  # which kills; `stop` alone leaves workers behind
        # pebble leaves what was running pending for ever
        for future, owner in list(self._flying.items()):
            if owner is pool and not future.done():
                future.set_exception(RuntimeError("the pool was stopped"))

    async def close(self) -> None:
        """Kill the workers and wait until they are gone. Checks in flight become errors."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            self._end(pool)
        await asyncio.gather(*self._ending)

    async def __aenter__(self) -> CheckerPool:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _start_worker(memory_bytes: int, warm: tuple[str, ...], own: dict[str, str]) -> None:
    """Runs first in every worker: die with the parent, at once on SIGTERM, within limits."""
    die_with_parent()
    # pebble's handler runs between bytecodes, so a worker deep in C code would ignore it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    registry.install(own)
    if "math_verify" in warm:
        from verifier import symbolic

        symbolic.warm_up()
    for name in warm:
        registry.get(name)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
