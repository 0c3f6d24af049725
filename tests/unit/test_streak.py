"""Groups in a row without a mixed one: when less goes out, when a run ends, and what is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.streak import WORDS, Streak

REASONS = st.sampled_from(["", *WORDS])


def after(limit: int | None, **counts: int) -> Streak:
    streak = Streak(limit)
    streak.restore(reason for reason, count in counts.items() for _ in range(count))
    return streak


def test_a_streak_is_over_at_its_limit_and_a_mixed_group_ends_it() -> None:
    streak = after(4, all_correct=3)
    assert not streak.over
    streak.judge("all_wrong")
    assert streak.over
    streak.judge("")
    assert (streak.groups, streak.over, streak.back_off) == (0, False, 1)


def test_without_a_limit_it_is_never_over_and_less_goes_out_all_the_same() -> None:
    streak = after(None, all_wrong=5000)
    assert not streak.over
    assert streak.back_off == 32


def test_less_goes_out_from_a_quarter_of_the_limit_on_and_half_of_that_as_it_doubles() -> None:
    streak, seen = Streak(100), {}
    for groups in range(1, 101):
        said = streak.judge("all_correct")
        assert said == (groups in (25, 50, 100)), "one line in the log for each step"
        seen[groups] = streak.back_off
    assert [seen[n] for n in (24, 25, 49, 50, 99, 100)] == [1, 2, 2, 4, 4, 8]


def test_what_the_groups_are_is_said_with_a_remedy_for_most_of_them() -> None:
    words = after(None, all_correct=10, no_answer=70, all_wrong=20).explain()
    assert words.startswith(
        "none of the last 100 groups was mixed (70% without an answer, 20% all wrong, "
        "10% all right); "
    )
    assert "data.template" in words
    assert "harder problems" in after(None, all_correct=3).explain()
    assert "dapo verify" in after(None, all_wrong=3).explain()


@given(st.lists(REASONS, max_size=60), st.integers(1, 40))
def test_a_restart_finds_the_streak_that_was_left(reasons: list[str], limit: int) -> None:
    lived, restarted = Streak(limit), Streak(limit)
    for reason in reasons:
        lived.judge(reason)
    restarted.restore(reasons)
    assert restarted.reasons == lived.reasons
    tail = [*reversed(["", *reasons])].index("")
    assert lived.groups == tail
