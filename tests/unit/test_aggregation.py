"""One factor per response makes the loss of an optimizer batch, against sums done by hand."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.algorithm import Aggregation
from common.messages import Span
from learner.aggregation import Counts, counts, token_scales
from learner.batch import Trajectory, share

CONSTANT = 10.0


def response(group: int, tokens: int, masked: bool = False, unusable: int = 0) -> Trajectory:
    """A response whose first `unusable` tokens have no finite behaviour log-prob."""
    logprobs = np.full(tokens, -1.0, dtype=np.float32)
    logprobs[:unusable] = np.nan
    ids = np.zeros(tokens, dtype=np.int32)
    spans = [Span(0, 0, 0, tokens)] if tokens else []
    return Trajectory(group, 0, ids[:1] if tokens else np.zeros(1, np.int32), ids, logprobs, 1.0,
                      spans, masked)  # fmt: skip


# Two tokens, four tokens of which one is unusable, three masked ones; a group of six tokens; and a
# group that is masked as a whole.
ITEMS = [
    response(0, 2), response(0, 4, unusable=1), response(0, 3, masked=True),
    response(1, 6),
    response(2, 5, masked=True), response(2, 1, unusable=1),
]  # fmt: skip
LOSSES = [1.0, 2.0, 100.0, 3.0, 100.0, 100.0]
"""The loss of every token of each response."""


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        ("token", (2 * 1 + 3 * 2 + 6 * 3) / 11),
        ("group", ((2 * 1 + 3 * 2) / 5 + 3) / 2),
        ("sequence", (1 + 2 + 3) / 3),
        ("constant", (2 * 1 + 3 * 2 + 6 * 3) / (3 * CONSTANT)),
    ],
)
def test_each_aggregation_gives_the_mean_worked_out_by_hand(
    aggregation: Aggregation, loss: float
) -> None:
    total = counts(ITEMS)
    assert total == Counts(tokens=11, responses=3, groups=2)
    scales = token_scales(ITEMS, total, aggregation, CONSTANT)
    sums = [item.trained_tokens * value for item, value in zip(ITEMS, LOSSES, strict=True)]
    assert sum(s * f for s, f in zip(sums, scales, strict=True)) == pytest.approx(loss)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_a_batch_without_a_token_that_counts_has_factors_of_zero(aggregation: Aggregation) -> None:
    items = [response(0, 3, masked=True), response(1, 0)]
    assert counts(items) == Counts(0, 0, 0)
    assert token_scales(items, counts(items), aggregation, CONSTANT) == [0.0, 0.0]


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
             min_size=1, max_size=6),
    st.integers(1, 4), st.sampled_from(get_args(Aggregation)),
)  # fmt: skip
def test_the_factors_are_the_same_however_the_groups_are_shared_among_ranks(
    sizes: list[list[tuple[int, bool]]], world: int, aggregation: Aggregation
) -> None:
    groups = [[response(g, n, m) for n, m in group] for g, group in enumerate(sizes)]
    whole = [item for group in groups for item in group]
    total = counts(whole)
    expected = token_scales(whole, total, aggregation, CONSTANT)
    parts = [[i for g in share(groups, world, rank) for i in g] for rank in range(world)]
    assert Counts(*np.sum([counts(part) for part in parts], axis=0).tolist()) == total
    found = {
        id(item): scale
        for part in parts
        for item, scale in zip(part, token_scales(part, total, aggregation, CONSTANT), strict=True)
    }
    assert [found[id(item)] for item in whole] == expected
    if total.tokens and aggregation != "constant":
        tokens = [item.trained_tokens for item in whole]
        assert sum(n * s for n, s in zip(tokens, expected, strict=True)) == pytest.approx(1.0)
