"""The verifier's loop: read generated groups, check every sample, shape, filter, hand on.

A group is judged whole: its payloads are read once, each sample gets one of four outcomes, and
the verdict goes to the learner in the script that acknowledges the rollout. A checker that fails
is an `error`, which fails the group; it is never a wrong answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from common.broker import ROLLOUTS, Broker, Entry
from common.config import Config
from common.errors import MessageError
from common.failpoints import failpoint
from common.log import get_logger
from common.messages import Judged, Prompt, Rollout, Sample, Verdict, Version, decode, encode
from common.process import rss_mib
from verifier import dynamic_sampling, math_dapo_compat
from verifier.outcome import Verdict as Outcome
from verifier.pool import CheckerPool
from verifier.reward import overlong_penalty, shaped_reward

GROUPS_AT_ONCE = 16
REPORT_S = 1.0
log = get_logger(__name__)


class VerifierWorker:
    """One verifier process."""

    def __init__(self, config: Config, broker: Broker, pool: CheckerPool, name: str) -> None:
        self.config, self.broker, self.pool, self.name = config, broker, pool, name
        self.judged = {"groups": 0, "samples": 0, "errors": 0, "compat_disagrees": 0}
        self._held: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Judge until the run is over or `drain` was called."""
        async with self.broker.lease("verifier", self.name, {}):
            report = asyncio.create_task(self._report())
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
                    if entry.id not in self._held:
                        self._held.add(entry.id)
                        self._spawn(entry)
            report.cancel()
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

    def _spawn(self, entry: Entry) -> None:
        task = asyncio.create_task(self._handle(entry))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._reap(done, entry.id))

    def _reap(self, task: asyncio.Task[None], entry: str) -> None:
        self._tasks.discard(task)
        self._held.discard(entry)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._stop.set()

    async def _handle(self, entry: Entry) -> None:
        """One entry of the stream: to a verdict, or to the dead letters."""
        try:
            rollout = decode(Rollout, entry.data, self.config.max_message_bytes)
        except MessageError as error:
            await self.broker.bury(ROLLOUTS, entry, str(error))
            return
        failpoint("verifier_claimed")
        verdict = await self._verdict(rollout)
        failpoint("verifier_judged")
        step = ("generated", "judged")
        await self.broker.advance(
            entry.id, self.name, rollout.group, rollout.attempt, step, encode(verdict)
        )
        self.judged["groups"] += 1

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
        limit = self.config.max_message_bytes
        try:
            prompt = decode(Prompt, data, limit)
            payloads = await self.broker.get_samples(rollout.group, rollout.attempt, prompt.samples)
            if None in payloads:
                return failed(f"payload of sample {payloads.index(None)} is missing")
            samples = [decode(Sample, data, limit) for data in payloads if data is not None]
        except MessageError as error:
            return failed(f"payload: {error}")
        judged = await asyncio.gather(*(self._judge(prompt, sample) for sample in samples))
        self.judged["samples"] += len(judged)
        self.judged["errors"] += sum(item.outcome == "error" for item in judged)
        return self._decide(prompt, list(judged))

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
        while True:
            await asyncio.sleep(REPORT_S)
            status = {
                "role": "verifier", "time": time.time(), "held": len(self._held),
                "rss_mib": round(rss_mib()), **self.judged,
            }  # fmt: skip
            await self.broker.report(self.name, status)
            if await self.broker.ended():
                self._stop.set()


def _label(item: Judged) -> str:
    return f"error: {item.reason}" if item.outcome == "error" else item.outcome
