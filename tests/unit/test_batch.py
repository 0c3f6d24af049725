"""Order, split over ranks, micro-batch plan and collation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Span
from learner.batch import (
    Trajectory,
    collate,
    idle_micro_batch,
    mini_batches,
    pack_rows,
    plan_micro_batches,
    share,
    token_count,
)

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


def trajectory(prompt: int = 3, response: int = 4, group: int = 0, **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "group": group,
        "sample": 0,
        "prompt_ids": np.arange(1, prompt + 1, dtype=np.int32),
        "response_ids": np.arange(100, 100 + response, dtype=np.int32),
        "logprobs": -np.arange(1, response + 1, dtype=np.float32),
        "advantage": 0.5,
        "spans": [Span(0, 7, 0, response)] if response else [],
    }
    return Trajectory(**{**fields, **changes})


def test_the_age_of_a_token_is_counted_in_versions_from_its_span() -> None:
    item = trajectory(response=5, spans=[Span(0, 5, 0, 2), Span(1, 7, 2, 5)])
    assert item.ages(7).tolist() == [2, 2, 0, 0, 0]
    assert item.tokens == 8


def test_masked_trajectories_and_log_probs_that_are_not_finite_train_no_token() -> None:
    logprobs = np.array([-1.0, np.nan, -np.inf, -2.0], dtype=np.float32)
    assert trajectory(logprobs=logprobs).trained().tolist() == [True, False, False, True]
    assert not trajectory(masked=True).trained().any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "empty prompt"),
        ({"logprobs": np.zeros(3, np.float32)}, "3 log-probs for 4 tokens"),
        ({"spans": [Span(0, 0, 0, 3)]}, "do not cover"),
    ],
)
def test_a_trajectory_that_cannot_be_trained_is_an_error(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        trajectory(**changes)


def test_mini_batches_are_whole_groups_shuffled_by_seed_and_version_only() -> None:
    groups = list(range(12))
    minis = mini_batches(groups, 3, seed=1, version=5)
    assert [len(mini) for mini in minis] == [4, 4, 4]
    assert sorted(sum(minis, [])) == groups
    assert minis == mini_batches(groups, 3, seed=1, version=5)
    assert minis != mini_batches(groups, 3, seed=1, version=6)
    assert minis != mini_batches(groups, 3, seed=2, version=5)


def test_groups_that_do_not_divide_into_equal_mini_batches_are_an_error() -> None:
    with pytest.raises(ValueError, match="do not divide"):
        mini_batches([1, 2, 3], 2, seed=0, version=0)


@given(LENGTHS, st.integers(1, 5))
def test_every_item_has_one_rank_and_ranks_differ_by_at_most_one_item(
    sizes: list[int], world: int
) -> None:
    items = list(enumerate(sizes))
    parts = [share(items, world, rank, tokens=lambda item: item[1]) for rank in range(world)]
    assert sorted(sum(parts, [])) == items
    assert all(part == sorted(part) for part in parts)
    loads = [sum(size for _, size in part) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_groups_are_shared_whole_and_by_their_tokens() -> None:
    long, short = [trajectory(response=30)], [trajectory(response=10), trajectory(response=8)]
    assert token_count(long) == 33 and token_count(short) == 24
    assert share([short, long, short], 2, 0) == [long]
    assert share([short, long, short], 2, 1) == [short, short]
    assert share([short], 2, 1) == []


@given(LENGTHS, st.integers(1, 120))
def test_the_plan_holds_every_sequence_once_within_the_budget(
    lengths: list[int], budget: int
) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert sorted(sum(plan, [])) == list(range(len(lengths)))
    for rows in plan:
        padded = len(rows) * max(lengths[row] for row in rows)
        assert padded <= budget or len(rows) == 1
    ordered = [lengths[row] for rows in plan for row in rows]
    assert ordered == sorted(lengths, reverse=True)


def test_a_budget_of_one_gives_every_sequence_its_own_micro_batch() -> None:
    assert plan_micro_batches([3, 9, 5], 1) == [[1], [2], [0]]
    assert plan_micro_batches([], 10) == []


def test_each_response_token_is_predicted_by_the_position_before_it() -> None:
    items = [trajectory(3, 4), trajectory(2, 1), trajectory(5, 0), trajectory(1, 7)]
    rows = pack_rows([(item.prompt_ids, item.response_ids) for item in items])
    assert rows.input_ids_BT.shape == (4, 8)
    flat = rows.input_ids_BT.flatten()
    assert torch.equal(flat[rows.index_N + 1], rows.labels_N)
    assert rows.labels_N.tolist() == [*range(100, 104), 100, *range(100, 107)]
    assert rows.input_ids_BT[0].tolist() == [1, 2, 3, 100, 101, 102, 103, 0]


def test_columns_of_a_micro_batch_line_up_with_the_labels() -> None:
    first = trajectory(3, 2, advantage=1.0, spans=[Span(0, 6, 0, 1), Span(0, 7, 1, 2)])
    second = trajectory(2, 3, advantage=-2.0, masked=True)
    old = [np.array([-9.0, -8.0], np.float32), np.array([-7.0, -6.0, -5.0], np.float32)]
    batch = collate([first, second], version=7, old=old)
    assert batch.behaviour_N.tolist() == [-1, -2, -1, -2, -3]
    assert batch.old_N is not None and batch.old_N.tolist() == [-9, -8, -7, -6, -5]
    assert batch.advantage_N.tolist() == [1, 1, -2, -2, -2]
    assert batch.counted_N.tolist() == [True, True, False, False, False]
    assert batch.age_N.tolist() == [1, 0, 0, 0, 0]
    assert collate([first], version=7).old_N is None


def test_a_response_without_tokens_adds_nothing() -> None:
    batch = collate([trajectory(3, 0)], version=7)
    assert len(batch.rows.labels_N) == len(batch.advantage_N) == len(batch.age_N) == 0


def test_an_idle_micro_batch_counts_no_token() -> None:
    batch = idle_micro_batch()
    assert not batch.counted_N.any() and len(batch.rows.labels_N) == 1
