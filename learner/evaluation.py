"""An evaluation: held-out problems through the same generators and verifiers.

Outside admission, filter and training counts. It reports which policy versions made its samples,
since generators that serve it may take new weights meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

from common.data import Row
from common.messages import Verdict


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
