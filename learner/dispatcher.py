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
from collections import Counter, deque
from collections.abc import Awaitable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from common.broker import PROMPTS, ROLLOUTS, VERDICTS, Broker, Entry
from common.config import Config
from common.data import Row, Sequence, base_ordinal, generation, recycled
from common.errors import MessageError
from common.failpoints import failpoint
from common.ledger import Fate, Ledger, Line
from common.log import get_logger
from common.messages import Prompt, Verdict, Version, decode, encode
from learner.admission import Admission, Group, Hold, Starved, Train
from learner.evaluation import Evaluation
from learner.timeline import Timeline

PUMP_S = 0.02
WATCH_S = 1.0
CONSUMER = "learner"
UNCLAIMED_PER_GENERATOR = 4
"""Prompts that wait in the stream for each generator: enough that none runs dry, few enough that
a prompt is started with weights that are young when it is claimed."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group of a batch: what the ranks need to fetch and train it."""

    ordinal: int
    attempt: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class OnServer:
    """A group as the server knows it. `least` is the number of the least version on its prompt."""

    state: str
    attempt: int
    least: int


@dataclass
class OpenGroup:
    """What the dispatcher knows of an open group besides admission.

    `tokens` are the counts last reported, by generator: a figure that a dead one has left behind
    is no sign of life. `sent` says that the prompt is on the server.
    """

    attempt: int
    since: float
    sent: bool = False
    tokens: dict[str, int] = field(default_factory=dict)
    verdict: Verdict | None = None
    entry: str = ""


@dataclass
class Tally:
    """Verdicts since the last batch: what is reported as 'before the filter'."""

    groups: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    correct: int = 0
    no_answer: int = 0
    truncated: int = 0
    reward: float = 0.0
    length: int = 0

    def add(self, verdict: Verdict) -> None:
        self.groups += 1
        self.reasons[verdict.reason] += 1
        for item in verdict.samples:
            self.samples += 1
            self.correct += item.outcome == "correct"
            self.no_answer += item.outcome == "no_answer"
            self.truncated += item.truncated
            self.reward += item.reward
            self.length += item.length

    def figures(self) -> dict[str, float | None]:
        """Shares and means over all samples judged, filtered ones included; None if there were
        none, as when a batch is formed of groups that were left over."""

        def share(part: float, whole: int) -> float | None:
            return part / whole if whole else None

        return {
            "accuracy_raw": share(self.correct, self.samples),
            "reward_raw": share(self.reward, self.samples),
            "length_mean_raw": share(self.length, self.samples),
            "no_answer_share": share(self.no_answer, self.samples),
            "truncated_share": share(self.truncated, self.samples),
            "acceptance": share(self.reasons["mixed"], self.groups),
            "all_correct_share": share(self.reasons["all_correct"], self.groups),
            "all_wrong_share": share(
                self.reasons["all_wrong"] + self.reasons["no_answer"], self.groups
            ),
            "groups_judged": self.groups,
            "verdicts_failed": self.failed,
        }


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
        self.tally = Tally()
        self.evaluation: Evaluation | None = None
        self.may_dispatch = False
        self.generators = 0
        self.unclaimed = 0
        self._next = 0
        self._holes: deque[int] = deque()
        self._pool: deque[tuple[int, int]] = deque()
        self._chosen: set[int] = set()  # of the batch that is being written just now
        self._closing: set[int] = set()  # their fate is on its way to the disk and the server
        self._asked: dict[int, OpenGroup] = {}  # problems of the evaluation without a verdict
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
        for gid, known in (await self._known()).items():
            ordinal = int(gid) if not gid.startswith("e") else -1
            if ordinal < 0 or self._has_fate(ordinal):
                await self._settle_id(gid)
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

    async def _known(self) -> dict[str, OnServer]:
        """Groups on the server, by id."""
        client, key = self.broker.client, self.broker.key

        async def read() -> dict[str, OnServer]:
            gids: Any = await client.smembers(key("open"))
            pipe = client.pipeline(transaction=False)
            for gid in gids:
                pipe.hmget(key("group", gid.decode()), "state", "attempt", "least")
            found = zip(gids, await pipe.execute() if gids else [], strict=True)
            return {gid.decode(): _on_server(*fields) for gid, fields in found if fields[0]}

        result: dict[str, OnServer] = await self.broker.persist(read, "reading open groups")
        return result

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
            if self.evaluation:
                await self._dispatch_evaluation(self.evaluation)
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
        await self._put(self._prompt(str(ordinal), ordinal, group.attempt, index, self.rows[index]))
        group.sent = True

    def _prompt(self, gid: str, ordinal: int, attempt: int, index: int, row: Row) -> Prompt:
        """The record of a prompt; negative ordinals are problems of an evaluation."""
        evaluation, settings, sampling = ordinal < 0, self.config.eval, self.config.sampling
        return Prompt(
            group=gid, ordinal=ordinal, attempt=attempt, evaluation=evaluation, row=index,
            samples=settings.samples if evaluation else self.config.algorithm.group_size,
            least=Version(self.timeline.incarnation, self.admission.published),
            token_ids=row.token_ids, seed=(self.config.run.seed * 1_000_003 + ordinal) % 2**53,
            temperature=settings.temperature if evaluation else sampling.temperature,
            top_p=settings.top_p if evaluation else sampling.top_p,
            max_tokens=sampling.max_tokens,
            gold=row.gold, checker=row.checker, boxed=row.boxed, text=row.text,
        )  # fmt: skip

    async def _put(self, prompt: Prompt) -> None:
        key = self.broker.key
        keys = [key("fence"), key("open"), key("group", prompt.group), key(PROMPTS)]
        prefix = key("sample", prompt.group, "")
        fence = self.timeline.incarnation
        args = [fence, prompt.group, prompt.attempt, str(prompt.least), encode(prompt)]
        await self.broker.script("dispatch", keys, [*args, prompt.samples, prefix])

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
                await self._acknowledge(group.entry)

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
                later.append(self._take_evaluation(entry, verdict))
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
            await self._settle_id(verdict.group)
        await self._acknowledge(entry.id)

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
            await self._settle_id(str(line.ordinal), group.entry)
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

    async def _settle_id(self, gid: str, entry: str = "") -> None:
        key = self.broker.key
        keys = [key("fence"), key("open"), key("group", gid), key(VERDICTS)]
        samples = max(self.config.algorithm.group_size, self.config.eval.samples)
        args = [self.timeline.incarnation, gid, entry, samples, key("sample", gid, "")]
        await self.broker.script("settle", keys, args)

    async def _acknowledge(self, entry: str) -> None:
        key, client = self.broker.key(VERDICTS), self.broker.client

        async def acknowledge() -> None:
            pipe = client.pipeline(transaction=True)
            pipe.xack(key, "workers", entry)
            pipe.xdel(key, entry)
            await pipe.execute()

        await self.broker.persist(acknowledge, "acknowledging")

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
            await self._settle_id(str(ordinal), group.entry)

    async def not_committed(self, ordinals: Collection[int], why: str) -> None:
        """The batch could not be formed: payloads of these groups are gone from the server."""
        self._chosen.clear()
        await self.redo(ordinals, why)

    async def trained_batch(self) -> Tally:
        """The batch is trained: capacity returns. The tally of verdicts since the last one."""
        self.admission.trained()
        tally, self.tally = self.tally, Tally()
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

    async def depths(self) -> dict[str, int]:
        """Entries in each stream."""
        client, key = self.broker.client, self.broker.key

        async def ask() -> dict[str, int]:
            return {name: await client.xlen(key(name)) for name in (PROMPTS, ROLLOUTS, VERDICTS)}

        result: dict[str, int] = await self.broker.persist(ask, "queue depths")
        return result

    # --- evaluation -----------------------------------------------------------------------------

    async def evaluate(self, evaluation: Evaluation) -> None:
        """Start an evaluation; it is done when `evaluation.done` says so."""
        self.evaluation, self._asked = evaluation, {}

    async def _dispatch_evaluation(self, evaluation: Evaluation) -> None:
        if evaluation.done:
            return
        limit = UNCLAIMED_PER_GENERATOR * 4 * max(1, self.generators)
        for index in evaluation.next(limit - len(await self.broker.unclaimed())):
            await self._ask(evaluation, index, 0)

    async def _ask(self, evaluation: Evaluation, index: int, attempt: int) -> None:
        """Send a problem out, under an attempt."""
        self._asked[index] = OpenGroup(attempt, time.monotonic())
        gid, row = evaluation.group(index), evaluation.rows[index]
        await self._put(self._prompt(gid, -1 - index, attempt, index, row))

    async def _ask_again(self, evaluation: Evaluation, index: int, why: str) -> None:
        """Another attempt at a problem; at the end of the attempts it counts as failed."""
        attempt = self._asked[index].attempt + 1
        if attempt < self.config.admission.attempts:
            log.warning("another attempt", group=evaluation.group(index), attempt=attempt, why=why)
            await self._ask(evaluation, index, attempt)
            return
        gid = evaluation.group(index)
        del self._asked[index]
        evaluation.add(index, Verdict(gid, -1 - index, attempt - 1, True, "failed", why, [], ""))
        await self._settle_id(gid)

    async def _take_evaluation(self, entry: Entry, verdict: Verdict) -> None:
        evaluation, index = self.evaluation, -1 - verdict.ordinal
        asked = self._asked.get(index)
        if evaluation is None or verdict.group != evaluation.group(index):
            await self._settle_id(verdict.group, entry.id)
        elif asked is None or asked.attempt != verdict.attempt:
            await self._acknowledge(entry.id)  # a delivery that was repeated
        elif verdict.fate == "failed":
            await self._ask_again(evaluation, index, verdict.reason)
            await self._acknowledge(entry.id)
        else:
            del self._asked[index]
            evaluation.add(index, verdict)
            await self._settle_id(verdict.group, entry.id)

    # --- silence and reconnection ---------------------------------------------------------------

    async def _silent(self) -> None:
        """Groups without a new token for `silence_s` start anew, unless they wait for a worker.

        The deadline runs on silence and not on elapsed time: long responses are no fault.
        """
        waiting: dict[str, OpenGroup] = {str(o): g for o, g in self.open.items() if not g.verdict}
        evaluation, problems = self.evaluation, {}
        if evaluation:
            problems = {evaluation.group(index): index for index in self._asked}
            waiting |= {gid: self._asked[index] for gid, index in problems.items()}
        now, limit = time.monotonic(), self.config.admission.silence_s
        for member, status in (await self.broker.reports()).items():
            for gid, tokens in status.get("progress", {}).items():
                group = waiting.get(gid)
                if group is not None and group.tokens.get(member) != tokens:
                    group.tokens[member], group.since = tokens, now
        quiet = [gid for gid, group in waiting.items() if now - group.since > limit]
        if not quiet:
            return
        known, why = await self._known(), f"silent for {limit:g} s"
        unclaimed, unjudged = await self.broker.unclaimed(), (await self.depths())[ROLLOUTS]
        for gid in quiet:
            generated = gid in known and known[gid].state == "generated"
            if gid in unclaimed or (generated and unjudged):
                continue
            if gid not in problems:
                await self.redo([int(gid)], why)
            elif evaluation and self._asked.get(problems[gid]) is waiting[gid]:
                await self._ask_again(evaluation, problems[gid], why)

    async def _reconcile(self) -> None:
        """After a lost connection: groups that the server forgot go out again."""
        mine, evaluation, asked = list(self.open), self.evaluation, list(self._asked)
        known = await self._known()
        for gid in known:
            if not gid.startswith("e") and self._has_fate(int(gid)):
                await self._settle_id(gid)  # it forgot that it was told to forget
        forgotten = [ordinal for ordinal in mine if str(ordinal) not in known]
        if forgotten:
            log.warning("the server forgot open groups; they go out again", groups=len(forgotten))
            await self.redo(forgotten, "forgotten by the server")
        for index in asked:
            if evaluation and evaluation.group(index) not in known and index in self._asked:
                await self._ask(evaluation, index, self._asked[index].attempt)

    def fate_counts(self) -> dict[Fate | str, int]:
        """Groups by fate so far, those in batch files counted as trained."""
        counts: dict[Fate | str, int] = dict(self.ledger.counts())
        counts["trained"] = counts.get("trained", 0) + len(self.trained)
        counts["open"] = len(self.open)
        return counts


def _on_server(state: bytes, attempt: bytes, least: bytes) -> OnServer:
    return OnServer(state.decode(), int(attempt), Version.parse(least.decode()).number)
