"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import NumericalError
from learner.advantage import group_advantages


def rewards(correct: int, size: int = 16) -> np.ndarray:
    return np.where(np.arange(size) < correct, 1.0, -1.0)


@pytest.mark.parametrize(
    ("correct", "ddof", "right", "wrong"),
    [(1, 1, 3.75, -0.25), (1, 0, 3.873, -0.258), (8, 1, 0.968, -0.968), (8, 0, 1.0, -1.0)],
)
def test_advantages_are_the_golden_numbers(
    correct: int, ddof: int, right: float, wrong: float
) -> None:
    advantages = group_advantages(rewards(correct), ddof=ddof, epsilon=1e-6)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages[:correct], right, atol=5e-4)
    np.testing.assert_allclose(advantages[correct:], wrong, atol=5e-4)


def test_the_epsilon_is_added_to_the_standard_deviation() -> None:
    np.testing.assert_allclose(group_advantages([1.0, -1.0], ddof=0, epsilon=1.0), [0.5, -0.5])


def test_without_normalization_the_advantage_is_the_distance_to_the_mean() -> None:
    found = group_advantages([1.0, -1.0, -1.0, 0.2], normalization="none")
    np.testing.assert_allclose(found, [1.2, -0.8, -0.8, 0.4], rtol=1e-6)
    assert group_advantages([0.1] * 7, normalization="none").tolist() == [0.0] * 7
    assert group_advantages([1.0], normalization="none").tolist() == [0.0]


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages([1.0]).tolist() == [0.0]
    assert group_advantages([]).tolist() == []


@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_rewards_have_no_advantage_even_without_an_epsilon(ddof: int) -> None:
    # A penalty factor of 2 gives a mixed group like this one: −1 wrong, 1 − 2 right at the cap.
    # The mean of 0.1 differs from 0.1 by rounding, and so would the standard deviation from 0.
    for value in (-1.0, 0.1, 1e6 + 0.1):
        assert group_advantages([value] * 7, ddof=ddof, epsilon=0.0).tolist() == [0.0] * 7


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad: float) -> None:
    with pytest.raises(NumericalError, match="not all finite"):
        group_advantages([1.0, bad])


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=32))
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(values: list[int]) -> None:
    advantages = group_advantages(values)
    assert abs(advantages.sum()) < 1e-3
    order = np.argsort(values, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()
