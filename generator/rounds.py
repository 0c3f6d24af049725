"""A generator's part in weight rounds (see `common.rounds` for the order of messages)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import numpy as np

from common.broker import Broker
from common.errors import RoundError
from common.failpoints import failpoint
from common.log import get_logger
from common.messages import Version
from common.rounds import Call, Go, Message, Publish, Reply
from generator.engine import EngineDead, GenerationError
from generator.interface import SamplingEngine

if TYPE_CHECKING:
    from generator.worker import GeneratorWorker

RECLAIM_S = 1.0
ENGINE_S = 60.0
"""For what an engine does in a round besides receiving: to pause, to put the model together, to
score the probe, to abort what runs."""
log = get_logger(__name__)


class RoundMember:
    """Follows the control stream; knows which version may be served.

    `serving` is the published version that the engine holds, empty while it holds none. Samples
    are handed over only while `verified` is set: between an update and its `publish` message the
    learner has not yet compared the probe. `excluded` is set from being left out of a round to the
    publication of one that came through: a claim that arrives late is given back too.
    """

    def __init__(
        self, worker: GeneratorWorker, broker: Broker, engine: SamplingEngine, name: str
    ) -> None:
        self.worker, self.broker, self.engine, self.name = worker, broker, engine, name
        self.serving = ""
        self.excluded = False
        self.verified = asyncio.Event()
        self._place = "$"
        self._prefix = ""
        self._round = ""
        self._reclaim_at = 0.0

    @property
    def salt(self) -> str:
        """Prefix-cache salt of the weights in the engine."""
        return str(self.engine.version)

    def time_to_reclaim(self) -> bool:
        """True once in a while: looking for the dead at every claim would be a waste."""
        now = time.monotonic()
        due = now >= self._reclaim_at
        if due:
            self._reclaim_at = now + RECLAIM_S
        return due

    async def tune_in(self) -> None:
        """Find the end of the control stream; to be done before the lease makes us visible."""
        self._place, _ = await self.broker.hear("$", 0)

    async def follow(self) -> None:
        """Answer calls, take part in rounds, for ever."""
        while True:
            self._place, messages = await self.broker.hear(self._place, 1000)
            for message in messages:
                await self._handle(message)

    async def _handle(self, message: Message) -> None:
        if isinstance(message, Call):
            self._round = message.round
            workers = self.worker.config.generator.tensor_parallel
            device = "cpu" if self.engine.on_cpu else "cuda"
            failpoint("generator_before_ready")
            await self._answer(message.round, Reply("ready", workers, device))
            failpoint("generator_after_ready")
        elif isinstance(message, Go) and message.round == self._round:
            if self.name in message.ranks:
                await self._take_part(message)
            else:
                await self._left_out(f"left out of round {message.round}")
        elif isinstance(message, Publish) and message.round == self._round:
            if self.name in message.members:
                self.serving, self.excluded = message.version, False
                self.verified.set()
            elif self.serving != message.version:
                await self._left_out(f"not published in round {message.round}")

    async def _take_part(self, go: Go) -> None:
        """Pause, take the weights, score the probe, answer."""
        self.verified.clear()
        self.serving = ""
        init = None
        if go.fresh or go.prefix != self._prefix:
            init = {
                "host": go.host, "port": go.port, "prefix": go.prefix, "world": go.world,
                "rank_offset": go.ranks[self.name], "backend": go.backend,
                "timeout_s": go.timeout_s,
            }  # fmt: skip
        update = {
            "manifest": go.manifest, "dtype": go.dtype, "bucket_bytes": go.bucket_bytes,
            "version": go.version,
        }  # fmt: skip
        self._prefix = ""
        try:
            # as long to form the group as for the broadcast
            async with _limit(2 * go.timeout_s + ENGINE_S):
                await self.engine.pause()
                failpoint("generator_in_round")
                await self.engine.update(init, update, Version.parse(go.version))
                await self.engine.resume()
                probe = await self.engine.probe(np.asarray(go.probe, dtype=np.int32))
        except (RoundError, GenerationError) as error:
            log.error("round failed", round=go.round, version=go.version, error=str(error))
            # first the claims: their samples fail now, which must not count as attempts
            await self._left_out(f"round {go.round} failed")
            await self._answer(go.round, Reply("failed", error=str(error)))
            return
        self._prefix = go.prefix
        failpoint("generator_before_done")
        await self._answer(go.round, Reply("done", probe=[float(x) for x in probe]))

    async def _left_out(self, why: str) -> None:
        self.serving, self.excluded = "", True
        async with _limit(ENGINE_S):
            await self.worker.give_back(why)

    async def _answer(self, round_id: str, reply: Reply) -> None:
        await self.broker.answer(round_id, self.name, reply)


@contextlib.asynccontextmanager
async def _limit(seconds: float) -> AsyncIterator[None]:
    """A deadline for the engine.

    Raises:
        EngineDead: it has passed. A generator whose engine hangs would stay alive, be left out of
            every round, and never be started again.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise EngineDead(f"the engine hangs in a weight round, for {seconds:g} s now") from None


class FrozenMember(RoundMember):
    """Serves the weights that the engine was started with, for ever, and takes part in no round.

    A learner's versions begin with incarnation 1 and such weights have incarnation 0, so that
    prompts of training are never claimed with them: the server compares the versions.
    """

    def __init__(
        self, worker: GeneratorWorker, broker: Broker, engine: SamplingEngine, name: str
    ) -> None:
        super().__init__(worker, broker, engine, name)
        self.serving = str(engine.version)
        self.verified.set()

    async def follow(self) -> None:
        """Nobody calls rounds where weights are frozen."""
        await asyncio.Event().wait()
