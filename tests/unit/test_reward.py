"""Overlong shaping and the reward of a sample, with the golden numbers of the paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.reward import overlong_penalty, shaped_reward


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 0.0), (16384, 0.0), (16385, -0.000244), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_the_penalty_has_the_golden_values_for_20480_and_4096(length, expected):
    assert overlong_penalty(length, 20480, 4096) == pytest.approx(expected, abs=5e-7)


def test_no_cache_means_no_shaping():
    assert overlong_penalty(100, 100, 0) == 0.0
    assert overlong_penalty(101, 100, 0) == 0.0


def test_a_cache_of_the_whole_cap_punishes_from_the_first_token():
    assert overlong_penalty(1, 100, 100) == -0.01
    assert overlong_penalty(0, 100, 100) == 0.0


@pytest.mark.parametrize("cache", [-1, 101])
def test_a_cache_that_does_not_fit_in_the_cap_is_refused(cache):
    with pytest.raises(ValueError, match="must lie between 0"):
        overlong_penalty(1, 100, cache)


def test_at_the_cap_correct_is_zero_and_wrong_is_minus_two():
    shape = {"max_tokens": 20480, "cache": 4096}
    assert shaped_reward(True, 20480, **shape) == 0.0
    assert shaped_reward(False, 20480, **shape) == -2.0
    assert shaped_reward(True, 16384, **shape) == 1.0
    assert shaped_reward(False, 16384, **shape) == -1.0


def test_the_factor_scales_only_the_penalty():
    right = shaped_reward(True, 18432, max_tokens=20480, cache=4096, factor=2.0, correct_reward=3.0)
    wrong = shaped_reward(False, 30000, max_tokens=20480, cache=4096, factor=2.0, wrong_reward=0.0)
    assert (right, wrong) == (2.0, -2.0)


@given(st.integers(0, 300), st.integers(1, 200), st.data())
def test_the_penalty_never_rises_with_length_and_stays_within_its_bounds(length, cap, data):
    cache = data.draw(st.integers(0, cap))
    penalty = overlong_penalty(length, cap, cache)
    assert -1.0 <= penalty <= 0.0
    assert overlong_penalty(length + 1, cap, cache) <= penalty
