"""Micro-batch plan, and where tokens and labels lie in either layout."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.rows import Layout, lay_out, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=40)
LAYOUTS = st.sampled_from(get_args(Layout))


def positions(lengths: list[int], layout: Layout) -> int:
    return sum(lengths) if layout == "packed" else len(lengths) * max(lengths)


@given(LENGTHS, st.integers(1, 120), LAYOUTS)
def test_the_plan_holds_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int, layout: Layout
) -> None:
    plan = plan_micro_batches(lengths, budget, layout)
    assert sorted(sum(plan, [])) == list(range(len(lengths)))
    for rows in plan:
        assert positions([lengths[row] for row in rows], layout) <= budget or len(rows) == 1
    ordered = [lengths[row] for rows in plan for row in rows]
    assert ordered == sorted(lengths, reverse=True)


@given(LENGTHS, st.integers(1, 120), LAYOUTS)
def test_a_micro_batch_ends_only_where_the_next_sequence_does_not_fit(
    lengths: list[int], budget: int, layout: Layout
) -> None:
    plan = plan_micro_batches(lengths, budget, layout)
    for rows, following in zip(plan, plan[1:], strict=False):
        assert positions([lengths[row] for row in [*rows, following[0]]], layout) > budget


def test_a_budget_of_one_gives_every_sequence_its_own_micro_batch() -> None:
    assert plan_micro_batches([3, 9, 5], 1) == [[1], [2], [0]]
    assert plan_micro_batches([3, 9, 5], 1, "packed") == [[1], [2], [0]]
    assert plan_micro_batches([], 10) == []


def test_packing_counts_tokens_and_padding_counts_the_longest_row() -> None:
    assert plan_micro_batches([6, 2, 2, 2], 12, "padded") == [[0, 1], [2, 3]]
    assert plan_micro_batches([6, 2, 2, 2], 12, "packed") == [[0, 1, 2, 3]]


@pytest.mark.parametrize("layout", get_args(Layout))
def test_each_response_token_is_predicted_by_the_position_before_it(layout: Layout) -> None:
    sizes = ((3, 4), (2, 1), (5, 0), (1, 7))
    pairs = [
        (np.arange(1, a + 1, dtype=np.int32), np.arange(100, 100 + b, dtype=np.int32))
        for a, b in sizes
    ]
    rows = lay_out(pairs, layout)
    flat = rows.input_ids_BT.flatten()
    assert torch.equal(flat[rows.index_N + 1], rows.labels_N)
    assert rows.labels_N.tolist() == [*range(100, 104), 100, *range(100, 107)]
    if layout == "packed":
        assert rows.input_ids_BT.shape == (1, sum(map(sum, sizes)))
        assert rows.position_ids_BT is not None
        assert rows.position_ids_BT[0].tolist() == [i for a, b in sizes for i in range(a + b)]
    else:
        assert rows.position_ids_BT is None
        assert rows.input_ids_BT.shape == (4, 8)
        assert rows.input_ids_BT[0].tolist() == [1, 2, 3, 100, 101, 102, 103, 0]
