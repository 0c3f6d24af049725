"""The dynamic-sampling filter: fates and reasons from raw outcomes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.dynamic_sampling import Decision, decide
from verifier.outcome import OUTCOMES, Verdict


@pytest.mark.parametrize(
    ("outcomes", "fate", "reason"),
    [
        (["correct", "wrong"], "accepted", "mixed"),
        (["correct", "no_answer"], "accepted", "mixed"),
        (["correct"] * 4, "filtered", "all_correct"),
        (["correct"], "filtered", "all_correct"),
        (["wrong"] * 4, "filtered", "all_wrong"),
        (["wrong", "no_answer", "no_answer"], "filtered", "all_wrong"),
        (["no_answer"] * 3, "filtered", "no_answer"),
        (["correct", "wrong", "error"], "failed", "error:unknown"),
        (["error: timeout", "correct", "error: died"], "failed", "error:timeout"),
        (["error"] * 3, "failed", "error:unknown"),
    ],
)
def test_a_group_gets_its_fate_and_the_reason(outcomes, fate, reason):
    assert decide(outcomes) == Decision(fate, reason)


def test_the_label_of_a_verdict_carries_the_reason_of_an_error():
    verdicts = [Verdict("correct"), Verdict("error", reason="timeout")]
    assert decide([verdict.label for verdict in verdicts]).reason == "error:timeout"


@pytest.mark.parametrize("outcomes", [[], ["right"], ["correct", ""]])
def test_an_empty_group_or_an_unknown_outcome_is_refused(outcomes):
    with pytest.raises(ValueError):
        decide(outcomes)


@given(st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=20), st.randoms())
def test_a_group_is_accepted_exactly_when_some_but_not_all_are_correct(outcomes, random):
    decision = decide(outcomes)
    some = 0 < outcomes.count("correct") < len(outcomes)
    assert (decision.fate == "accepted") == (some and "error" not in outcomes)
    assert (decision.fate == "failed") == ("error" in outcomes)
    shuffled = list(outcomes)
    random.shuffle(shuffled)
    assert decide(shuffled) == decision
