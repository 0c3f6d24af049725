"""What the dispatcher knows of a group, and the sums of what was judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.errors import MessageError
from common.messages import Verdict, Version


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group of a batch: what the ranks need to fetch and train it."""

    ordinal: int
    attempt: int
    verdict: Verdict


def require_possible(verdict: Verdict, samples: int, newest: Version) -> None:
    """Refuse a verdict that no verifier of this run can have given.

    Raises:
        MessageError: it has not `samples` samples, or one has a token of a version after `newest`.
    """
    if verdict.fate == "failed":
        return
    if len(verdict.samples) != samples:
        raise MessageError(f"verdict: {len(verdict.samples)} samples in a group of {samples}")
    latest = max(sample.newest for sample in verdict.samples)
    if latest > newest:
        raise MessageError(f"verdict: a token of version {latest}, but the newest one is {newest}")


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
class Judgements:
    """What was judged since the last batch: what is reported as 'before the filter'.

    `lengths` are tokens of each sample judged, `passed` tokens of each group that passed the
    filter, `lost` tokens so far of each group that was lost while it was generated.
    """

    groups: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    correct: int = 0
    no_answer: int = 0
    truncated: int = 0
    reward: float = 0.0
    penalty: float = 0.0
    lengths: list[int] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.groups += 1
        self.reasons[verdict.reason] += 1
        for item in verdict.samples:
            self.correct += item.outcome == "correct"
            self.no_answer += item.outcome == "no_answer"
            self.truncated += item.truncated
            self.reward += item.reward
            self.penalty += item.penalty
            self.lengths.append(item.length)
        if verdict.fate == "accepted":
            self.passed.append(group_tokens(verdict))

    def lose(self, group: OpenGroup) -> None:
        """A group has found no slot; of interest here if it was still generated."""
        if group.verdict is None:
            self.lost.append(max(group.tokens.values(), default=0))

    @property
    def acceptance(self) -> float | None:
        """Share of the groups judged that passed the filter; None if none was judged."""
        return len(self.passed) / self.groups if self.groups else None


def group_tokens(verdict: Verdict) -> int:
    """Response tokens of all samples of a group."""
    return sum(item.length for item in verdict.samples)
