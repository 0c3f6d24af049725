"""Groups judged in a row without a mixed one: nothing can be learned from them.

A policy without I/O. A run does not end because a batch will not fill: it sends out less and less,
says what the groups are, and ends when `admission.give_up_after` of them have shown nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

WORDS = {
    "all_correct": ("all right", "the data is too easy by now: add harder problems"),
    "all_wrong": ("all wrong", "the problems are too hard, or the checker refuses right answers: "
                               "try `dapo verify`"),
    "no_answer": ("without an answer", "no response has one: look at data.template and at "
                                       "sampling.max_tokens"),
}  # fmt: skip
"""What a filtered group is called, and what to do if most are of that kind."""
SPAN = 1000
"""Groups over which less is sent out where there is no limit."""


class Streak:
    """The newest groups judged, as far back as none was mixed. Without a limit it ends no run."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.reasons: Counter[str] = Counter()

    def restore(self, reasons: Iterable[str]) -> None:
        """From the reasons of the groups judged so far, oldest first; '' stands for a mixed one."""
        self.reasons.clear()
        for reason in reasons:
            self.judge(reason)

    def judge(self, reason: str) -> bool:
        """One more group was judged, filtered for a reason or '' if mixed.

        True where this changes how much is sent out: then it is worth a line in the log.
        """
        before = self.back_off
        if reason:
            self.reasons[reason] += 1
        else:
            self.reasons.clear()
        return self.back_off > before

    @property
    def groups(self) -> int:
        """Length of the streak."""
        return self.reasons.total()

    @property
    def over(self) -> bool:
        """Whether there is nothing left to learn."""
        return self.limit is not None and self.groups >= self.limit

    @property
    def back_off(self) -> int:
        """One in so many of the usual groups is to be out: 1 up to a quarter of the limit, then 2,
        and twice as many whenever the streak doubles."""
        quarters = int(4 * self.groups / (self.limit or SPAN))
        return 1 << quarters.bit_length()

    def explain(self) -> str:
        """What the groups are and what to do, in a sentence."""
        shares = ", ".join(
            f"{count / self.groups:.0%} {WORDS[reason][0]}"
            for reason, count in self.reasons.most_common()
        )
        most = max(self.reasons, key=self.reasons.__getitem__)
        return f"none of the last {self.groups:,} groups was mixed ({shares}); {WORDS[most][1]}"
