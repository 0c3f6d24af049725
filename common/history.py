"""The figures of a run so far, by kind: what the report, the plots and the live view read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.metrics import read_metrics

Row = dict[str, Any]


class Phases(NamedTuple):
    """Seconds of one batch: waiting for groups, training, publishing the weights before it."""

    wait: float
    train: float
    publish: float


@dataclass
class History:
    """Rows of metrics.jsonl in order; one row for each batch, evaluation and round."""

    batches: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    rounds: list[Row] = field(default_factory=list)
    phases: list[Phases] = field(default_factory=list)
    first: float | None = None
    last: float | None = None

    def add(self, row: Row) -> None:
        """Take in the next row; kinds and versions that are known already are replaced."""
        if self.first is None:
            self.first = row["time"]
        if row["kind"] == "batch":
            self._add_batch(row)
        elif row["kind"] == "eval":
            self.evals = [old for old in self.evals if old["label"] != row["label"]] + [row]
        elif row["kind"] == "round":
            self.rounds.append(row)
        self.last = row["time"]

    def _add_batch(self, row: Row) -> None:
        # a learner that was restarted from an older checkpoint goes over its batches again
        while self.batches and self.batches[-1]["step"] >= row["step"]:
            self.batches.pop()
            self.phases.pop()
        since = self.batches[-1]["time"] if self.batches else self.first
        self.batches.append(row)
        self.phases.append(split_seconds(row, row["time"] - since))

    @property
    def seconds(self) -> float:
        """From the first row to the last."""
        return 0.0 if self.first is None or self.last is None else self.last - self.first

    def evaluation(self, label: str) -> Row | None:
        """The evaluation of that label, if it was made."""
        return next((row for row in self.evals if row["label"] == label), None)


def read_history(run_dir: Path) -> History:
    """All rows of a run."""
    history = History()
    for row in read_metrics(run_dir):
        if usable(row):
            history.add(row)
    return history


def usable(row: Any) -> bool:
    """Whether a line of metrics.jsonl is a row; anything else there is left out."""
    if not isinstance(row, dict) or not {"time", "kind", "step"} <= row.keys():
        return False
    return row["kind"] != "eval" or "label" in row


def split_seconds(row: Row, seconds: float) -> Phases:
    """The phases of a batch that was done `seconds` after the last one.

    `wait_s` runs from the end of the last batch and so covers the publication too; what the
    batch took in all tells how much of it was waiting.
    """
    train, publish = number(row, "train_s") or 0.0, number(row, "publish_s") or 0.0
    wait = min(number(row, "wait_s") or 0.0, seconds - train - publish)
    return Phases(max(0.0, wait), train, publish)


def number(row: Row | None, key: str) -> float | None:
    """A figure of a row; None if it is missing or was not finite."""
    value = row.get(key) if row else None
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def column(rows: Iterable[Row], key: str) -> list[float]:
    """A figure of every row; NaN where there is none."""
    values = (number(row, key) for row in rows)
    return [math.nan if value is None else value for value in values]


def finite(rows: Iterable[Row], key: str) -> list[float]:
    """A figure of the rows that have it."""
    return [value for row in rows if (value := number(row, key)) is not None]
