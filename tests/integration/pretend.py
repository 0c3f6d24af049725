"""A run without engines: the real dispatcher on a real server, pretended generators and verifiers.

`World` plays the trainer and the publisher. Generators and the verifier follow the broker's rules
and draw their results; what they may not do (claim with an old version, hand on a stale attempt)
the broker refuses. Every fate is checked to be on the disk before the server is told to forget.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.audit import Audit, audit
from common.batch_files import BatchFiles, StoredGroup
from common.broker import Broker
from common.config import Config
from common.data import Row
from common.entry import PROMPTS, ROLLOUTS, VERDICTS
from common.ledger import Ledger, Line, read_lines
from common.messages import Prompt, Rollout, Sample, Verdict, Version, decode, encode
from learner.dispatcher import Dispatcher
from learner.groups import Chosen, Judgements
from learner.timeline import Timeline
from tests.unit.records import a_judgement, a_sample

Judge = Callable[[Prompt, int], str]
"""(prompt, attempt) to accepted, filtered, or a reason to fail."""

DEADLINE_S = 10.0


def rows(count: int = 50) -> list[Row]:
    return [Row(f"{n}", np.array([n + 1], dtype=np.int32), "4", "math", True) for n in range(count)]


def drawn(seed: int, accept: float = 0.5, fail: float = 0.1) -> Judge:
    """Random verdicts."""
    dice = random.Random(seed)

    def judge(prompt: Prompt, attempt: int) -> str:
        draw = dice.random()
        if draw < fail:
            return "the checker crashed"
        return "accepted" if draw < fail + accept else "filtered"

    return judge


@dataclass
class Batch:
    """One trained batch: its groups and the oldest version among the tokens of each."""

    version: int
    ordinals: list[int]
    oldest: list[int]


class World:
    """One incarnation of a learner and its surroundings."""

    def __init__(self, config: Config, broker: Broker, data: list[Row] | None = None) -> None:
        self.config, self.broker = config, broker
        self.files = BatchFiles(config.run_dir)
        self.ledger = Ledger(config.run_dir / "ledger.jsonl")
        self.timeline = Timeline.open(config.run_dir)
        self.dispatcher = Dispatcher(config, broker, self.ledger, self.timeline, data or rows())
        self.version = max(self.files.versions(), default=self._folded())
        self.batches: list[Batch] = []
        self.judged: list[Judgements] = []  # what each batch was told of
        self.generated: Counter[str] = Counter()  # samples, by group
        self._tasks: list[asyncio.Task[Any]] = []
        self._watch_settling()

    def _folded(self) -> int:
        return max((line.batch or 0 for line in self.ledger.fates.values()), default=0)

    def _watch_settling(self) -> None:
        """Nothing of training is forgotten on the server before its fate is on the disk."""
        script = self.broker.script

        async def watched(name: str, keys: list[str], args: list[Any]) -> Any:
            if name == "settle" and not str(args[1]).startswith("e"):
                assert int(args[1]) in self.on_disk(), f"group {args[1]} was forgotten too early"
            return await script(name, keys, args)

        self.broker.script = watched  # type: ignore[method-assign]

    def on_disk(self) -> set[int]:
        durable = {line.ordinal for line in read_lines(self.ledger.path)}
        for version in self.files.versions():
            durable |= {ordinal for ordinal, _ in self.files.groups_of(version)}
        return durable

    async def start(self) -> World:
        self.timeline.begin(self.version)
        in_files = [group for v in self.files.versions() for group in self.files.groups_of(v)]
        await self.dispatcher.start(self.version, in_files)
        await self.publish()
        self.spawn(self.dispatcher.run())
        return self

    async def publish(self) -> None:
        version = Version(self.timeline.incarnation, self.version)
        unclaimed = await self.broker.publish(version.incarnation, str(version))
        waiting = [int(gid) for gid in unclaimed if gid.isdecimal()]
        self.dispatcher.admission.publish(version.number, waiting)
        self.dispatcher.may_dispatch = True

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    def check(self) -> None:
        """Raise what ended a task."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def until(self, true: Callable[[], Any], what: str = "it") -> None:
        """Wait for a condition, with a deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not true():
                self.check()
                await asyncio.sleep(0.005)

    async def crash(self) -> None:
        """End as by kill -9: nothing is given back, acknowledged or closed in order."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.05)  # the server hears of the closed connections
        self.ledger.close()

    # --- the trainer ----------------------------------------------------------------------------

    async def choose(self) -> list[Chosen]:
        """The next batch, when there is one."""
        deadline = time.monotonic() + DEADLINE_S
        while (chosen := await self.dispatcher.choose_batch()) is None:
            self.check()
            if await self.broker.published() is None:
                await self.publish()  # as the publisher does on a server that was emptied
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no batch: {self.dispatcher.waiting_for()}; "
                    f"{self.dispatcher.admission.groups}; {self.dispatcher.open}; "
                    f"on the server {await self.dispatcher.streams.known()}, "
                    f"streams {await self.dispatcher.streams.depths()}"
                )
            await asyncio.sleep(0.005)
        return chosen

    async def write(self, chosen: list[Chosen]) -> list[int]:
        """Write the batch file; the ordinals whose payloads are missing if it cannot be."""
        stored, missing = [], []
        for item in chosen:
            gid = str(item.ordinal)
            count = self.config.algorithm.group_size
            payloads = await self.broker.get_samples(gid, item.attempt, count)
            fields = await self._fields(gid)
            if None in payloads or None in fields:
                missing.append(item.ordinal)
            else:
                stored.append(StoredGroup(item.ordinal, item.attempt, *fields, payloads))  # type: ignore[arg-type]
        if not missing:
            self.files.begin(self.version + 1)
            self.files.write_part(self.version + 1, 0, stored)
            self.files.commit(self.version + 1)
        return missing

    async def _fields(self, gid: str) -> Any:
        key = self.broker.key("group", gid)
        return await self.broker.persist(
            lambda: self.broker.client.hmget(key, "prompt", "verdict"), "reading a group"
        )

    async def train(self, batches: int) -> None:
        """Train batches, publishing after each."""
        target = self.version + batches
        while self.version < target:
            chosen = await self.choose()
            if missing := await self.write(chosen):
                await self.dispatcher.not_committed(missing, "payload missing")
                continue
            await self.committed(chosen)

    async def committed(self, chosen: list[Chosen]) -> None:
        """What comes after a batch file is written."""
        await self.dispatcher.committed(chosen)
        oldest = [min(s.oldest.number for s in item.verdict.samples) for item in chosen]
        self.batches.append(Batch(self.version, [item.ordinal for item in chosen], oldest))
        await asyncio.sleep(0.01)
        self.judged.append(await self.dispatcher.trained_batch())
        self.version += 1
        await self.publish()

    async def fold(self) -> None:
        """Batch files become lines of the ledger, as after a checkpoint."""
        done = self.files.versions()
        groups = [(v, o, a) for v in done for o, a in self.files.groups_of(v)]
        await self.dispatcher.fold([Line(o, a, "trained", "", v) for v, o, a in groups])
        self.files.remove(done, keep=False)

    # --- the others -----------------------------------------------------------------------------

    def generators(self, count: int = 2, seed: int = 0, fail: float = 0.0) -> World:
        for index in range(count):
            name = f"g{index}.{self.timeline.incarnation}"
            self.spawn(self._generator(name, random.Random(f"{seed} {index}"), fail))
        return self

    async def _generator(self, name: str, dice: random.Random, fail: float) -> None:
        async with self.broker.lease("generator", name, {"workers": 1}):
            while True:
                version = await self.broker.published() or ""
                entries = await self.broker.reclaim(PROMPTS, name, 2) if version else []
                entries += await self.broker.claim_prompts(version, name, 2)
                for entry in entries:
                    prompt = decode(Prompt, entry.data)
                    await asyncio.sleep(dice.random() * 0.02)
                    await self.generate(entry.id, prompt, name, version, dice.random() < fail)
                await asyncio.sleep(0.005)

    async def generate(
        self, entry: str, prompt: Prompt, name: str, version: str, fails: bool = False
    ) -> bool:
        have = await self.broker.have_samples(prompt.group, prompt.attempt, prompt.samples)
        for index in (index for index, there in enumerate(have) if not there):
            sample = encode(a_sample(3, Version.parse(version)))
            # refused, and so not counted, for an attempt that is over
            ids = (prompt.group, prompt.attempt, index)
            self.generated[prompt.group] += await self.broker.put_sample(*ids, sample)
        failure = "no memory" if fails else ""
        rollout = encode(Rollout(prompt.group, prompt.ordinal, prompt.attempt, name, failure))
        step = ("dispatched", "generated")
        return await self.broker.advance(entry, name, prompt.group, prompt.attempt, step, rollout)

    def verifier(self, judge: Judge) -> World:
        self.spawn(self._verifier(judge))
        return self

    async def _verifier(self, judge: Judge) -> None:
        name = f"v.{self.timeline.incarnation}"
        async with self.broker.lease("verifier", name, {}):
            while True:
                entries = await self.broker.reclaim(ROLLOUTS, name, 8)
                entries += await self.broker.claim(ROLLOUTS, name, 8, 1 if entries else 50)
                for entry in entries:
                    rollout = decode(Rollout, entry.data)
                    verdict = encode(await self._verdict(rollout, judge))
                    ids = (entry.id, name, rollout.group, rollout.attempt)
                    await self.broker.advance(*ids, ("generated", "judged"), verdict)

    async def _verdict(self, rollout: Rollout, judge: Judge) -> Verdict:
        data = await self.broker.get_prompt(rollout.group)
        evaluation = rollout.ordinal < 0
        ids = (rollout.group, rollout.ordinal, rollout.attempt, evaluation)
        if data is None or rollout.failure:
            return Verdict(*ids, "failed", rollout.failure or "the prompt is gone", [], "v")
        prompt = decode(Prompt, data)
        payloads = await self.broker.get_samples(rollout.group, rollout.attempt, prompt.samples)
        if None in payloads:
            return Verdict(*ids, "failed", "a payload is gone", [], "v")
        fate = judge(prompt, rollout.attempt)
        if fate not in ("accepted", "filtered"):
            return Verdict(*ids, "failed", fate, [], "v")
        spans = [decode(Sample, data).spans[0] for data in payloads if data]
        judged = [
            a_judgement(
                "correct" if index % 2 else "wrong", 3, Version(span.incarnation, span.number)
            )
            for index, span in enumerate(spans)
        ]
        reason = "mixed" if fate == "accepted" else "all_wrong"
        fate = "accepted" if evaluation else fate
        return Verdict(*ids, fate, reason, judged, "v")  # type: ignore[arg-type]

    # --- what is left -----------------------------------------------------------------------------

    async def on_server(self) -> set[int]:
        gids: Any = await self.broker.client.smembers(self.broker.key("open"))
        return {int(gid) for gid in gids if not gid.startswith(b"e")}

    async def audit(self) -> Audit:
        return audit(self.config.run_dir, await self.on_server())

    async def leftovers(self) -> list[str]:
        """Keys of groups and samples on the server."""
        pattern = f"{{{self.broker.run}}}:*"
        keys = [key.decode() async for key in self.broker.client.scan_iter(pattern, count=1000)]
        names = [key.split(":", 1)[1] for key in keys]
        return sorted(name for name in names if name.startswith(("group", "sample")))

    async def forget(self) -> None:
        """Empty the server of this run, as one that comes back without its file."""
        keys = [key async for key in self.broker.client.scan_iter(f"{{{self.broker.run}}}:*")]
        if keys:
            await self.broker.client.unlink(*keys)


async def say(broker: Broker, verdicts: Iterable[Verdict | bytes]) -> None:
    """Put verdicts on the stream past the rules, as a repeated delivery would be."""
    for verdict in verdicts:
        data = verdict if isinstance(verdict, bytes) else encode(verdict)
        await broker.client.xadd(broker.key(VERDICTS), {"r": data})


async def prompts_on_stream(broker: Broker) -> list[Prompt]:
    entries: Any = await broker.client.xrange(broker.key(PROMPTS))
    return [decode(Prompt, fields[b"r"]) for _, fields in entries]


@contextlib.asynccontextmanager
async def world(
    config: Config, broker: Broker, data: list[Row] | None = None
) -> AsyncIterator[World]:
    """A started world that is torn down at the end."""
    made = World(config, broker, data)
    try:
        yield await made.start()
        made.check()
    finally:
        await made.crash()
