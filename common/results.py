"""What an evaluation found: one record per problem, kept as JSONL, and the figures over them.

No problem is ever left out of the records. A sample whose check failed counts neither as right
nor as wrong; a problem without a single checked sample is `failed` and in no mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.disk import make_dir, replace_durable
from common.errors import DataError
from common.messages import Version
from common.scores import budgets, intervals, majority, pass_at_k, standard_error

DIGITS = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a problem, and how many of its samples gave it."""

    text: str
    votes: int
    correct: bool


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """What the samples of one problem came to.

    `row` counts the rows of `file` from 1. `answers` come with the most frequent first; those
    of a checker that names none have an empty text. `failure` says why there are no samples.
    `asked` and `judged` are Unix times.
    """

    file: str
    row: int
    prompt: str
    gold: str
    samples: int
    correct: int
    no_answer: int
    errors: int
    truncated: int
    answers: list[Answer]
    lengths: list[int]
    versions: list[str]
    failure: str = ""
    asked: float = field(default=0.0, compare=False)
    judged: float = field(default=0.0, compare=False)

    @property
    def checked(self) -> int:
        """Samples that were found right or not right."""
        return self.samples - self.errors

    @property
    def accuracy(self) -> float:
        return self.correct / self.checked

    def pass_at(self, k: int) -> float:
        """pass@k; over all checked samples where errors have left fewer than `k`."""
        return pass_at_k(self.checked, self.correct, min(k, self.checked))

    @property
    def majority(self) -> float:
        """maj@n. All correct samples vote for one answer, however they spell it."""
        return majority(self.correct, (a.votes for a in self.answers if not a.correct))

    @property
    def anonymous(self) -> bool:
        """Whether wrong samples did not say what they answer, so that nobody can vote."""
        return any(not answer.text and not answer.correct for answer in self.answers)


def figures(problems: Sequence[ProblemResult], seed: int = 0) -> dict[str, Any]:
    """The figures over some problems, fit for JSON; None for what was not measured.

    - `accuracy`: avg@k, the mean over problems of the share of correct samples, with
      `standard_error` and `accuracy_interval` (95 %, `scores.intervals`);
    - `pass_at`, `pass_at_intervals`: by k as text, for every k of `scores.budgets`;
    - `pass_at_k`, `majority`, `majority_interval`: of all the samples of each problem;
    - `problems` with a checked sample, `failed` ones without, `samples`, `errors` among them;
    - `no_answer_share`, `truncated_share`, `length_mean` over all samples;
    - `samples_per_second`, and `versions`: the numbers of the policies that made the samples.
    """
    checked = [problem for problem in problems if problem.checked]
    lengths = [length for problem in problems for length in problem.lengths]
    count, times = len(lengths), [p for p in problems if p.samples]
    span = max((p.judged for p in times), default=0.0) - min((p.asked for p in times), default=0.0)
    numbers = {Version.parse(text).number for p in problems for text in p.versions}
    return _scores(checked, seed) | {
        "problems": len(checked),
        "failed": len(problems) - len(checked),
        "samples": count,
        "errors": sum(problem.errors for problem in problems),
        "no_answer_share": _share(sum(problem.no_answer for problem in problems), count),
        "truncated_share": _share(sum(problem.truncated for problem in problems), count),
        "length_mean": _share(sum(lengths), count),
        "samples_per_second": _share(count, span),
        "versions": sorted(numbers),
    }


def _scores(checked: Sequence[ProblemResult], seed: int) -> dict[str, Any]:
    """avg@k, pass@k and maj@k with their intervals."""
    ks = budgets(max((problem.samples for problem in checked), default=1))
    votes = not any(problem.anonymous for problem in checked)
    rows = [
        [p.accuracy, *(p.pass_at(k) for k in ks), p.majority if votes else math.nan]
        for p in checked
    ]
    values = np.array(rows, dtype=np.float64).reshape(len(rows), len(ks) + 2)
    means: list[float | None] = [None] * values.shape[1]
    ends: list[list[float | None] | None] = [None] * values.shape[1]
    if checked:
        means = [_rounded(mean) for mean in values.mean(0)]
        ends = [[_rounded(low), _rounded(high)] for low, high in intervals(values, seed)]
    named = [str(k) for k in ks]
    return {
        "accuracy": means[0],
        "standard_error": _rounded(standard_error(values[:, 0])),
        "accuracy_interval": ends[0],
        "pass_at": dict(zip(named, means[1:-1], strict=True)),
        "pass_at_intervals": dict(zip(named, ends[1:-1], strict=True)),
        "pass_at_k": means[-2],
        "majority": means[-1],
        "majority_interval": ends[-1] if votes else None,
    }


def by_file(problems: Iterable[ProblemResult], seed: int = 0) -> dict[str, dict[str, Any]]:
    """`figures` of each data file, in the order in which the files first appear."""
    groups: dict[str, list[ProblemResult]] = {}
    for problem in problems:
        groups.setdefault(problem.file, []).append(problem)
    return {name: figures(group, seed) for name, group in groups.items()}


def hardest(problems: Iterable[ProblemResult], count: int) -> list[ProblemResult]:
    """The problems with the least accuracy; among equals, those with the longer samples."""

    def ease(problem: ProblemResult) -> tuple[float, float]:
        return problem.accuracy, -sum(problem.lengths) / problem.samples

    return sorted((problem for problem in problems if problem.checked), key=ease)[:count]


def write_results(path: Path, problems: Iterable[ProblemResult]) -> None:
    """Write the records of an evaluation, all or nothing."""
    make_dir(path.parent)
    replace_durable(path, "".join(map(to_line, problems)).encode())


def to_line(problem: ProblemResult) -> str:
    """A record as a line of JSON."""
    return json.dumps(dataclasses.asdict(problem), ensure_ascii=False) + "\n"


def read_results(path: Path) -> list[ProblemResult]:
    """The records of a file; none if there is no file. A torn last line is left out.

    Raises:
        DataError: a whole line is no record.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [_read(line, f"{path}, row {number}") for number, line in enumerate(lines, 1) if line]


def _read(line: str, where: str) -> ProblemResult:
    try:
        values = json.loads(line)
        answers = [Answer(**answer) for answer in values.pop("answers")]
        return ProblemResult(answers=answers, **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{where} is no result of a problem: {error}") from None


def _share(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole > 0 else None


def _rounded(value: float) -> float | None:
    return round(float(value), DIGITS) if math.isfinite(value) else None
