"""Prompts out, verdicts in: the learner's side of the streams, in an event loop of its own.

Rank 0 runs it in a thread, so that prompts go out while the main thread trains. Invariants:

- The admission rule (`learner.admission`) alone decides what may start and what is lost.
- A fate is on disk before it is acknowledged (`Ledger.record`, then `Broker.settle`); a group that
  is delivered again after that is dropped.
- Every ordinal up to the highest one dispatched has a fate or is open here; one that the server
  does not know is dispatched again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable

from common.broker import Broker
from common.config import Config
from common.data import Row
from common.entry import VERDICTS, Entry
from common.errors import MessageError
from common.failpoints import failpoint
from common.ledger import Fate, Ledger, Line
from common.log import get_logger
from common.messages import Verdict, Version, decode, is_deadly
from common.order import base_ordinal, order_of
from learner.admission import UNCLAIMED_PER_GENERATOR, Admission
from learner.decision import Group, Hold, Starved, Train
from learner.evaluation import Examiner, is_problem
from learner.generators import Pace, pace
from learner.groups import Chosen, Judgements, OpenGroup, require_possible
from learner.ordinals import Ordinals
from learner.rollouts import RolloutKeeper
from learner.streak import Streak
from learner.streams import Streams
from learner.timeline import Timeline
from learner.upkeep import Upkeep

PUMP_S = 0.02
WATCH_S = 1.0
log = get_logger(__name__)


class Dispatcher:
    """Open groups, the ledger's writer, and the two streams that end at the learner."""

    def __init__(
        self, config: Config, broker: Broker, ledger: Ledger, timeline: Timeline, rows: list[Row]
    ) -> None:
        self.config, self.broker, self.ledger, self.rows = config, broker, ledger, rows
        self.timeline = timeline
        algorithm, admission = config.algorithm, config.admission
        self.admission = Admission(
            algorithm.groups_per_batch, admission.max_staleness, admission.oversample,
            admission.policy,
        )  # fmt: skip
        parts = (row.part for row in rows)
        self.order = order_of(parts, config.data.weights, config.run.seed)
        self.open: dict[int, OpenGroup] = {}
        self.trained: set[int] = set()  # in batch files, not yet folded into the ledger
        self.tally = Judgements()
        self.streams = Streams(config, broker, timeline)
        self.examiner = Examiner(self.streams, lambda: self.admission.published)
        self.may_dispatch = False
        self.members: Counter[str] = Counter()
        self.judged = 0
        """Verdicts of training and evaluations since the start, those of failures left out."""
        self.generators = 0
        self.pace = Pace()
        self.unclaimed = 0
        after = min(4 * self.admission.capacity, len(rows))
        self.ordinals = Ordinals(admission.recycles, after, self._is_taken)
        self.streak = Streak(admission.give_up_after)
        self.upkeep = Upkeep(self)
        self.rollouts = RolloutKeeper(config, broker)
        self._chosen: set[int] = set()  # of the batch that is being written just now
        self._closing: set[int] = set()  # their fate is on its way to the disk and the server
        self._disk = asyncio.Lock()
        self._sending = asyncio.Lock()

    # --- start ----------------------------------------------------------------------------------

    async def start(self, version: int, in_files: Iterable[tuple[int, int]]) -> None:
        """Rebuild the state from the disk and from what the server knows.

        `in_files` are the (ordinal, attempt) of batch files; `version` their newest batch.
        """
        self.trained = {ordinal for ordinal, _ in in_files} - self.ledger.fates.keys()
        # The fence first: from here on no other learner changes anything, and nobody claims until
        # this one has published, so that what is unclaimed now stays so.
        unclaimed = set(await self.broker.publish(self.timeline.incarnation, ""))
        groups = []
        for gid, known in (await self.streams.known()).items():
            ordinal = -1 if is_problem(gid) else int(gid)
            if ordinal < 0 or self.has_fate(ordinal):
                await self.streams.settle(gid)
                continue
            self.open[ordinal] = OpenGroup(known.attempt, time.monotonic(), sent=True)
            oldest = min(known.least, version)
            groups.append(Group(ordinal, oldest, started=gid not in unclaimed))
        reasons = self._past_reasons()
        self.streak.restore(reasons)
        self.admission.restore(version, version, groups, (not reason for reason in reasons))
        known_here = [*self.ledger.fates, *self.trained, *self.open]
        self.ordinals.restore(known_here, self.ledger.fates.values())
        log.info("dispatcher ready", version=version, open=len(self.open),
                 holes=len(self.ordinals.holes), next_ordinal=self.ordinals.next_new)  # fmt: skip

    def _past_reasons(self) -> list[str]:
        """Why the groups judged so far were filtered, '' if they were not, by their place in the
        sequence."""
        reasons = dict.fromkeys(self.trained, "")
        for line in self.ledger.fates.values():
            if line.fate in ("trained", "filtered"):
                reasons[line.ordinal] = "" if line.fate == "trained" else line.reason
        return [reasons[ordinal] for ordinal in sorted(reasons, key=base_ordinal)]

    def has_fate(self, ordinal: int) -> bool:
        return ordinal in self.ledger.fates or ordinal in self.trained

    def _is_taken(self, ordinal: int) -> bool:
        return self.has_fate(ordinal) or ordinal in self.open

    # --- the loops ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Receive, pump and watch until cancelled."""
        await asyncio.gather(self._receive(), self._pump(), self._watch())

    async def _receive(self) -> None:
        consumer = f"learner.{self.timeline.incarnation}"
        while True:
            # an older incarnation has no use for what it claimed, or claims before it is fenced
            entries = await self.broker.reclaim(VERDICTS, consumer, 64)
            entries += await self.broker.claim(VERDICTS, consumer, 64, 1 if entries else 500)
            await self._take([entry for entry in entries if not self._holds(entry)])

    def _holds(self, entry: Entry) -> bool:
        return any(group.entry == entry.id for group in self.open.values())

    async def _pump(self) -> None:
        while True:
            if self.may_dispatch:
                await self._lose()
                async with self._sending:
                    await self._dispatch()
            await self.examiner.send(self._unclaimed_limit)
            await asyncio.sleep(PUMP_S)

    async def _watch(self) -> None:
        disconnects = self.broker.disconnects
        while True:
            await asyncio.sleep(WATCH_S)
            reports = await self.broker.reports()
            living = await self.broker.members()
            self.members = Counter(info.get("role", "") for info in living.values())
            generators = [name for name in living if living[name].get("role") == "generator"]
            self.generators, self.pace = len(generators), pace(reports, generators)
            if self.broker.disconnects != disconnects:
                disconnects = self.broker.disconnects
                await self.upkeep.reconcile()
            await self.upkeep.silence(reports)

    # --- dispatch -------------------------------------------------------------------------------

    @property
    def _unclaimed_limit(self) -> int:
        return UNCLAIMED_PER_GENERATOR * max(1, self.generators)

    async def _dispatch(self) -> None:
        """Send out as many prompts as admission allows."""
        sent = {ordinal: group for ordinal, group in self.open.items() if group.sent}
        # problems of an evaluation have a limit of their own: neither kind waits for the other
        unclaimed = {gid for gid in await self.broker.unclaimed() if not is_problem(gid)}
        self.unclaimed = len(unclaimed)
        for ordinal, group in sent.items():
            if str(ordinal) not in unclaimed and self.open.get(ordinal) is group:
                self.admission.claim(ordinal)
        allowed = self.admission.can_dispatch(self.unclaimed, self._unclaimed_limit)
        for _ in range(min(allowed, self._worth_a_try())):
            if not self.may_dispatch:
                return
            ordinal = self.ordinals.next()
            self.admission.dispatch(ordinal)
            self.open[ordinal] = OpenGroup(0, time.monotonic())
            await self._send(ordinal)

    def _worth_a_try(self) -> int:
        """How many groups may go out besides those pending, while hardly any is mixed."""
        most = max(1, self.admission.capacity // self.streak.back_off)
        return max(0, most - self.admission.counts().pending)

    async def _send(self, ordinal: int) -> None:
        """Put the prompt of an open group on the stream, under its attempt."""
        group = self.open[ordinal]
        index = self.order.row(ordinal)
        row, published = self.rows[index], self.admission.published
        prompt = self.streams.prompt(str(ordinal), ordinal, group.attempt, index, row, published)
        await self.streams.put(prompt)
        group.sent = True

    async def redo(self, ordinals: Collection[int], why: str) -> None:
        """Another attempt for open groups whose payloads or tokens did not come."""
        count = self.config.algorithm.group_size
        for ordinal in ordinals:
            group = self.open.get(ordinal)
            if group is None or ordinal in self._chosen:
                continue
            if is_deadly(why) or group.attempt + 1 >= self.config.admission.attempts:
                await self._close([Line(ordinal, group.attempt, "failed", why)])
                continue
            kept = any(await self.broker.have_samples(str(ordinal), group.attempt, count))
            if self.open.get(ordinal) is not group or ordinal in self._chosen:
                continue  # meanwhile it got a fate, another attempt, or a place in a batch
            log.warning("another attempt", group=ordinal, attempt=group.attempt + 1, why=why)
            self.open[ordinal] = OpenGroup(group.attempt + 1, time.monotonic())
            # samples that are kept keep their age
            oldest = self.admission.groups[ordinal].oldest if kept else None
            self.admission.redispatch(ordinal, oldest)
            await self._send(ordinal)
            if group.entry:
                await self.streams.acknowledge(group.entry)

    # --- verdicts -------------------------------------------------------------------------------

    async def _take(self, entries: list[Entry]) -> None:
        """Handle verdicts; fates of one read share one fsync."""
        fates: list[Line] = []
        poison: list[tuple[Entry, str]] = []
        later: list[Awaitable[None]] = []  # nothing is awaited before the fates are taken
        for entry in entries:
            try:
                verdict = self._read(entry)
            except MessageError as error:
                poison.append((entry, str(error)))
                continue
            self.judged += verdict.fate != "failed"
            if verdict.evaluation:
                later.append(self.examiner.take(entry, verdict))
                continue
            group = self.open.get(verdict.ordinal)
            if group is None or group.attempt != verdict.attempt or group.verdict is not None:
                later.append(self._drop(entry, verdict))
                continue
            group.entry, group.verdict = entry.id, verdict
            if verdict.fate == "failed":
                self.tally.failed += 1
                later.append(self.redo([verdict.ordinal], verdict.reason))
                continue
            self._count(verdict)
            if line := self._judge(verdict):
                fates.append(line)
        await self._close(fates)
        for action in later:
            await action
        if poison:  # all at once: a flood of them must not hold up what is sound
            await asyncio.gather(*(self.broker.bury(VERDICTS, entry, why) for entry, why in poison))

    def _read(self, entry: Entry) -> Verdict:
        config = self.config
        verdict = decode(Verdict, entry.data, config.max_message_bytes)
        samples = config.eval.samples if verdict.evaluation else config.algorithm.group_size
        newest = Version(self.timeline.incarnation, self.admission.version)
        require_possible(verdict, samples, newest)
        return verdict

    def _count(self, verdict: Verdict) -> None:
        """For the figures, and for the question whether there is anything left to learn."""
        self.tally.add(verdict)
        if self.streak.judge("" if verdict.fate == "accepted" else verdict.reason):
            log.warning("nothing to learn of late; fewer groups go out",
                        one_in=self.streak.back_off, why=self.streak.explain())  # fmt: skip

    async def _drop(self, entry: Entry, verdict: Verdict) -> None:
        """A delivery that was repeated, or of an attempt that is over."""
        while verdict.ordinal in self._closing:  # its fate is not durable yet
            await asyncio.sleep(PUMP_S)
        if self.has_fate(verdict.ordinal):
            await self.streams.settle(verdict.group)
        await self.streams.acknowledge(entry.id)

    def _judge(self, verdict: Verdict) -> Line | None:
        """Report a verdict to admission; a fate if the group has one by it."""
        ordinal, attempt = verdict.ordinal, verdict.attempt
        lost = [s for s in verdict.samples if self.timeline.lost(s.newest)]
        if lost:
            return Line(ordinal, attempt, "stale", "rewound")
        self.admission.verdict(verdict.fate == "accepted")
        if verdict.fate == "filtered":
            return Line(ordinal, attempt, "filtered", verdict.reason)
        self.admission.accept(ordinal, min(s.oldest.number for s in verdict.samples))
        return None

    async def _lose(self) -> None:
        if self._chosen:
            return  # a late verdict may push a group of the batch being written behind the slots
        lost = self.admission.lost()
        for ordinal in lost:
            self.tally.lose(self.open[ordinal])
        await self._close([Line(o, self.open[o].attempt, "stale", "no slot") for o in lost])

    async def _close(self, lines: list[Line]) -> None:
        """Give open groups their fate: on the disk first, then on the server."""
        if not lines:
            return
        # Out of memory first and without a pause, so that no other task decides on them meanwhile.
        groups = [self.open.pop(line.ordinal) for line in lines]
        for line in lines:
            self.admission.close(line.ordinal)
            self._closing.add(line.ordinal)
        await self._record(lines)
        failpoint("ledger_recorded")
        await self.rollouts.closing(lines, self.admission.version + 1)
        for line, group in zip(lines, groups, strict=True):
            self.ordinals.give_back(line)
            await self.streams.settle(str(line.ordinal), group.entry)
            self._closing.discard(line.ordinal)

    async def _record(self, lines: list[Line]) -> None:
        """Make fates durable without stopping the event loop for the fsync."""
        async with self._disk:
            await asyncio.to_thread(self.ledger.record, lines)

    # --- what the trainer asks ------------------------------------------------------------------

    async def choose_batch(self) -> list[Chosen] | None:
        """The groups of the next batch if admission says `Train`, in order."""
        decision = self.admission.decide()
        if not isinstance(decision, Train):
            return None
        chosen = []
        for ordinal in decision.ordinals:
            group = self.open[ordinal]
            assert group.verdict is not None
            chosen.append(Chosen(ordinal, group.attempt, group.verdict))
        self._chosen.update(decision.ordinals)
        return chosen

    async def committed(self, batch: list[Chosen]) -> None:
        """The batch file is durable, which is the fate `trained`: forget the groups elsewhere."""
        self.admission.begin([item.ordinal for item in batch])
        self.trained.update(item.ordinal for item in batch)
        self._chosen.clear()
        groups = [(item.ordinal, self.open.pop(item.ordinal)) for item in batch]
        for ordinal, group in groups:
            await self.streams.settle(str(ordinal), group.entry)

    async def not_committed(self, ordinals: Collection[int], why: str) -> None:
        """The batch could not be formed: payloads of these groups are gone from the server."""
        self._chosen.clear()
        await self.redo(ordinals, why)

    async def trained_batch(self) -> Judgements:
        """The batch is trained: capacity returns. The tally of verdicts since the last one."""
        self.admission.trained()
        tally, self.tally = self.tally, Judgements()
        return tally

    async def fold(self, lines: list[Line]) -> None:
        """Batch files that a kept checkpoint contains become lines of the ledger."""
        await self._record(lines)
        if lines:
            failpoint("batches_folded")
        self.trained -= {line.ordinal for line in lines}

    async def end(self) -> None:
        """The run is complete: what is still open is stale, so that every group has its fate."""
        self.may_dispatch = False
        async with self._sending:
            ends = [Line(o, g.attempt, "stale", "run ended") for o, g in self.open.items()]
            await self._close(ends)
        # what a crash left without a fate and nobody needed any more
        await self._record([Line(o, 0, "stale", "run ended") for o in self.ordinals.holes])
        self.ordinals.holes.clear()

    async def nothing_left(self) -> str:
        """Why the run is to end for want of mixed groups; empty while it is not.

        A batch that is there, or that a hold only puts off, is trained first.
        """
        if not self.streak.over or not isinstance(self.admission.decide(), Starved):
            return ""
        self.may_dispatch = False
        return f"nothing left to learn: {self.streak.explain()}"

    def waiting_for(self) -> str:
        """In words: why nothing is trained just now."""
        decision = None if self.admission.training else self.admission.decide()
        if isinstance(decision, Hold | Starved):
            return self.admission.explain()
        return ""

    def fate_counts(self) -> dict[Fate | str, int]:
        """Groups by fate so far, those in batch files counted as trained."""
        counts: dict[Fate | str, int] = dict(self.ledger.counts())
        counts["trained"] = counts.get("trained", 0) + len(self.trained)
        counts["open"] = len(self.open)
        return counts
