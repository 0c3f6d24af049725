"""Compare a checker with a file of labelled responses: where it agrees, and where it does not.

Rows are JSON objects with `response`, `gold`, and a label: `expected` ("correct", "wrong" or
"no_answer") or `correct` (a bool). Agreement is on correct or not; an error of the checker
agrees with nothing. A checker may be FILE.py:FUNCTION.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError, DataError
from verifier import registry
from verifier.outcome import OUTCOMES, Verdict
from verifier.own_checkers import is_place
from verifier.pool import CheckerPool

_IN_FLIGHT = 256


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One row on which the checker and the label differ."""

    row: int
    id: str
    gold: str
    expected: str
    outcome: str
    extracted: str | None
    reason: str


COUNTS = ("n", "agree", "false_positive", "false_negative", "no_answer", "error", "seconds")


@dataclass(slots=True)
class Report:
    """Counts over a file; `seconds` is the wall time of all checks."""

    checker: str
    n: int = 0
    agree: int = 0
    false_positive: int = 0
    false_negative: int = 0
    no_answer: int = 0
    error: int = 0
    seconds: float = 0.0
    disagreements: list[Disagreement] = field(default_factory=list)
    against: str = ""
    differences: list[Disagreement] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The counts, without the rows."""
        figures = asdict(self)
        return {key: figures[key] for key in COUNTS}

    def to_text(self) -> str:
        """A table for a terminal: the counts, then one line per disagreement."""
        lines = [
            f"{self.checker}: agrees on {self.agree} of {self.n} in {self.seconds:.2f} s",
            f"  false positives {self.false_positive}, false negatives {self.false_negative}, "
            f"no answer {self.no_answer}, errors {self.error}",
        ]
        lines += [
            f"  row {item.row} {item.id}: {item.outcome}, expected {item.expected}; "
            f"gold {item.gold!r}, extracted {item.extracted!r}; {item.reason}"
            for item in self.disagreements
        ]
        if self.against:
            lines.append(f"{self.checker} and {self.against} differ on {len(self.differences)}")
        lines += [
            f"  row {item.row} {item.id}: {self.checker} {item.expected}, {self.against} "
            f"{item.outcome}; gold {item.gold!r}, extracted {item.extracted!r}; {item.reason}"
            for item in self.differences
        ]
        return "\n".join(lines)


def verify_file(
    path: str | Path,
    checker: str = "math",
    *,
    boxed: bool = True,
    exact_arithmetic: bool = False,
    workers: int = 2,
    deadline_s: float = 10.0,
    against: str | None = None,
) -> Report:
    """Run `checker` over the rows of `path` and compare with their labels.

    With `against`, a second checker, the rows are listed on which the two differ in correct-or-not.

    Raises:
        DataError: a row is no such record.
        ConfigError: a checker is not known, or its file cannot be loaded.
    """
    rows = _read_rows(Path(path))
    options = {"boxed": boxed, "exact_arithmetic": exact_arithmetic}
    asked = [checker] if against is None else [checker, against]
    registry.install({name: name for name in asked if is_place(name)})
    for name in asked:
        registry.get(name)
    return asyncio.run(_verify(rows, checker, against or "", options, workers, deadline_s))


async def _verify(
    rows: list[dict[str, Any]],
    checker: str,
    against: str,
    options: dict[str, Any],
    workers: int,
    deadline_s: float,
) -> Report:
    report = Report(checker, against=against)
    async with CheckerPool(workers, deadline_s, warm=(checker, *filter(None, [against]))) as pool:
        for place in filter(is_place, (checker, against)):
            if fault := await pool.try_out(place):
                raise ConfigError(f"the checker {place}: {fault}")
        start = time.monotonic()
        for first in range(0, len(rows), _IN_FLIGHT):
            chunk = rows[first : first + _IN_FLIGHT]
            verdicts = await asyncio.gather(
                *(pool.check(checker, row["response"], row["gold"], options) for row in chunk)
            )
            for row, verdict in zip(chunk, verdicts, strict=True):
                _count(report, row, verdict)
        report.seconds = time.monotonic() - start
        for row in rows if against else ():
            mine, second = [
                await pool.check(name, row["response"], row["gold"], options)
                for name in (checker, against)
            ]
            if mine.correct != second.correct:
                report.differences.append(_entry(row, mine.outcome, second))
    return report


def _count(report: Report, row: dict[str, Any], verdict: Verdict) -> None:
    report.n += 1
    expected = row["expected"]
    report.no_answer += verdict.outcome == "no_answer"
    if verdict.outcome == "error":
        report.error += 1
    elif verdict.correct == (expected == "correct"):
        report.agree += 1
        return
    elif verdict.correct:
        report.false_positive += 1
    else:
        report.false_negative += 1
    report.disagreements.append(_entry(row, expected, verdict))


def _entry(row: dict[str, Any], expected: str, verdict: Verdict) -> Disagreement:
    name, gold = str(row.get("id", "")), str(row["gold"])
    found = (verdict.outcome, verdict.extracted, verdict.reason)
    return Disagreement(row["row"], name, gold, expected, *found)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path} cannot be read: {problem}") from problem
    # not splitlines(): it also breaks at separators that JSON allows inside a string
    lines = text.split("\n")
    return [_read_row(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]


def _read_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise DataError(f"{path}, row {number}: no JSON: {problem}") from problem
    if not isinstance(row, dict) or not isinstance(row.get("response"), str) or "gold" not in row:
        raise DataError(f"{path}, row {number}: needs the text `response` and a `gold`")
    expected = row.get("expected")
    if expected is None and isinstance(row.get("correct"), bool):
        expected = "correct" if row["correct"] else "wrong"
    if expected not in OUTCOMES or expected == "error":
        raise DataError(
            f"{path}, row {number}: needs `expected` (correct, wrong or no_answer) "
            "or `correct` (true or false)"
        )
    return row | {"row": number, "expected": expected}
