"""Byte-bounded packs of whole tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.buckets import plan_buckets


@given(st.lists(st.integers(0, 100)), st.integers(1, 150))
def test_buckets_keep_the_order_and_only_a_lone_tensor_exceeds_the_bound(
    sizes: list[int], bound: int
) -> None:
    buckets = plan_buckets(sizes, bound)
    assert sum(buckets, []) == list(range(len(sizes)))
    for bucket in buckets:
        assert sum(sizes[index] for index in bucket) <= bound or len(bucket) == 1


def test_a_bucket_is_filled_before_the_next_begins() -> None:
    assert plan_buckets([4, 4, 4, 20, 1, 1], 8) == [[0, 1], [2], [3], [4, 5]]


def test_a_bound_that_holds_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="positive"):
        plan_buckets([1], 0)
