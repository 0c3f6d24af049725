"""What the dispatcher knows of a group, and the sums of what was judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from common.messages import Verdict


@dataclass(frozen=True, slots=True)
class Chosen:
    """A group of a batch: what the ranks need to fetch and train it."""

    ordinal: int
    attempt: int
    verdict: Verdict


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
    """What was judged since the last batch: what is reported as 'before the filter'."""

    groups: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    correct: int = 0
    no_answer: int = 0
    truncated: int = 0
    reward: float = 0.0
    length: int = 0

    def add(self, verdict: Verdict) -> None:
        self.groups += 1
        self.reasons[verdict.reason] += 1
        for item in verdict.samples:
            self.samples += 1
            self.correct += item.outcome == "correct"
            self.no_answer += item.outcome == "no_answer"
            self.truncated += item.truncated
            self.reward += item.reward
            self.length += item.length

    def figures(self) -> dict[str, float | None]:
        """Shares and means over all samples judged, filtered ones included; None if there were
        none, as when a batch is formed of groups that were left over."""

        def share(part: float, whole: int) -> float | None:
            return part / whole if whole else None

        return {
            "accuracy_raw": share(self.correct, self.samples),
            "reward_raw": share(self.reward, self.samples),
            "length_mean_raw": share(self.length, self.samples),
            "no_answer_share": share(self.no_answer, self.samples),
            "truncated_share": share(self.truncated, self.samples),
            "acceptance": share(self.reasons["mixed"], self.groups),
            "all_correct_share": share(self.reasons["all_correct"], self.groups),
            "all_wrong_share": share(
                self.reasons["all_wrong"] + self.reasons["no_answer"], self.groups
            ),
            "groups_judged": self.groups,
            "verdicts_failed": self.failed,
        }
