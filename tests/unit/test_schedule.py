"""The learning rate of each batch of a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.sections import LearnerSection
from learner.schedule import learning_rate

KINDS = ("constant", "linear", "cosine")


def rates(batches: int, **keys: object) -> list[float]:
    learner = LearnerSection(learning_rate=8.0, **keys)
    return [learning_rate(number, batches, learner) for number in range(1, batches + 1)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [8, 8, 8, 8, 8, 8]),
        ({"warmup_batches": 2}, [4, 8, 8, 8, 8, 8]),
        ({"warmup_batches": 2, "schedule": "linear"}, [4, 8, 8, 6, 4, 2]),
        ({"warmup_batches": 2, "schedule": "linear", "min_learning_rate_ratio": 0.5},
         [4, 8, 8, 7, 6, 5]),
        ({"warmup_batches": 2, "schedule": "cosine"},
         [4, 8, 8, 4 + 4 * math.cos(math.pi / 4), 4, 4 - 4 * math.cos(math.pi / 4)]),
    ],
)  # fmt: skip
def test_the_rate_rises_over_the_warm_up_and_falls_over_the_rest(
    keys: dict[str, object], expected: list[float]
) -> None:
    assert rates(6, **keys) == pytest.approx(expected)


def test_beyond_the_last_batch_the_rate_stays_at_the_floor() -> None:
    learner = LearnerSection(learning_rate=8.0, schedule="cosine", min_learning_rate_ratio=0.25)
    assert [learning_rate(n, 4, learner) for n in (5, 6, 50)] == pytest.approx([2.0] * 3)


@given(st.integers(1, 30), st.integers(0, 29), st.sampled_from(KINDS), st.floats(0, 1))
def test_the_rate_never_exceeds_its_peak_nor_falls_again_below_the_floor(
    batches: int, warmup: int, kind: str, floor: float
) -> None:
    found = rates(batches, warmup_batches=warmup, schedule=kind, min_learning_rate_ratio=floor)
    assert all(rate <= 8.0 + 1e-9 for rate in found)
    after = found[warmup:]
    assert all(rate >= 8.0 * floor - 1e-9 for rate in after)
    assert after == sorted(after, reverse=True)
    assert not after or after[0] == pytest.approx(8.0)
