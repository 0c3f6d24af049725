"""Which ordinal is which row: epochs, mixtures, and prompts that come back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.order import (
    LONGEST_PERIOD,
    RECYCLE,
    Mixture,
    Shuffled,
    base_ordinal,
    generation,
    interleave,
    order_of,
    recycled,
    shares,
)

SEEDS = st.integers(0, 2**31)
WEIGHTS = st.lists(st.integers(1, 60).map(lambda n: n / 10), min_size=1, max_size=5)


@settings(max_examples=50)
@given(size=st.integers(1, 40), seed=SEEDS, epochs=st.integers(1, 7))
def test_every_epoch_is_a_permutation_of_all_rows(size: int, seed: int, epochs: int) -> None:
    order = Shuffled(size, seed)
    drawn = [order.row(ordinal) for ordinal in range(size * epochs)]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=50)
@given(seed=SEEDS, weights=st.none() | WEIGHTS, ordinals=st.lists(st.integers(0, 400), max_size=40))
def test_the_row_of_an_ordinal_is_pure_whatever_was_asked_before(
    seed: int, weights: list[float] | None, ordinals: list[int]
) -> None:
    parts = [part for part in range(len(weights or [1])) for _ in range(3 + part)]
    asked = order_of(parts, weights, seed)
    assert [asked.row(o) for o in ordinals] == [
        order_of(parts, weights, seed).row(o) for o in ordinals
    ]


def test_epochs_seeds_and_data_sets_are_shuffled_differently() -> None:
    orders = Counter(
        tuple(Shuffled(30, seed, stream).row(30 * epoch + place) for place in range(30))
        for seed in (1, 2)
        for stream in ((1,), (2,))
        for epoch in range(3)
    )
    assert len(orders) == 12


@settings(max_examples=50)
@given(weights=WEIGHTS, seed=SEEDS, sizes=st.lists(st.integers(1, 9), min_size=5, max_size=5))
def test_a_mixture_gives_every_row_of_each_set_once_per_epoch_of_that_set(
    weights: list[float], seed: int, sizes: list[int]
) -> None:
    sizes = sizes[: len(weights)]
    mixture = Mixture(sizes, weights, seed)
    drawn = [mixture.row(ordinal) for ordinal in range(mixture.period + 100)]
    start = 0
    for size in sizes:
        own = [row - start for row in drawn if start <= row < start + size]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
        start += size
    assert set(drawn) <= set(range(start))


@settings(max_examples=50)
@given(weights=WEIGHTS)
def test_shares_are_kept_to_less_than_one_draw_in_every_prefix(weights: list[float]) -> None:
    numbers = shares(weights)
    period, given = sum(numbers), [0] * len(numbers)
    parts, before = interleave(numbers)
    for draws, (part, had) in enumerate(zip(parts.tolist(), before.tolist(), strict=True), 1):
        assert had == given[part]
        given[part] += 1
        for number, count in zip(numbers, given, strict=True):
            assert abs(count * period - number * draws) < period
    assert given == numbers


def test_a_mixture_goes_on_after_its_period_where_it_was() -> None:
    mixture = Mixture([1000, 1000], [0.7, 0.3], seed=0)
    first = [mixture.row(ordinal) // 1000 for ordinal in range(10)]
    assert Counter(first) == {0: 7, 1: 3}
    assert [mixture.row(10 + ordinal) // 1000 for ordinal in range(10)] == first
    assert len({mixture.row(ordinal) for ordinal in range(1000)}) == 1000


def test_without_weights_the_files_are_one_data_set() -> None:
    parts = [0] * 3 + [1] * 5
    order, whole = order_of(parts, None, seed=4), Shuffled(8, seed=4)
    assert [order.row(o) for o in range(40)] == [whole.row(o) for o in range(40)]


@pytest.mark.parametrize(
    ("weights", "numbers"),
    [
        ([1], [1]),
        ([0.1, 0.2, 0.3], [1, 2, 3]),
        ([17917, 7473], [17917, 7473]),
        ([2.0, 4.0], [1, 2]),
        ([1e-05, 0.5], [1, 50000]),
    ],
)
def test_weights_are_the_decimals_that_are_written(
    weights: list[float], numbers: list[int]
) -> None:
    assert shares(weights) == numbers


def test_weights_that_never_come_to_a_round_number_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{LONGEST_PERIOD:,} are allowed"):
        shares([1 / 3, 1])


@given(ordinal=st.integers(0, RECYCLE - 1), times=st.integers(0, 5))
def test_a_prompt_that_comes_back_has_an_ordinal_of_its_own_and_the_same_row(
    ordinal: int, times: int
) -> None:
    again = ordinal
    for _ in range(times):
        again = recycled(again)
    assert base_ordinal(again) == ordinal
    assert generation(again) == times
    assert Shuffled(11, 3).row(again) == Shuffled(11, 3).row(ordinal)
    assert Mixture([5, 6], [1, 2], 3).row(again) == Mixture([5, 6], [1, 2], 3).row(ordinal)
