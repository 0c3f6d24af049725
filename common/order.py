"""Which ordinal is which problem.

Ordinal to row is a pure function of seed, data and mixture: epoch after epoch, each shuffled anew.
Several data sets are mixed by weight, each in epochs of its own, and the shares hold in every
prefix of the order. A prompt whose group was lost or failed comes back under an ordinal of its
own, `recycled(o)`, from which its row follows by the same function.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

RECYCLE = 1 << 40
"""Ordinals below are the sequence of the data; each multiple above is one more return."""

LONGEST_PERIOD = 100_000
"""Draws after which a mixture repeats at the latest: its table is kept in memory."""


def recycled(ordinal: int) -> int:
    """The ordinal under which the prompt of a lost group comes back."""
    return ordinal + RECYCLE


def base_ordinal(ordinal: int) -> int:
    """The place in the sequence of the data."""
    return ordinal % RECYCLE


def generation(ordinal: int) -> int:
    """How often the prompt has come back."""
    return ordinal // RECYCLE


class Order(Protocol):
    """The order in which the rows of the training data are asked."""

    def row(self, ordinal: int) -> int:
        """Index of the row of an ordinal."""
        ...


class Shuffled:
    """`size` rows, every one once in each epoch. `stream` tells the orders of one seed apart."""

    def __init__(self, size: int, seed: int, stream: tuple[int, ...] = ()) -> None:
        self.size, self.seed, self.stream = size, seed, stream
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def row(self, ordinal: int) -> int:
        """Index of the row of an ordinal, in [0, size)."""
        epoch, place = divmod(base_ordinal(ordinal), self.size)
        if epoch not in self._epochs:
            if len(self._epochs) > 3:
                self._epochs.pop(min(self._epochs))
            random = np.random.default_rng([self.seed, epoch, *self.stream])
            self._epochs[epoch] = random.permutation(self.size)
        return int(self._epochs[epoch][place])


class Mixture:
    """Data sets that lie one after the other, of `sizes` rows, drawn by weight."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.shares = shares(weights)
        self.period = sum(self.shares)
        self._parts, self._before = interleave(self.shares)
        self._orders = [Shuffled(size, seed, (part,)) for part, size in enumerate(sizes)]
        self._starts = [sum(sizes[:part]) for part in range(len(sizes))]

    def row(self, ordinal: int) -> int:
        """Index of the row of an ordinal, in [0, sum(sizes))."""
        periods, place = divmod(base_ordinal(ordinal), self.period)
        part = int(self._parts[place])
        drawn = periods * self.shares[part] + int(self._before[place])
        return self._starts[part] + self._orders[part].row(drawn)


def order_of(parts: Iterable[int], weights: Sequence[float] | None, seed: int) -> Order:
    """The order of rows of which each is of a part (its file), those of one part adjacent.

    Without weights all rows are one data set, so that each file has the share of its size.
    """
    sizes = [count for _, count in sorted(Counter(parts).items())]
    if weights is None:
        return Shuffled(sum(sizes), seed)
    return Mixture(sizes, weights, seed)


def shares(weights: Sequence[float]) -> list[int]:
    """The weights as integers in lowest terms: draws of each data set in one period.

    A weight is the decimal that is written in the recipe, so that 0.1 is one tenth.

    Raises:
        ValueError: the period would be longer than `LONGEST_PERIOD`.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    found = [number // common for number in whole]
    if sum(found) > LONGEST_PERIOD:
        raise ValueError(
            f"the weights {', '.join(map(str, weights))} repeat only after {sum(found):,} draws, "
            f"{LONGEST_PERIOD:,} are allowed; give them with fewer digits"
        )
    return found


def interleave(shares: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """One period of a mixture: the part of each draw, and how many of that part came before it.

    After n draws part i has had more than n*share/period - 1 and fewer than n*share/period + 1
    of them. The j-th draw of a part may come once its share has passed j - 1, and has to come
    before its share passes j; of those that may, the one that has to come first is drawn. That
    is proportionate fairness on one processor by the earliest deadline (Baruah, Cohen, Plaxton
    and Varvel 1996), all in integers.
    """
    period = sum(shares)
    given = [0] * len(shares)
    parts, before = np.empty(period, np.int32), np.empty(period, np.int32)
    for draw in range(1, period + 1):
        due = [
            (-(-(had + 1) * period // share), part)
            for part, (share, had) in enumerate(zip(shares, given, strict=True))
            if share * draw > period * had
        ]
        _, part = min(due)
        parts[draw - 1], before[draw - 1] = part, given[part]
        given[part] += 1
    return parts, before
