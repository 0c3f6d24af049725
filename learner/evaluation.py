"""An evaluation: held-out problems through the same generators and verifiers.

Outside admission, filter and training counts. It reports which policy versions made its samples,
since generators that serve it may take new weights meanwhile.
"""

from __future__ import annotations

import math
import time
from typing import Any

from common.broker import Entry
from common.data import Row
from common.log import get_logger
from common.messages import Verdict
from learner.admission import Admission
from learner.groups import OpenGroup
from learner.streams import Streams

log = get_logger(__name__)


class Evaluation:
    """Progress and result of one evaluation; `label` tells it from others of the run."""

    def __init__(self, label: str, rows: list[Row]) -> None:
        self.label, self.rows = label, rows
        self.verdicts: dict[int, Verdict] = {}
        self._sent = 0

    def group(self, index: int) -> str:
        """Group id of a problem."""
        return f"e{self.label}-{index}"

    def next(self, room: int) -> range:
        """Problems to send now, at most `room`."""
        start = self._sent
        self._sent = min(len(self.rows), start + max(0, room))
        return range(start, self._sent)

    def add(self, index: int, verdict: Verdict) -> None:
        self.verdicts[index] = verdict

    @property
    def done(self) -> bool:
        return len(self.verdicts) == len(self.rows)

    def result(self) -> dict[str, Any]:
        """avg@k with its standard error over problems, pass@k, and the samples' properties."""
        by_problem = [
            [item.outcome == "correct" for item in verdict.samples]
            for verdict in self.verdicts.values()
            if verdict.samples
        ]
        samples = [item for verdict in self.verdicts.values() for item in verdict.samples]
        count, total = max(1, len(by_problem)), max(1, len(samples))
        means = [sum(marks) / len(marks) for marks in by_problem]
        mean = sum(means) / count
        variance = sum((m - mean) ** 2 for m in means) / max(1, count - 1)
        return {
            "label": self.label,
            "accuracy": mean,
            "standard_error": math.sqrt(variance / count),
            "pass_at_k": sum(any(marks) for marks in by_problem) / count,
            "problems": len(by_problem),
            "samples": len(samples),
            "failed": sum(not verdict.samples for verdict in self.verdicts.values()),
            "no_answer_share": sum(i.outcome == "no_answer" for i in samples) / total,
            "truncated_share": sum(i.truncated for i in samples) / total,
            "length_mean": sum(i.length for i in samples) / total,
            "versions": sorted(
                {i.oldest.number for i in samples} | {i.newest.number for i in samples}
            ),
        }


class Examiner:
    """Puts an evaluation's problems to the generators and takes the verdicts."""

    def __init__(self, streams: Streams, admission: Admission) -> None:
        self.streams, self.admission = streams, admission
        self.evaluation: Evaluation | None = None
        self.asked: dict[int, OpenGroup] = {}  # problems without a verdict

    async def begin(self, evaluation: Evaluation) -> None:
        """Start an evaluation; it is done when `evaluation.done` says so."""
        self.evaluation, self.asked = evaluation, {}

    async def send(self, limit: int) -> None:
        """Send problems out while fewer than `limit` prompts wait in the stream."""
        evaluation = self.evaluation
        if evaluation is None or evaluation.done:
            return
        for index in evaluation.next(limit - len(await self.streams.broker.unclaimed())):
            await self.ask(evaluation, index, 0)

    async def ask(self, evaluation: Evaluation, index: int, attempt: int) -> None:
        """Send a problem out, under an attempt."""
        self.asked[index] = OpenGroup(attempt, time.monotonic())
        gid, row = evaluation.group(index), evaluation.rows[index]
        published = self.admission.published
        prompt = self.streams.prompt(gid, -1 - index, attempt, index, row, published)
        await self.streams.put(prompt)

    async def ask_again(self, evaluation: Evaluation, index: int, why: str) -> None:
        """Another attempt at a problem; at the end of the attempts it counts as failed."""
        attempt = self.asked[index].attempt + 1
        if attempt < self.streams.config.admission.attempts:
            log.warning("another attempt", group=evaluation.group(index), attempt=attempt, why=why)
            await self.ask(evaluation, index, attempt)
            return
        gid = evaluation.group(index)
        del self.asked[index]
        evaluation.add(index, Verdict(gid, -1 - index, attempt - 1, True, "failed", why, [], ""))
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
            await self.ask_again(evaluation, index, verdict.reason)
            await self.streams.acknowledge(entry.id)
        else:
            del self.asked[index]
            evaluation.add(index, verdict)
            await self.streams.settle(verdict.group, entry.id)
