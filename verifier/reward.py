"""Rewards of a response: correctness plus soft overlong punishment.

Pure functions. The formula is that of the DAPO paper (arXiv 2503.14476, "Soft Overlong
Punishment"), with one decision of our own: a cache of 0 means no shaping.
"""

from __future__ import annotations


def overlong_penalty(length: int, max_tokens: int, cache: int, factor: float = 1.0) -> float:
    """The overlong term for a response of `length` generated tokens, end token included.

    0 up to `max_tokens - cache`, then falling linearly to `-factor` at `max_tokens`, and
    `-factor` beyond. Raises ValueError for a cache that does not fit in the cap.
    """
    if not 0 <= cache <= max_tokens:
        raise ValueError(
            f"the overlong cache is {cache} tokens; it must lie between 0 (no shaping) "
            f"and the response cap of {max_tokens}"
        )
    free = max_tokens - cache
    if cache == 0 or length <= free:
        return 0.0
    if length > max_tokens:
        return -factor
    return (free - length) / cache * factor


def shaped_reward(
    correct: bool,
    length: int,
    *,
    max_tokens: int,
    cache: int,
    factor: float = 1.0,
    correct_reward: float = 1.0,
    wrong_reward: float = -1.0,
) -> float:
    """The reward of one sample: that of its correctness plus the overlong term.

    A group is never filtered on this value, only on raw correctness (`dynamic_sampling`).
    """
    base = correct_reward if correct else wrong_reward
    return base + overlong_penalty(length, max_tokens, cache, factor)
