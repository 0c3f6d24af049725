"""The dynamic-sampling filter: which groups carry a learning signal.

A pure function of the raw outcomes. It never sees a shaped reward: shaping gives an
all-wrong group unequal rewards, and training on it rewards short wrong answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verifier.outcome import OUTCOMES

Fate = Literal["accepted", "filtered", "failed"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of a group after scoring, and why.

    Reasons: "mixed" (accepted); "all_correct", "all_wrong", "no_answer" (filtered);
    "error:<what>" (failed).
    """

    fate: Fate
    reason: str


def decide(outcomes: Sequence[str]) -> Decision:
    """Decide on a group from the outcomes of all its samples.

    An outcome is one of `verifier.outcome.OUTCOMES`; an error may carry its reason, as in
    "error: timeout" (`Verdict.label`). One error fails the group, because a failing checker
    is never "wrong". A missing answer counts as wrong, unless no sample has one: then the
    group is told apart, since such a prompt or template needs a look. Raises ValueError for
    an empty group or an unknown outcome.
    """
    if not outcomes:
        raise ValueError("a group without samples has no outcome")
    kinds = [outcome.partition(":")[0] for outcome in outcomes]
    for kind in kinds:
        if kind not in OUTCOMES:
            raise ValueError(f"unknown outcome {kind!r}; known: {', '.join(OUTCOMES)}")
    if "error" in kinds:
        detail = outcomes[kinds.index("error")].partition(":")[2].strip()
        return Decision("failed", f"error:{detail or 'unknown'}")
    correct = kinds.count("correct")
    if correct == len(kinds):
        return Decision("filtered", "all_correct")
    if correct:
        return Decision("accepted", "mixed")
    if kinds.count("no_answer") == len(kinds):
        return Decision("filtered", "no_answer")
    return Decision("filtered", "all_wrong")
