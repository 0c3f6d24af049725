"""Packs of whole tensors, bounded in bytes: both ends of a weight round derive the same ones."""

from __future__ import annotations


def plan_buckets(sizes: list[int], bucket_bytes: int) -> list[list[int]]:
    """Indices of consecutive tensors, grouped so that a group holds at most `bucket_bytes`.

    `sizes` are bytes in the order of the manifest, which is kept. A tensor above the bound is
    alone in its bucket; no tensor is cut. Every index appears exactly once.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes = {bucket_bytes}; it must be positive")
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets
