"""The generator's loop: claim prompts while there is room, generate, hand groups on.

Invariants:
- A prompt is claimed only while this engine holds the published version; the broker checks it.
- Room is counted in samples: a group is claimed when enough samples have finished, whichever
  groups they were of.
- A sample's payload is written before its group is handed on, and never while the weights that
  made it are unverified (`_verified`). A sample that fails is tried again, never scored.
- Whoever is left out of a round gives its claims back and claims nothing until it is served.
- A prompt that cannot be read, or over which generators die again and again, goes to the dead
  letters, and its group fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from common.broker import Broker
from common.config import Config
from common.entry import PROMPTS, Entry
from common.errors import MessageError
from common.failpoints import failpoint
from common.log import get_logger
from common.messages import DEADLY, Prompt, Rollout, decode, encode
from common.prometheus import Prometheus
from common.vitals import Clock, Vitals
from generator.engine import EngineDead, GenerationError
from generator.interface import SamplingEngine
from generator.rounds import FrozenMember, RoundMember

IDLE_S = 0.02
REPORT_S = 1.0
GIVE_BACK_S = 5.0
"""At the end: for what did not end within drain_s to be given back."""
WINDOW = 60
"""Reports over which the shares of time are taken."""
log = get_logger(__name__)


class GivenBack(Exception):
    """The claim was given back while its samples were being made."""


@dataclass
class Claim:
    """A claimed group and how far its samples are (tokens by sample)."""

    entry: Entry
    prompt: Prompt
    missing: int
    given_back: bool = False
    tokens: dict[int, int] = field(default_factory=dict)


class GeneratorWorker:
    """One generator: an engine, its claims, and its part in weight rounds.

    With `frozen` weights it takes part in none (`generator.rounds.FrozenMember`).
    """

    def __init__(
        self, config: Config, broker: Broker, engine: SamplingEngine, name: str,
        frozen: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.broker, self.engine, self.name = config, broker, engine, name
        self.claims: dict[str, Claim] = {}
        self._again: dict[str, Entry] = {}  # given to this generator anew while it holds them
        member = FrozenMember if frozen else RoundMember
        self.rounds = member(self, broker, engine, name)
        self.draining = False
        self.finished: dict[str, int] = {"groups": 0, "samples": 0, "tokens": 0, "retries": 0}
        self.vitals = Vitals(Clock("paused", "idle", "generating", marks=WINDOW))
        self.prometheus = Prometheus("generator", name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Work until the run is over, `drain` was called, or the engine died.

        Raises:
            EngineDead: the engine's processes are gone.
        """
        await self.rounds.tune_in()
        info = {"workers": self.config.generator.tensor_parallel}
        async with self.broker.lease("generator", self.name, info):
            work = (self.rounds.follow(), self._report(), self.vitals.watch_loop())
            side = [self._spawn(task) for task in work]
            while not self._stop.is_set():
                if self.rounds.serving and not self.claims:
                    failpoint("generator_idle")
                for entry in await self._claim():
                    if entry.id in self.claims:
                        self._again[entry.id] = entry
                    else:
                        self._accept(entry)
                self.vitals.clock.enter(self._state())
                await self._pause()
            await self._finish(side)
        if self._failure:
            raise self._failure

    # --- claiming -------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Samples claimed and not yet finished."""
        return sum(claim.missing for claim in self.claims.values())

    def _state(self) -> str:
        """What this second is counted as; without weights, or in a round, nothing is claimed."""
        if not self.rounds.serving:
            return "paused"
        return "generating" if self.in_flight else "idle"

    async def _claim(self) -> list[Entry]:
        """As many prompts as there is room for; those of dead generators first.

        After a lost connection what is held already comes too, and what was just taken over twice.
        """
        room = self.config.generator.max_samples - self.in_flight
        count = room // self.config.algorithm.group_size or int(not self.claims)
        if count < 1 or self.draining or not self.rounds.serving:
            return []
        entries: list[Entry] = []
        if self.rounds.time_to_reclaim():
            entries = await self.broker.reclaim(PROMPTS, self.name, count)
        if len(entries) < count:
            version = self.rounds.serving
            entries += await self.broker.claim_prompts(version, self.name, count - len(entries))
        return entries

    def _accept(self, entry: Entry) -> None:
        most = self.config.redis.max_deliveries
        samples = max(self.config.algorithm.group_size, self.config.eval.samples)
        try:
            prompt = decode(Prompt, entry.data, self.config.max_message_bytes)
            if prompt.samples > samples:
                raise MessageError(f"it asks for {prompt.samples} samples, a group has {samples}")
            if entry.deliveries > most:
                raise MessageError(f"{DEADLY}the last {most} generators that had it died")
        except MessageError as error:
            self._spawn(self.broker.bury(PROMPTS, entry, str(error)))
            return
        failpoint("generator_claimed")
        if self.rounds.excluded or self.engine.version < prompt.least:
            # left out while the claim was under way, or taken over from who held newer weights
            self._spawn(self._return(entry, prompt))
            return
        claim = self.claims[entry.id] = Claim(entry, prompt, prompt.samples)
        self._spawn(self._generate(claim))

    # --- generating -----------------------------------------------------------------------------

    async def _generate(self, claim: Claim) -> None:
        """Make the missing samples of a group, then hand it on."""
        prompt, failure, settled = claim.prompt, "", False
        try:
            if not await self.broker.is_current(prompt.group, prompt.attempt):
                claim.missing = 0
                # which only acknowledges: the group has moved on
                settled = await self._hand_on(claim, "")
                return
            have = await self.broker.have_samples(prompt.group, prompt.attempt, prompt.samples)
            claim.missing = have.count(False)
            missing = [index for index, there in enumerate(have) if not there]
            done = [self._sample(claim, index) for index in missing]
            for result in await asyncio.gather(*done, return_exceptions=True):
                if isinstance(result, GenerationError):
                    failure = failure or str(result)
                elif isinstance(result, BaseException):
                    raise result
            settled = await self._hand_on(claim, failure)
        except GivenBack:
            settled = await self.broker.release(PROMPTS, claim.entry.id, self.name)
        finally:
            del self.claims[claim.entry.id]
            again = self._again.pop(claim.entry.id, None)
            if again and not settled and not self._stop.is_set():
                self._accept(again)  # it was another's for a while: only now it can be handed on

    async def _return(self, entry: Entry, prompt: Prompt) -> None:
        """Leave a claim to another generator, unless its group has moved on: that would go round
        for ever if it asked for weights that never come."""
        if await self.broker.is_current(prompt.group, prompt.attempt):
            await self.broker.release(PROMPTS, entry.id, self.name)
        else:
            await self._hand_on(Claim(entry, prompt, 0), "")  # which only acknowledges

    async def _sample(self, claim: Claim, index: int) -> None:
        """One sample: generate, retry under a budget, write its payload."""
        prompt = claim.prompt
        for attempt in range(self.config.generator.sample_attempts):
            if claim.given_back:
                raise GivenBack
            try:
                sample = await self.engine.generate(
                    prompt, index, self.rounds.salt, lambda n: claim.tokens.__setitem__(index, n)
                )
                break
            except GenerationError as error:
                if claim.given_back:
                    raise GivenBack from None
                self.finished["retries"] += 1
                log.warning("sample failed", group=prompt.group, attempt=attempt, error=str(error))
                if attempt + 1 == self.config.generator.sample_attempts:
                    raise
        await self.rounds.verified.wait()
        if claim.given_back:
            raise GivenBack
        await self.broker.put_sample(prompt.group, prompt.attempt, index, encode(sample))
        failpoint("generator_sample_written")
        claim.missing -= 1
        claim.tokens[index] = len(sample.token_ids)
        self.finished["samples"] += 1
        self.finished["tokens"] += len(sample.token_ids)

    async def _hand_on(self, claim: Claim, failure: str) -> bool:
        """False: the group is elsewhere by now, or the claim another generator's."""
        prompt = claim.prompt
        rollout = Rollout(prompt.group, prompt.ordinal, prompt.attempt, self.name, failure)
        failpoint("generator_payload_written")
        step = ("dispatched", "generated")
        done = await self.broker.advance(
            claim.entry.id, self.name, prompt.group, prompt.attempt, step, encode(rollout)
        )
        self.finished["groups"] += done
        return done

    # --- giving back and ending -----------------------------------------------------------------

    async def give_back(self, why: str) -> None:
        """Return every claim; what is complete already stays written and is not made again."""
        if self.claims:
            log.warning("giving claims back", groups=len(self.claims), why=why)
        for claim in self.claims.values():
            claim.given_back = True
        self.rounds.verified.set()  # whoever waits for it sees that the claim is gone
        await self.engine.abort_all()

    def drain(self) -> None:
        """Claim nothing more, finish what runs within the time that `_finish` allows, and end."""
        log.info("draining", groups=len(self.claims))
        self.draining = True
        self._stop.set()

    async def _finish(self, side: list[asyncio.Task[None]]) -> None:
        """Let running groups end for `drain_s`, then give them back.

        The side tasks go on meanwhile: a round would wait for a member that does not answer.
        """
        deadline = time.monotonic() + self.config.generator.drain_s
        while self.draining and self.claims and not self._failure and time.monotonic() < deadline:
            await asyncio.sleep(IDLE_S)
        if not self._failure:
            await self.give_back("this generator ends")
        while self._tasks - set(side) and time.monotonic() < deadline + GIVE_BACK_S:
            await asyncio.sleep(IDLE_S)
        for task in side:
            task.cancel()
        await asyncio.gather(*side, return_exceptions=True)

    async def _pause(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stop.wait(), IDLE_S)

    async def _report(self) -> None:
        """Every second: figures for `dapo status`, tokens by group as a sign of life, the end."""
        last, since = dict(self.finished), time.monotonic()
        while True:
            await asyncio.sleep(REPORT_S)
            now = time.monotonic()
            rate = (self.finished["tokens"] - last["tokens"]) / (now - since)
            last, since = dict(self.finished), now
            status: dict[str, Any] = {
                "role": "generator", "version": self.rounds.serving,
                "running": self.in_flight, "tokens_per_second": round(rate, 1),
                **self.vitals.figures(), **self.finished,
                "progress": {c.prompt.group: sum(c.tokens.values()) for c in self.claims.values()},
            }  # fmt: skip
            self.vitals.clock.mark()
            self.prometheus.log("generator", 0, status)
            await self.broker.report(self.name, status)
            if reason := await self.broker.ended():
                log.info("the run is over", reason=reason)
                self._stop.set()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        """A task whose failure ends the worker."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, EngineDead):
            log.error("the engine died", error=str(error))
        self._failure = self._failure or error
        self._stop.set()
