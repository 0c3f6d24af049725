"""An evaluation: held-out problems through the same generators and verifiers.

Outside admission, filter and training counts. It reports which policy versions made its samples,
since generators that serve it may take new weights meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from common.data import Row
from common.entry import Entry
from common.log import get_logger
from common.messages import Judged, Verdict, is_deadly
from common.results import Answer, ProblemResult, by_file, figures
from learner.groups import OpenGroup
from learner.streams import Streams

log = get_logger(__name__)


class HeldOut(NamedTuple):
    """A row of a data file; `number` counts them from 1."""

    file: str
    number: int
    row: Row


class Evaluation:
    """Progress and result of one evaluation; `label` tells it from others of the run.

    `files` are the rows by the name of their data file; `keep` gets each result as it comes.
    """

    def __init__(
        self, label: str, files: Mapping[str, Sequence[Row]],
        keep: Callable[[ProblemResult], None] | None = None,
    ) -> None:  # fmt: skip
        self.label = label
        self.problems = [
            HeldOut(name, number, row)
            for name, rows in files.items()
            for number, row in enumerate(rows, 1)
        ]
        self.results: dict[int, ProblemResult] = {}
        self._keep = keep
        self._unsent = deque(range(len(self.problems)))
        self._asked: dict[int, float] = {}

    def restore(self, results: Iterable[ProblemResult]) -> None:
        """Take over results of before an interruption; their problems are not sent again."""
        places = {(p.file, p.number): index for index, p in enumerate(self.problems)}
        self.results |= {places[result.file, result.row]: result for result in results}
        self._unsent = deque(i for i in range(len(self.problems)) if i not in self.results)

    def group(self, index: int) -> str:
        """Group id of a problem."""
        return f"e{self.label}-{index}"

    def next(self, room: int) -> list[int]:
        """Problems to send now, at most `room`."""
        sent = [self._unsent.popleft() for _ in range(min(room, len(self._unsent)))]
        self._asked |= dict.fromkeys(sent, time.time())
        return sent

    def add(self, index: int, verdict: Verdict) -> None:
        """The verdict on a problem, the last one that it gets."""
        times = (self._asked.get(index, 0.0), time.time())
        self.results[index] = _result(self.problems[index], verdict, times)
        if self._keep:
            self._keep(self.results[index])

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.problems)

    def ordered(self) -> list[ProblemResult]:
        """The results in the order of the data."""
        return [self.results[index] for index in sorted(self.results)]

    def result(self) -> dict[str, Any]:
        """The figures over all problems (`common.results.figures`), and those of each file."""
        results = self.ordered()
        return {"label": self.label} | figures(results) | {"files": by_file(results)}


def _result(problem: HeldOut, verdict: Verdict, times: tuple[float, float]) -> ProblemResult:
    samples, outcomes = verdict.samples, Counter(item.outcome for item in verdict.samples)
    versions = {version for item in samples for version in (item.oldest, item.newest)}
    return ProblemResult(
        file=problem.file,
        row=problem.number,
        prompt=problem.row.text,
        gold=problem.row.gold,
        samples=len(samples),
        correct=outcomes["correct"],
        no_answer=outcomes["no_answer"],
        errors=outcomes["error"],
        truncated=sum(item.truncated for item in samples),
        answers=_answers(samples),
        lengths=[item.length for item in samples],
        versions=[str(version) for version in sorted(versions)],
        failure=verdict.reason if verdict.fate == "failed" else "",
        asked=times[0],
        judged=times[1],
    )


def _answers(samples: Iterable[Judged]) -> list[Answer]:
    """The distinct answers, the most frequent first."""
    given = ((item.answer or item.extracted, item.outcome == "correct") for item in samples
             if item.outcome in ("correct", "wrong"))  # fmt: skip
    votes = sorted(Counter(given).items(), key=lambda item: (-item[1], item[0]))
    return [Answer(text, count, correct) for (text, correct), count in votes]


class Examiner:
    """Puts an evaluation's problems to the generators and takes the verdicts.

    `published` gives the number of the policy version that is published.
    """

    def __init__(self, streams: Streams, published: Callable[[], int]) -> None:
        self.streams, self.published = streams, published
        self.evaluation: Evaluation | None = None
        self.asked: dict[int, OpenGroup] = {}  # problems without a verdict

    async def begin(self, evaluation: Evaluation) -> None:
        """Start an evaluation; it is done when `evaluation.done` says so."""
        self.evaluation, self.asked = evaluation, {}

    async def send(self, limit: int) -> None:
        """Send problems out while fewer than `limit` of them wait in the stream."""
        evaluation = self.evaluation
        if evaluation is None or evaluation.done:
            return
        waiting = [gid for gid in await self.streams.broker.unclaimed() if is_problem(gid)]
        for index in evaluation.next(limit - len(waiting)):
            await self.ask(evaluation, index, 0)

    async def ask(self, evaluation: Evaluation, index: int, attempt: int) -> None:
        """Send a problem out, under an attempt."""
        self.asked[index] = OpenGroup(attempt, time.monotonic())
        gid, row = evaluation.group(index), evaluation.problems[index].row
        prompt = self.streams.prompt(gid, -1 - index, attempt, index, row, self.published())
        await self.streams.put(prompt)

    async def ask_again(
        self, evaluation: Evaluation, index: int, why: str, judged: list[Judged] | None = None
    ) -> None:
        """Another attempt at a problem; at the end of the attempts it counts as failed.

        `judged` are the samples of the last attempt, where only their checks have failed: those
        that were checked still count.
        """
        attempt = self.asked[index].attempt + 1
        if attempt < self.streams.config.admission.attempts and not is_deadly(why):
            log.warning("another attempt", group=evaluation.group(index), attempt=attempt, why=why)
            await self.ask(evaluation, index, attempt)
            return
        gid = evaluation.group(index)
        del self.asked[index]
        ids = (gid, -1 - index, attempt - 1, True)
        evaluation.add(index, Verdict(*ids, "failed", why, judged or [], ""))
        await self.streams.settle(gid)

    async def take(self, entry: Entry, verdict: Verdict) -> None:
        """A verdict on a problem, of this evaluation or of one that is over."""
        evaluation, index = self.evaluation, -1 - verdict.ordinal
        asked = self.asked.get(index)
        if evaluation is None or verdict.group != evaluation.group(index):
            await self.streams.settle(verdict.group, entry.id)
        elif asked is None or asked.attempt != verdict.attempt:
            await self.streams.acknowledge(entry.id)  # a delivery that was repeated
        elif verdict.fate == "failed":
            await self.ask_again(evaluation, index, verdict.reason, verdict.samples)
            await self.streams.acknowledge(entry.id)
        else:
            del self.asked[index]
            evaluation.add(index, verdict)
            await self.streams.settle(verdict.group, entry.id)


def is_problem(gid: str) -> bool:
    """Whether a group is a problem of an evaluation, and none of training."""
    return gid.startswith("e")
