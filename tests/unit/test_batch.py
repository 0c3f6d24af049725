"""Order, split over ranks, and collation."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.messages import Span
from learner.batch import (
    MiniBatch,
    Trajectory,
    collate,
    idle_micro_batch,
    mini_batches,
    share,
    token_count,
)
from learner.rows import Layout

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


def test_behind_a_kept_cache_a_token_is_as_old_as_the_oldest_of_its_response() -> None:
    item = trajectory(response=5, spans=[Span(0, 5, 0, 2), Span(1, 7, 2, 5)], kept_cache=True)
    assert item.ages(7).tolist() == [2, 2, 2, 2, 2]


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


def test_columns_of_a_micro_batch_line_up_with_the_labels() -> None:
    first = trajectory(3, 2, advantage=1.0, spans=[Span(0, 6, 0, 1), Span(0, 7, 1, 2)])
    second = trajectory(2, 3, advantage=-2.0, masked=True)
    old = [np.array([-9.0, -8.0], np.float32), np.array([-7.0, -6.0, -5.0], np.float32)]
    mini = MiniBatch([first, second], scales=[0.5, 0.0], start=old, reference=old)
    batch = collate(mini, [1, 0], version=7)
    assert batch.responses == 2
    assert batch.response_N.tolist() == [0, 0, 0, 1, 1]
    assert batch.behaviour_N.tolist() == [-1, -2, -3, -1, -2]
    assert batch.start_N is not None and batch.start_N.tolist() == [-7, -6, -5, -9, -8]
    assert batch.reference_N is not None and batch.reference_N.tolist() == [-7, -6, -5, -9, -8]
    assert batch.advantage_N.tolist() == [-2, -2, -2, 1, 1]
    assert batch.counted_N.tolist() == [False, False, False, True, True]
    assert batch.age_N.tolist() == [0, 0, 0, 1, 0]
    assert batch.scale_N.tolist() == [0, 0, 0, 0.5, 0.5]


def test_log_probs_that_were_not_scored_are_none() -> None:
    batch = collate(MiniBatch([trajectory()], [1.0]), [0], version=7)
    assert batch.start_N is None and batch.reference_N is None


@pytest.mark.parametrize("layout", get_args(Layout))
def test_the_layout_of_the_rows_changes_no_other_column(layout: Layout) -> None:
    mini = MiniBatch([trajectory(3, 2), trajectory(2, 5)], [0.5, 0.25])
    batch, padded = collate(mini, [0, 1], 7, layout), collate(mini, [0, 1], 7)
    assert torch.equal(batch.rows.labels_N, padded.rows.labels_N)
    for mine, other in zip(batch[2:], padded[2:], strict=True):
        assert mine is other is None or torch.equal(mine, other)


def test_a_response_without_tokens_adds_nothing() -> None:
    batch = collate(MiniBatch([trajectory(3, 0)], [0.0]), [0], version=7)
    assert len(batch.rows.labels_N) == len(batch.advantage_N) == len(batch.age_N) == 0


def test_an_idle_micro_batch_counts_no_token() -> None:
    batch = idle_micro_batch()
    assert not batch.counted_N.any() and len(batch.rows.labels_N) == 1
