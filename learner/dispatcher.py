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
from collections import deque
from collections.abc import Awaitable, Collection, Iterable

from common.broker import ROLLOUTS, VERDICTS, Broker, Entry
from common.config import Config
from common.data import Row, Sequence, base_ordinal, generation, recycled
from common.errors import MessageError
from common.failpoints import failpoint
from common.ledger import Fate, Ledger, Line
from common.log import get_logger
from common.messages import Verdict, decode
from learner.admission import Admission, Group, Hold, Starved, Train
from learner.evaluation import Examiner
from learner.groups import Chosen, Judgements, OpenGroup
from learner.streams import Streams
from learner.timeline import Timeline

PUMP_S = 0.02
WATCH_S = 1.0
CONSUMER = "learner"
UNCLAIMED_PER_GENERATOR = 4
"""Prompts that wait in the stream for each generator: enough that none runs dry, few enough that
a prompt is started with weights that are young when it is claimed."""
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
            algorithm.groups_per_batch, admission.max_staleness, admission.oversample
        )
        self.sequence = Sequence(len(rows), config.run.seed)
        self.open: dict[int, OpenGroup] = {}
        self.trained: set[int] = set()  # in batch files, not yet folded into the ledger
        self.tally = Judgements()
        self.streams = Streams(config, broker, timeline)
        self.examiner = Examiner(self.streams, self.admission)
        self.may_dispatch = False
        self.generators = 0
        self.unclaimed = 0
        self._next = 0
        self._holes: deque[int] = deque()
        self._pool: deque[tuple[int, int]] = deque()
        self._chosen: set[int] = set()  # of the batch that is being written just now
        self._closing: set[int] = set()  # their fate is on its way to the disk and the server
        self._disk = asyncio.Lock()
        self._sending = asyncio.Lock()

    # --- start ----------------------------------------------------------------------------------

    async def start(self, version: int, in_files: Iterable[tuple[int, int]]) -> None:
        """Rebuild the state from the disk and from what the server knows.

        `in_files` are the (ordinal, attempt) of batch files; `version` their newest batch.
        """
        self.trained = {ordinal for ordinal, _ in in_files}
        # The fence first: from here on no other learner changes anything, and nobody claims until
        # this one has published, so that what is unclaimed now stays so.
        unclaimed = set(await self.broker.publish(self.timeline.incarnation, ""))
        groups = []
        for gid, known in (await self.streams.known()).items():
            ordinal = int(gid) if not gid.startswith("e") else -1
            if ordinal < 0 or self._has_fate(ordinal):
                await self.streams.settle(gid)
                continue
            self.open[ordinal] = OpenGroup(known.attempt, time.monotonic(), sent=True)
            oldest = min(known.least, version)
            groups.append(Group(ordinal, oldest, started=gid not in unclaimed))
        self.admission.restore(version, version, groups, self._past_verdicts())
        seen = [base_ordinal(o) for o in [*self.ledger.fates, *self.trained, *self.open]]
        self._next = max(seen, default=-1) + 1
        self._holes.extend(
            o for o in range(self._next) if not self._has_fate(o) and o not in self.open
        )
        for line in self.ledger.fates.values():
            self._return_prompt(line)
        log.info("dispatcher ready", version=version, open=len(self.open), holes=len(self._holes),
                 next_ordinal=self._next)  # fmt: skip

    def _past_verdicts(self) -> list[bool]:
        """Whether the groups judged so far passed the filter, by their place in the sequence."""
        passed = dict.fromkeys(self.trained, True)
        for line in self.ledger.fates.values():
            if line.fate in ("trained", "filtered"):
                passed[line.ordinal] = line.fate == "trained"
        return [passed[ordinal] for ordinal in sorted(passed, key=base_ordinal)]

    def _has_fate(self, ordinal: int) -> bool:
        return ordinal in self.ledger.fates or ordinal in self.trained

    # --- the loops ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Receive, pump and watch until cancelled."""
        await asyncio.gather(self._receive(), self._pump(), self._watch())

    async def _receive(self) -> None:
        while True:
            entries = await self.broker.claim(VERDICTS, CONSUMER, 64, 500)
            await self._take([entry for entry in entries if not self._holds(entry)])

    def _holds(self, entry: Entry) -> bool:
        return any(group.entry == entry.id for group in self.open.values())

    async def _pump(self) -> None:
        while True:
            if self.may_dispatch:
                await self._lose()
                async with self._sending:
                    await self._dispatch()
            await self.examiner.send(4 * UNCLAIMED_PER_GENERATOR * max(1, self.generators))
            await asyncio.sleep(PUMP_S)

    async def _watch(self) -> None:
        disconnects = self.broker.disconnects
        while True:
            await asyncio.sleep(WATCH_S)
            self.generators = len(await self.broker.members("generator"))
            if self.broker.disconnects != disconnects:
                disconnects = self.broker.disconnects
                await self._reconcile()
            await self._silent()

    # --- dispatch -------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        """Send out as many prompts as admission allows."""
        sent = {ordinal: group for ordinal, group in self.open.items() if group.sent}
        unclaimed = await self.broker.unclaimed()
        self.unclaimed = len(unclaimed)
        for ordinal, group in sent.items():
            if str(ordinal) not in unclaimed and self.open.get(ordinal) is group:
                self.admission.claim(ordinal)
        limit = UNCLAIMED_PER_GENERATOR * max(1, self.generators)
        for _ in range(self.admission.can_dispatch(self.unclaimed, limit)):
            if not self.may_dispatch:
                return
            ordinal = self._choose()
            self.admission.dispatch(ordinal)
            self.open[ordinal] = OpenGroup(0, time.monotonic())
            await self._send(ordinal)

    def _choose(self) -> int:
        """The next ordinal: holes of a crash first, then prompts that came back, then new ones."""
        if self._holes:
            return self._holes.popleft()
        if self._pool and self._pool[0][0] <= self._next:
            return self._pool.popleft()[1]
        self._next += 1
        return self._next - 1

    async def _send(self, ordinal: int) -> None:
        """Put the prompt of an open group on the stream, under its attempt."""
        group = self.open[ordinal]
        index = self.sequence.row(ordinal)
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
            if group.attempt + 1 >= self.config.admission.attempts:
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
        later: list[Awaitable[None]] = []  # nothing is awaited before the fates are taken
        for entry in entries:
            try:
                verdict = decode(Verdict, entry.data, self.config.max_message_bytes)
            except MessageError as error:
                later.append(self.broker.bury(VERDICTS, entry, str(error)))
                continue
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
            self.tally.add(verdict)
            if line := self._judge(verdict):
                fates.append(line)
        await self._close(fates)
        for action in later:
            await action

    async def _drop(self, entry: Entry, verdict: Verdict) -> None:
        """A delivery that was repeated, or of an attempt that is over."""
        while verdict.ordinal in self._closing:  # its fate is not durable yet
            await asyncio.sleep(PUMP_S)
        if self._has_fate(verdict.ordinal):
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
        for line, group in zip(lines, groups, strict=True):
            self._return_prompt(line)
            await self.streams.settle(str(line.ordinal), group.entry)
            self._closing.discard(line.ordinal)

    async def _record(self, lines: list[Line]) -> None:
        """Make fates durable without stopping the event loop for the fsync."""
        async with self._disk:
            await asyncio.to_thread(self.ledger.record, lines)

    def _return_prompt(self, line: Line) -> None:
        """A prompt that was lost comes back later in its epoch, not at the head of the queue."""
        child = recycled(line.ordinal)
        if line.fate not in ("stale", "failed") or self._has_fate(child) or child in self.open:
            return
        if generation(child) > self.config.admission.recycles:
            return
        after = 4 * self.admission.capacity
        self._pool.append((base_ordinal(line.ordinal) + min(after, len(self.rows)), child))

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
        self.trained -= {line.ordinal for line in lines}

    async def end(self) -> None:
        """The run is complete: what is still open is stale, so that every group has its fate."""
        self.may_dispatch = False
        async with self._sending:
            ends = [Line(o, g.attempt, "stale", "run ended") for o, g in self.open.items()]
            await self._close(ends)
        # what a crash left without a fate and nobody needed any more
        await self._record([Line(o, 0, "stale", "run ended") for o in self._holes])
        self._holes.clear()

    def waiting_for(self) -> str:
        """In words: why nothing is trained just now."""
        decision = None if self.admission.training else self.admission.decide()
        if isinstance(decision, Hold | Starved):
            return self.admission.explain()
        return ""

    # --- silence and reconnection ---------------------------------------------------------------

    async def _silent(self) -> None:
        """Groups without a new token for `silence_s` start anew, unless they wait for a worker.

        The deadline runs on silence and not on elapsed time: long responses are no fault.
        """
        waiting: dict[str, OpenGroup] = {str(o): g for o, g in self.open.items() if not g.verdict}
        examiner, problems = self.examiner, {}
        evaluation = examiner.evaluation
        if evaluation:
            problems = {evaluation.group(index): index for index in examiner.asked}
            waiting |= {gid: examiner.asked[index] for gid, index in problems.items()}
        now, limit = time.monotonic(), self.config.admission.silence_s
        for member, status in (await self.broker.reports()).items():
            for gid, tokens in status.get("progress", {}).items():
                group = waiting.get(gid)
                if group is not None and group.tokens.get(member) != tokens:
                    group.tokens[member], group.since = tokens, now
        quiet = [gid for gid, group in waiting.items() if now - group.since > limit]
        if not quiet:
            return
        known, why = await self.streams.known(), f"silent for {limit:g} s"
        unclaimed, unjudged = await self.broker.unclaimed(), (await self.streams.depths())[ROLLOUTS]
        for gid in quiet:
            generated = gid in known and known[gid].state == "generated"
            if gid in unclaimed or (generated and unjudged):
                continue
            if gid not in problems:
                await self.redo([int(gid)], why)
            elif evaluation and examiner.asked.get(problems[gid]) is waiting[gid]:
                await examiner.ask_again(evaluation, problems[gid], why)

    async def _reconcile(self) -> None:
        """After a lost connection: groups that the server forgot go out again."""
        mine, examiner = list(self.open), self.examiner
        evaluation, asked = examiner.evaluation, list(examiner.asked)
        known = await self.streams.known()
        for gid in known:
            if not gid.startswith("e") and self._has_fate(int(gid)):
                await self.streams.settle(gid)  # it forgot that it was told to forget
        forgotten = [ordinal for ordinal in mine if str(ordinal) not in known]
        if forgotten:
            log.warning("the server forgot open groups; they go out again", groups=len(forgotten))
            await self.redo(forgotten, "forgotten by the server")
        for index in asked:
            if evaluation and evaluation.group(index) not in known and index in examiner.asked:
                await examiner.ask(evaluation, index, examiner.asked[index].attempt)

    def fate_counts(self) -> dict[Fate | str, int]:
        """Groups by fate so far, those in batch files counted as trained."""
        counts: dict[Fate | str, int] = dict(self.ledger.counts())
        counts["trained"] = counts.get("trained", 0) + len(self.trained)
        counts["open"] = len(self.open)
        return counts
