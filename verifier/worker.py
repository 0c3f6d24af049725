"""The verifier's loop: read generated groups, check every sample, shape, filter, hand on.

A group is judged whole: its payloads are read once, each sample gets one of four outcomes, and
the verdict goes to the learner in the script that acknowledges the rollout. A checker that fails
is an `error`, which fails the group; it is never a wrong answer. An entry that cannot be read, or
over which verifiers fail or die again and again, goes to the dead letters, and its group fails too:
nothing that is delivered can stop the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from common.broker import Broker
from common.config import Config
from common.entry import ROLLOUTS, Entry
from common.errors import DapoError, MessageError
from common.failpoints import failpoint
from common.log import get_logger
from common.messages import (
    DEADLY,
    Judged,
    Prompt,
    Rollout,
    Sample,
    Verdict,
    Version,
    decode,
    encode,
)
from common.prometheus import Prometheus
from common.vitals import Clock, Vitals
from verifier import dynamic_sampling, math_dapo_compat
from verifier.outcome import Verdict as Outcome
from verifier.pool import CheckerPool
from verifier.reward import overlong_penalty, shaped_reward

GROUPS_AT_ONCE = 16
REPORT_S = 1.0
RETRY_S = 0.5
WINDOW = 60
"""Reports over which the shares of time are taken."""
log = get_logger(__name__)


class VerifierWorker:
    """One verifier process."""

    def __init__(self, config: Config, broker: Broker, pool: CheckerPool, name: str) -> None:
        self.config, self.broker, self.pool, self.name = config, broker, pool, name
        self.judged = {"groups": 0, "samples": 0, "errors": 0, "compat_disagrees": 0}
        self.vitals = Vitals(Clock("idle", "busy", marks=WINDOW))
        self.prometheus = Prometheus("verifier", name)
        self._held: set[str] = set()
        self._again: dict[str, Entry] = {}  # given to this verifier anew while it holds them
        self._tasks: set[asyncio.Task[bool]] = set()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Judge until the run is over or `drain` was called."""
        async with self.broker.lease("verifier", self.name, {}):
            side = [self._beside(self._report()), self._beside(self.vitals.watch_loop())]
            reclaim_at = 0.0
            while not self._stop.is_set():
                room = GROUPS_AT_ONCE - len(self._held)
                if room <= 0:
                    await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                    continue
                entries: list[Entry] = []
                if time.monotonic() >= reclaim_at:
                    entries = await self.broker.reclaim(ROLLOUTS, self.name, room)
                    reclaim_at = time.monotonic() + REPORT_S
                # handlers run while this waits; only what was taken over must not wait for it
                block_ms = 1 if entries else 500
                entries += await self.broker.claim(
                    ROLLOUTS, self.name, max(1, room - len(entries)), block_ms
                )
                for entry in entries:
                    if entry.id in self._held:
                        self._again[entry.id] = entry
                    else:
                        self._spawn(entry)
            for watching in side:
                watching.cancel()
            if self._tasks:
                wait_s = self.config.verifier.slow_deadline_s
                _, late = await asyncio.wait(self._tasks, timeout=wait_s)
                for task in late:  # another verifier judges these; a closed pool must not
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
        if self._failure:
            raise self._failure

    def drain(self) -> None:
        """Finish what is being judged and end."""
        self._stop.set()

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._note)
        return task

    def _note(self, task: asyncio.Task[Any]) -> None:
        """An error that ends a task ends the worker."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop.set()

    def _spawn(self, entry: Entry) -> None:
        self._held.add(entry.id)
        self.vitals.clock.enter("busy")
        task = asyncio.create_task(self._handle(entry))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._reap(done, entry.id))

    def _reap(self, task: asyncio.Task[bool], entry: str) -> None:
        self._tasks.discard(task)
        self._held.discard(entry)
        self.vitals.clock.enter("busy" if self._held else "idle")
        again = self._again.pop(entry, None)
        self._note(task)
        if again and not self._stop.is_set() and not task.cancelled() and not task.result():
            self._spawn(again)  # it was another's for a while: only now it can be handed on

    async def _handle(self, entry: Entry) -> bool:
        """One entry of the stream: to a verdict, or to the dead letters. False if neither was done,
        because the group is elsewhere by now or the entry another verifier's."""
        try:
            rollout = decode(Rollout, entry.data, self.config.max_message_bytes)
        except MessageError as error:
            await self.broker.bury(ROLLOUTS, entry, str(error))
            return True
        failpoint("verifier_claimed")
        record = await self._try(entry, rollout)
        if record is None:
            return True
        failpoint("verifier_judged")
        step = ("generated", "judged")
        done = await self.broker.advance(
            entry.id, self.name, rollout.group, rollout.attempt, step, record
        )
        self.judged["groups"] += 1
        return done

    async def _try(self, entry: Entry, rollout: Rollout) -> bytes | None:
        """The record of the verdict; None if the entry was buried, its deliveries used up.

        What is caught here is a fault of this program or of the machine: a passing one costs
        a pause, a lasting one its group, and neither the verifier.
        """
        most = self.config.redis.max_deliveries
        reason = f"{DEADLY}the last {most} verifiers that had it died"
        for delivery in range(entry.deliveries, most + 1):
            try:
                return encode(await self._verdict(rollout))
            except DapoError:
                raise
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                reason = f"no verdict after {most} deliveries: {fault}"
                log.exception("no verdict", group=rollout.group, delivery=delivery, of=most)
                await asyncio.sleep(RETRY_S)
        await self.broker.bury(ROLLOUTS, entry, reason)
        return None

    async def _verdict(self, rollout: Rollout) -> Verdict:
        """Judge a group; whatever is missing or damaged fails it with the reason."""
        evaluation = rollout.ordinal < 0

        def failed(reason: str) -> Verdict:
            ids = (rollout.group, rollout.ordinal, rollout.attempt, evaluation)
            return Verdict(*ids, "failed", reason, [], self.name)

        if rollout.failure:
            return failed(f"generation: {rollout.failure}")
        data = await self.broker.get_prompt(rollout.group)
        if data is None:
            return failed("the group's record is gone from the server")
        try:
            prompt = decode(Prompt, data, self.config.max_message_bytes)
        except MessageError as error:
            return failed(f"prompt: {error}")
        payloads = await self.broker.get_samples(rollout.group, rollout.attempt, prompt.samples)
        samples, damaged = self._read(prompt, payloads)
        if damaged:
            # the next attempt keeps what is there: these have to be made again
            await self.broker.discard_samples(rollout.group, rollout.attempt, list(damaged))
            index, why = next(iter(damaged.items()))
            return failed(f"payload of sample {index} {why}")
        judged = await asyncio.gather(*(self._judge(prompt, sample) for sample in samples))
        self.judged["samples"] += len(judged)
        self.judged["errors"] += sum(item.outcome == "error" for item in judged)
        return self._decide(prompt, list(judged))

    def _read(
        self, prompt: Prompt, payloads: list[bytes | None]
    ) -> tuple[list[Sample], dict[int, str]]:
        """The samples, and what is wrong with those that cannot be judged, by index."""
        samples, damaged = [], {}
        for index, data in enumerate(payloads):
            if data is None:
                damaged[index] = "is missing"
                continue
            try:
                sample = decode(Sample, data, self.config.max_message_bytes)
                if len(sample.token_ids) > prompt.max_tokens:
                    raise MessageError(f"{len(sample.token_ids)} tokens, above the cap")
                samples.append(sample)
            except MessageError as error:
                damaged[index] = f"is damaged: {error}"
        return samples, damaged

    def _decide(self, prompt: Prompt, judged: list[Judged]) -> Verdict:
        decision = dynamic_sampling.decide([_label(item) for item in judged])
        fate, reason = decision.fate, decision.reason
        unfiltered = prompt.evaluation or not self.config.algorithm.dynamic_sampling
        if fate == "filtered" and unfiltered:
            fate = "accepted"
        ids = (prompt.group, prompt.ordinal, prompt.attempt, prompt.evaluation)
        return Verdict(*ids, fate, reason, judged, self.name)

    async def _judge(self, prompt: Prompt, sample: Sample) -> Judged:
        reward = self.config.reward
        truncated = sample.finish_reason == "length"
        outcome = await self._check(prompt, sample.text, truncated)
        length, cap = len(sample.token_ids), prompt.max_tokens
        penalty = overlong_penalty(length, cap, reward.overlong_cache, reward.overlong_factor)
        shaped = shaped_reward(
            outcome.correct,
            length,
            max_tokens=cap,
            cache=reward.overlong_cache,
            factor=reward.overlong_factor,
            correct_reward=reward.correct,
            wrong_reward=reward.wrong,
        )
        versions = [Version(span.incarnation, span.number) for span in sample.spans]
        nothing = Version(0, 0)
        return Judged(
            outcome=outcome.outcome,
            extracted=(outcome.extracted or "")[:200],
            reason=outcome.reason[:200],
            reward=shaped,
            penalty=penalty,
            length=length,
            truncated=truncated,
            oldest=min(versions, default=nothing, key=lambda version: version.number),
            newest=max(versions, default=nothing),
            generator=sample.generator,
            answer=outcome.answer[:200],
        )

    async def _check(self, prompt: Prompt, text: str, truncated: bool) -> Outcome:
        options: dict[str, Any] = {
            "boxed": prompt.boxed,
            "exact_arithmetic": self.config.verifier.exact_arithmetic,
            "truncated": truncated,
        }
        verdict = await self.pool.check(prompt.checker, text, prompt.gold, options)
        if prompt.checker == "math":
            # for those who compare with published results; about 5 µs a sample
            published = math_dapo_compat.check(text, prompt.gold)
            self.judged["compat_disagrees"] += published.correct != verdict.correct
        return verdict

    async def _report(self) -> None:
        """Every second: figures for `dapo status`, and a look for the end of the run."""
        last, since = self.judged["groups"], time.monotonic()
        while True:
            await asyncio.sleep(REPORT_S)
            now, groups = time.monotonic(), self.judged["groups"]
            rate = (groups - last) / (now - since)
            last, since = groups, now
            status = {
                "role": "verifier", "groups_per_second": round(rate, 1), "held": len(self._held),
                **self.vitals.figures(), **self.judged,
            }  # fmt: skip
            self.vitals.clock.mark()
            self.prometheus.log("verifier", 0, status)
            await self.broker.report(self.name, status)
            if await self.broker.ended():
                self._stop.set()


def _label(item: Judged) -> str:
    return f"error: {item.reason}" if item.outcome == "error" else item.outcome
