"""The statistics of an evaluation: golden values, brute force, and what estimators promise."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import scores
from common.scores import budgets, intervals, majority, pass_at_k, standard_error

# --- pass@k -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 1, 4, 1.0),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (10, 3, 5, 1 - 21 / 252),
        (32, 2, 16, 1 - (16 * 15) / (32 * 31)),
        (2000, 1, 1000, 0.5),  # its binomials are far beyond any float
    ],
)
def test_pass_at_k_has_the_golden_values(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)


marks = st.lists(st.booleans(), min_size=1, max_size=7)


@settings(max_examples=50)
@given(marks)
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_correct_sample(
    drawn: list[bool],
) -> None:
    for k in range(1, len(drawn) + 1):
        subsets = [any(subset) for subset in combinations(drawn, k)]
        share = sum(subsets) / len(subsets)
        assert pass_at_k(len(drawn), sum(drawn), k) == pytest.approx(share, abs=1e-12)


@settings(max_examples=50)
@given(st.integers(1, 12), st.floats(0, 1))
def test_pass_at_k_is_unbiased_for_every_chance_of_a_correct_sample(n: int, p: float) -> None:
    for k in range(1, n + 1):
        mean = sum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
        )
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_impossible_counts_is_an_error(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of {c} correct samples among {n}"):
        pass_at_k(n, c, k)


def test_the_budgets_are_the_powers_of_two_and_all_samples() -> None:
    assert [budgets(n) for n in (1, 2, 3, 4, 6, 32)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 6],
        [1, 2, 4, 8, 16, 32],
    ]


# --- maj@k --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("correct", "wrong", "value"),
    [
        (3, [2, 1], 1.0),
        (2, [3], 0.0),
        (2, [2], 0.5),
        (2, [2, 2, 1], 1 / 3),
        (1, [], 1.0),
        (0, [], 0.0),
        (0, [1], 0.0),
    ],
)
def test_a_majority_has_the_golden_values(correct: int, wrong: list[int], value: float) -> None:
    assert majority(correct, wrong) == pytest.approx(value)


@settings(max_examples=40)
@given(st.lists(st.sampled_from("gab"), max_size=6))
def test_a_majority_is_the_mean_over_all_orders_of_a_vote_that_the_first_leader_wins(
    answers: list[str],
) -> None:
    """`Counter.most_common` gives a tie to whoever was counted first; "g" is the gold."""
    winners = [Counter(order).most_common(1) for order in permutations(answers)]
    mean = sum(bool(winner) and winner[0][0] == "g" for winner in winners) / len(winners)
    votes = Counter(answers)
    wrong = [count for answer, count in votes.items() if answer != "g"]
    assert majority(votes["g"], wrong) == pytest.approx(mean)


# --- errors and intervals -----------------------------------------------------------------------


def test_the_standard_error_is_that_of_a_mean_over_problems() -> None:
    assert standard_error(np.array([1.0, 0.5, 0.0])) == pytest.approx(0.5 / math.sqrt(3))
    assert math.isnan(standard_error(np.array([1.0])))
    assert math.isnan(standard_error(np.array([])))


def test_equal_seeds_give_equal_intervals_and_others_do_not() -> None:
    values = np.random.default_rng(0).random((30, 2))
    assert np.array_equal(intervals(values, 1), intervals(values, 1))
    assert not np.array_equal(intervals(values, 1), intervals(values, 2))


def test_all_measures_are_resampled_together() -> None:
    first = np.random.default_rng(0).random(40)
    (low, high), (other_low, other_high) = intervals(np.stack([first, 1 - first], 1), 3)
    assert low < first.mean() < high
    assert (other_low, other_high) == pytest.approx((1 - high, 1 - low))


def test_the_interval_does_not_depend_on_how_many_resamples_fit_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = np.random.default_rng(0).random((10, 3))
    whole = intervals(values, 5, resamples=101)
    monkeypatch.setattr(scores, "_CHUNK", 200)
    assert np.array_equal(intervals(values, 5, resamples=101), whole)


@pytest.mark.parametrize(
    ("value", "problems", "ends"),
    [
        (0.0, 8, (0.0, 0.3694)),  # the tables' exact upper end for 0 of 8 at 95 %
        (1.0, 8, (0.6306, 1.0)),
        (0.5, 8, (0.3153, 0.6847)),
        (0.0, 100, (0.0, 0.0362)),
    ],
)
def test_problems_that_all_score_alike_prove_no_more_than_their_number(
    value: float, problems: int, ends: tuple[float, float]
) -> None:
    varied = np.linspace(0, 1, problems)
    alike, other = intervals(np.column_stack([np.full(problems, value), varied]), 0)
    assert alike == pytest.approx(ends, abs=5e-5)
    assert np.array_equal(other, intervals(np.column_stack([varied, varied]), 0)[0])


def test_a_measure_that_is_not_a_number_leaves_the_others_alone() -> None:
    values = np.column_stack([np.linspace(0, 1, 6), np.full(6, np.nan)])
    ends = intervals(values, 0)
    assert np.isfinite(ends[0]).all() and np.isnan(ends[1]).all()


def test_an_interval_of_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one problem"):
        intervals(np.zeros((0, 1)), 0)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """400 data sets of 60 problems, each problem right in 4 samples with a chance of its own."""
    draw, held = np.random.default_rng(11), 0
    for seed in range(400):
        right = draw.binomial(4, draw.random(60), 60) / 4
        low, high = intervals(right[:, None], seed, resamples=400)[0]
        held += low <= 0.5 <= high
    assert 0.91 <= held / 400 <= 0.98
