"""Sums of several one-digit numbers with written steps: the task of the small demo.

A problem is a row of digits, `3+8+5=?`; a solution adds them from left to right, one step a line
(`3+8=11`, `+5=16`), and ends with `Answer: 16`. Everything here is a pure function of its arguments
and of a seeded random generator.

Invariants:

- a problem is held out, or not, by a hash of its own text, so no choice of seeds or counts can
  leak a held-out problem into training;
- the noisy solutions, on which the base is warmed up, go on correctly from a wrong step, as a
  careless writer does: the noise is something that a reward can unlearn.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SOURCE = "arithmetic"
HELD_OUT_SHARE = 8
"""One problem in this many is held out."""

_ANSWER_LINE = re.compile(r"^Answer: (-?\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """One sum of one-digit numbers, at least two of them."""

    terms: tuple[int, ...]

    @property
    def text(self) -> str:
        """The sum as written, `3+8+5`; it identifies the problem."""
        return "+".join(map(str, self.terms))

    @property
    def prompt(self) -> str:
        """The raw text that the model is given."""
        return f"{self.text}=?\n"

    @property
    def answer(self) -> int:
        return sum(self.terms)

    @property
    def held_out(self) -> bool:
        """Whether the problem belongs to the held-out part; a property of its text alone."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Noise:
    """How careless the worked examples of the warm-up are."""

    wrong_step_rate: float
    """Chance that a step goes wrong, for each step."""
    ramble_rate: float
    """Chance that a solution is a rambling one."""
    ramble_chars: int
    """Length to which a solution that never ends is written; beyond the generation cap."""


def problems(
    count: int, seed: int, terms_min: int, terms_max: int, *, held_out: bool
) -> list[Problem]:
    """`count` distinct problems of one part, the number of terms drawn evenly from the range.

    A range with too few problems raises ValueError instead of searching for ever.
    """
    if not 2 <= terms_min <= terms_max:
        raise ValueError(f"terms must satisfy 2 <= min <= max, not {terms_min} and {terms_max}")
    rng = random.Random(f"{SOURCE}:{seed}:{held_out}")
    found: dict[Problem, None] = {}
    for _ in range(1000 + 40 * HELD_OUT_SHARE * count):
        if len(found) == count:
            break
        size = rng.randint(terms_min, terms_max)
        problem = Problem(tuple(rng.randint(1, 9) for _ in range(size)))
        if problem.held_out == held_out:
            found[problem] = None
    if len(found) < count:
        raise ValueError(
            f"only {len(found)} of {count} distinct problems found with {terms_min} to "
            f"{terms_max} terms: ask for fewer rows or allow more terms"
        )
    return list(found)


def solution(problem: Problem) -> str:
    """The worked solution without a fault."""
    steps, total = _steps(problem, random.Random(0), wrong_step_rate=0.0)
    return "".join(steps) + _answer_line(total)


def noisy_solution(problem: Problem, rng: random.Random, noise: Noise) -> tuple[str, bool]:
    """A careless worked solution, and whether it ends (a looping one runs into the cap)."""
    steps, total = _steps(problem, rng, noise.wrong_step_rate)
    if rng.random() >= noise.ramble_rate:
        return "".join(steps) + _answer_line(total), True
    if rng.random() < 0.5:
        # Solved, doubted, and solved once more; the last answer is the one that counts.
        again, total_again = _steps(problem, rng, noise.wrong_step_rate)
        first = "".join(steps) + _answer_line(total)
        return f"{first}\nWait.\n{''.join(again)}{_answer_line(total_again)}", True
    # Stuck on one step: it is repeated until the cap and no answer comes.
    stuck = rng.randrange(len(steps))
    lines = "".join(steps[:stuck])
    while len(lines) < noise.ramble_chars:
        lines += steps[stuck]
    return lines[: noise.ramble_chars], False


def claimed_answer(text: str) -> int | None:
    """The number on the last line that is exactly `Answer: N`; None when there is none."""
    claims = _ANSWER_LINE.findall(text)
    return int(claims[-1]) if claims else None


def write_rows(path: Path, rows: Iterable[Problem]) -> int:
    """Write one JSON row a line, {"prompt", "answer", "source"}; the number of rows."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for problem in rows:
            row = {"prompt": problem.prompt, "answer": str(problem.answer), "source": SOURCE}
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def _answer_line(total: int) -> str:
    return f"Answer: {total}"


def _steps(problem: Problem, rng: random.Random, wrong_step_rate: float) -> tuple[list[str], int]:
    """The lines of one left-to-right addition and the total that they reach."""
    total = problem.terms[0]
    lines: list[str] = []
    for term in problem.terms[1:]:
        result = total + term
        if rng.random() < wrong_step_rate:
            kind = rng.choice(("slip", "carry", "misread", "skip"))
            if kind == "skip" and lines:
                continue
            if kind == "carry":
                result += 10 if result < 10 else rng.choice((-10, 10))
            elif kind == "misread":
                term = rng.choice([digit for digit in range(1, 10) if digit != term])
                result = total + term
            else:
                result += rng.choice((-1, 1))
        # The total that a step starts from stands at the end of the line above.
        start = "" if lines else str(total)
        lines.append(f"{start}+{term}={result}\n")
        total = result
    return lines, total
