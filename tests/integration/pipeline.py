"""A pipeline in one process: everything is real but the training and the tensors of a round.

The dispatcher, the publisher, generators with simulated engines and a verifier work on a real
server, each through a connection of its own, as their processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np

from common.broker import Broker
from common.config import Config
from common.entry import STREAMS
from common.messages import Version
from generator.engine import START
from generator.simulated import SimulatedEngine
from generator.worker import GeneratorWorker
from learner.groups import Chosen
from learner.publisher import Publisher
from tests.conftest import MakeConfig
from tests.integration.pretend import World
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker

VOCABULARY = 64
ROUND_S = 10.0
PATIENCE_S = 60.0
"""For a batch, and for whatever is waited for: under load and with a server that is away."""
ROLES = ("learner", "generator", "verifier")


class Receiver(SimulatedEngine):
    """A simulated engine that is told the version and sent no weights."""

    async def update(self, init_info: Any, update_info: Any, version: Version) -> None:
        self.version = version


class Pipeline(World):
    """`urls` says where each role finds the server."""

    def __init__(self, config: Config, broker: Broker, urls: dict[str, str]) -> None:
        super().__init__(config, broker)
        self.urls = urls
        self.publisher = Publisher(config, broker, self.timeline, "127.0.0.1")
        self.workers: list[GeneratorWorker] = []
        self._open = contextlib.AsyncExitStack()

    async def publish(self) -> None:
        """A weight round with all who are there, as the learner's lead conducts it."""
        version = Version(self.timeline.incarnation, self.version)
        round_id, ready = await self.publisher.call(version)
        members: list[str] = []
        if ready:
            go = self.publisher.plan(round_id, version, ready, [], 1, [])
            await self.publisher.say(go)
            nothing = np.empty(0, dtype=np.float32)
            members, _ = await self.publisher.collect(go, nothing, time.monotonic() + ROUND_S)
        unclaimed = await self.publisher.publish(round_id, version, members)
        self.dispatcher.admission.publish(version.number, unclaimed)
        self.dispatcher.may_dispatch = True

    async def choose(self) -> list[Chosen]:
        """The next batch; who joins meanwhile is served."""
        chosen: list[Chosen] = []

        async def there() -> bool:
            if await self.publisher.joiners():
                await self.publish()
            chosen.extend(await self.dispatcher.choose_batch() or [])
            return bool(chosen)

        await self.wait_for(there, "a batch")
        return chosen

    async def wait_for(self, true: Callable[[], Awaitable[Any]], what: str) -> None:
        """Wait until it is true; what ended a role is raised."""
        deadline = time.monotonic() + PATIENCE_S
        while not await true():
            self.check()
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come; {await self._state()}")
            await asyncio.sleep(0.02)

    async def _state(self) -> str:
        """For whoever has to find out why nothing goes on."""
        streams = self.dispatcher.streams
        return "; ".join(
            [
                self.dispatcher.waiting_for(),
                f"open {self.dispatcher.open}",
                f"on the server {await streams.known()}, {await streams.depths()}",
                f"served {self.publisher.members}, in trouble {self.publisher._trouble}",
                *(f"{w.name} at {w.rounds.serving} holds {w.claims}" for w in self.workers),
            ]
        )

    async def connect(self, role: str) -> Broker:
        settings = self.config.redis
        broker = await Broker.connect(
            self.urls[role], self.broker.run, settings.lease_s, settings.patience_s
        )
        self._open.push_async_callback(broker.close)
        return broker

    async def work(self, generators: int) -> None:
        """Start generators and a verifier, and wait until they are there."""
        for index in range(generators):
            name = f"g{index}.{self.timeline.incarnation}"
            engine = Receiver(self.config, VOCABULARY, START, name)
            self._open.push_async_callback(engine.close)
            worker = GeneratorWorker(self.config, await self.connect("generator"), engine, name)
            self.workers.append(worker)
            self.spawn(worker.run())
        pool = await self._open.enter_async_context(CheckerPool(1, warm=()))
        name = f"v.{self.timeline.incarnation}"
        verifier = VerifierWorker(self.config, await self.connect("verifier"), pool, name)
        self.spawn(verifier.run())

        async def there() -> bool:
            return len(await self.broker.members("generator")) == generators

        await self.wait_for(there, "generators")

    async def finish(self) -> None:
        """The end of a run: every open group gets its fate, and nothing of any is left behind."""
        await self.fold()
        await self.dispatcher.end()
        result = await self.audit()
        assert result.balanced, result.as_text()
        assert (result.in_flight, result.missing, result.duplicates) == (0, 0, 0)

        async def drained() -> bool:
            return not any((await self.dispatcher.streams.depths()).values())

        await self.wait_for(drained, f"the end of {', '.join(STREAMS)}")
        assert await self.leftovers() == []
        await self.broker.end("complete")

    async def close(self) -> None:
        await self.crash()
        await self._open.aclose()


@contextlib.asynccontextmanager
async def pipeline(
    config: Config, run: str, url: str | dict[str, str], generators: int = 2
) -> AsyncIterator[Pipeline]:
    """A pipeline at work. `url` of the server, or one for each role."""
    urls = url if isinstance(url, dict) else dict.fromkeys(ROLES, url)
    settings = config.redis
    broker = await Broker.connect(urls["learner"], run, settings.lease_s, settings.patience_s)
    made = Pipeline(config, broker, urls)
    try:
        await made.work(generators)
        yield await made.start()  # type: ignore[misc]
        made.check()
    finally:
        await made.close()
        await broker.close()


def simulated(make_config: MakeConfig, **sections: dict[str, Any]) -> Config:
    """Groups of four short samples, in a hurry."""
    tree: dict[str, dict[str, Any]] = {
        "admission": {"max_staleness": 1, "attempts": 4},
        "generator": {
            "engine": "simulated", "max_samples": 16, "drain_s": 1.0, "simulated_length": 8,
            "simulated_tokens_per_second": 400,
        },
        "redis": {"lease_s": 1.0, "patience_s": PATIENCE_S},
    }  # fmt: skip
    for name, keys in sections.items():
        tree[name] = tree.get(name, {}) | keys
    return make_config(**tree)
