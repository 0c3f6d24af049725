"""A learner's end of weight rounds and generators, without a model: messages and gloo are real.

Generators run in this process, so that a test can look at them and script their engines, or in one
of their own, so that they can be killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.broker import Broker
from common.config import Config
from common.messages import Version
from common.rounds import Go, Reply
from generator.engine import START
from generator.simulated import SimulatedEngine
from generator.worker import GeneratorWorker
from learner.conductor import Turn
from learner.publisher import Publisher
from learner.sender import WeightSender
from learner.timeline import Timeline

VOCABULARY = 64
PATIENCE_S = 90.0
"""For whatever is waited for, on a machine under load."""
Shapes = list[tuple[str, tuple[int, ...]]]


class Solo:
    """A conductor of one rank."""

    def go_on(self, mine: bool) -> bool:
        return mine


class Tensors:
    """What a sender asks of a training engine: four tensors, each a bucket of its own."""

    def __init__(self, sent: int = 4) -> None:
        self.sent = sent

    def manifest(self) -> Shapes:
        return [(f"layer.{index}.weight", (64, 32)) for index in range(4)]

    def buckets(self, bucket_bytes: int, dtype: torch.dtype) -> Iterator[tuple[Shapes, Any]]:
        for entry in self.manifest()[: self.sent]:
            yield [entry], torch.zeros(64 * 32, dtype=dtype)

    def score(self, pairs: list[Any], temperature: float) -> list[npt.NDArray[np.float32]]:
        return [np.zeros(len(response), dtype=np.float32) for _, response in pairs]


class RoundLearner:
    """Publisher and sender, and in the lead's place what the sender asks of it."""

    def __init__(self, config: Config, broker: Broker, number: int = 0) -> None:
        config.run_dir.mkdir(parents=True, exist_ok=True)
        self.config, self.broker, self.host, self.stopping = config, broker, "127.0.0.1", ""
        self.timeline = Timeline.open(config.run_dir)
        self.timeline.begin(number)
        self.publisher = Publisher(config, broker, self.timeline, self.host)
        self.engine = Tensors()
        self.sender = WeightSender(config, self.engine, Solo())  # type: ignore[arg-type]
        self.failures: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._ready: dict[str, Reply] = {}
        self._called = ("", Version(0, 0))

    async def take_over(self) -> None:
        """As a dispatcher does at its start: nobody claims until this learner has published."""
        await self.broker.publish(self.timeline.incarnation, "")

    async def round(self, number: int) -> set[str]:
        """One round; the members that came through."""
        version = Version(self.timeline.incarnation, number)
        round_id, self._ready = await self.publisher.call(version)
        self._called = round_id, version
        members = bool(self._ready)
        plan = {"round": round_id, "version": list(version), "members": members, "probe": [1, 2]}
        await asyncio.to_thread(self.sender.send, Turn("publish", number, plan), self)  # type: ignore[arg-type]
        return self.publisher.members

    async def serve(self, number: int, names: set[str]) -> None:
        """Rounds of one version, as joiners come, until all of `names` hold it."""

        async def held() -> bool:
            if await self.publisher.joiners():
                await self.round(number)
            return names <= self.publisher.members

        await until(held, f"version {number} at {names}")

    # --- what the sender asks -------------------------------------------------------------------

    def plan_round(self, manifest: Shapes, port: int) -> Go:
        return self.publisher.plan(*self._called, self._ready, manifest, port, [1, 2])

    def say_go(self, go: Go) -> None:
        self._wait(self.publisher.say(go))

    def require_living(self, go: Go) -> None:
        self._wait(self.publisher.require_living(go))

    def round_failed(self, go: Go, why: str) -> None:
        self.publisher.broken()
        self.failures.append(why)

    def collect(self, go: Go, own: Any, deadline: float) -> tuple[list[str], float]:
        found: tuple[list[str], float] = self._wait(self.publisher.collect(go, own, deadline))
        return found

    def published(self, round_id: str, version: Version, members: list[str], *_: Any) -> None:
        self._wait(self.publisher.publish(round_id, version, members))

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


# --- generators -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def generator(
    config: Config, broker: Broker, url: str, name: str,
    make: Callable[..., SimulatedEngine] = SimulatedEngine,
) -> AsyncIterator[GeneratorWorker]:  # fmt: skip
    """A generator in this process. It is gone at the end without a word, but for its lease."""
    own = await Broker.connect(url, broker.run, config.redis.lease_s)
    engine = make(config, VOCABULARY, START, name)
    worker = GeneratorWorker(config, own, engine, name)
    task = asyncio.create_task(worker.run())
    await until(lambda: _lives(broker, name), f"the lease of {name}")
    try:
        yield worker
    finally:
        died = task.exception() if task.done() and not task.cancelled() else None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
        await own.close()
        assert died is None, f"{name} ended by {died!r}"


async def _lives(broker: Broker, name: str) -> bool:
    return any(member.startswith(name) for member in await broker.members("generator"))


async def until(true: Callable[[], Any], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not await true():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come"
        await asyncio.sleep(0.02)


def write_model(folder: Path) -> None:
    """All that a simulated engine reads of a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))


@contextlib.asynccontextmanager
async def process(target: Callable[..., None], *args: Any) -> AsyncIterator[Any]:
    """A process that is killed at the end if it still lives."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["generator.main", "generator.simulated", "learner.sender"])
    made = context.Process(target=target, args=args, daemon=True)
    await asyncio.to_thread(
        made.start
    )  # the first one waits until the fork server has loaded torch
    try:
        yield made
    finally:
        made.kill()
        await asyncio.to_thread(made.join)


def run_generator(config: Config, environment: dict[str, str]) -> None:
    """The body of a generator's process: as in production."""
    os.environ.update(environment)
    from generator.main import main

    main(config)


def run_learner(config: Config, url: str, number: int, environment: dict[str, str]) -> None:
    """The body of a learner's process: it serves two generators, then goes on with rounds."""
    os.environ.update(environment)

    async def run() -> None:
        broker = await Broker.connect(url, config.run.name, config.redis.lease_s)
        learner = RoundLearner(config, broker, number)
        await learner.take_over()
        while len(await broker.members("generator")) < 2:
            await asyncio.sleep(0.02)
        await learner.serve(number, set(await broker.members("generator")))
        (config.run_dir / "served").touch()
        while True:
            number_now = number + 1
            await learner.round(number_now)

    asyncio.run(run())
