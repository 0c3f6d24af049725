"""What a check of one response says.

The four outcomes are never mixed: `wrong` is a judgement about the response, `error` is a
statement about the checker, and `no_answer` means that nothing claims to be the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["correct", "wrong", "no_answer", "error"]
Where = Literal["line", "box", ""]

OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong", "no_answer", "error")

# A verdict travels to logs and sample files; a megabyte of digits is no use there.
MAX_EXTRACTED_CHARS = 500


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one response, what was read as its answer, and why.

    `where` is "line" for an "Answer:" line, "box" for a `\\boxed{}`, "" when nothing was found.
    `value` spells what the checker has read, where it reads values: the same for equal numbers,
    and for equal expressions where its parser sees that they are.
    """

    outcome: Outcome
    extracted: str | None = None
    where: Where = ""
    reason: str = ""
    value: str = ""

    @property
    def correct(self) -> bool:
        return self.outcome == "correct"

    @property
    def answer(self) -> str:
        """What a majority vote counts: the value that was read, else the text on one line."""
        return self.value or " ".join((self.extracted or "").split())

    @property
    def label(self) -> str:
        """The outcome, with the reason attached when the checker failed ("error: timeout")."""
        return f"error: {self.reason}" if self.outcome == "error" else self.outcome


def error(reason: str) -> Verdict:
    """A verdict for a checker that failed."""
    return Verdict("error", reason=reason)


def shorten(text: str) -> str:
    """`text` as it is kept in a verdict: at most `MAX_EXTRACTED_CHARS` characters."""
    if len(text) <= MAX_EXTRACTED_CHARS:
        return text
    return text[: MAX_EXTRACTED_CHARS - 1] + "…"
