"""Whether long groups are trained as often as they are generated.

A group counts by the response tokens of all its samples; it is long if it is among the longest
tenth of those generated of late. Generated are the groups that passed the filter and, as far as
they would have passed, those that were lost before they were complete: they count with the tokens
that they had, which is less than they would have got, so that a bias is under-stated rather than
made up. Groups that were filtered do not count: that the filter takes long ones is no bias of
admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from learner.groups import Judgements

LONGEST = 0.9
FEWEST = 20
"""Groups generated below which a ratio would be noise."""


class LengthBias:
    """Over the newest `window` groups generated, and as many trained."""

    def __init__(self, window: int) -> None:
        self._generated: deque[tuple[float, float]] = deque(maxlen=window)  # tokens, weight
        self._trained: deque[float] = deque(maxlen=window)

    def add(self, trained: Iterable[int], judged: Judgements) -> None:
        """A batch was trained: tokens of its groups, and what was judged and lost meanwhile."""
        passes = 1.0 if judged.acceptance is None else judged.acceptance
        self._generated.extend((tokens, 1.0) for tokens in judged.passed)
        self._generated.extend((tokens, passes) for tokens in judged.lost)
        self._trained.extend(trained)

    @property
    def ratio(self) -> float | None:
        """Share of long groups among those trained over their share among those generated: 1 is no
        bias. None while too few are known."""
        if len(self._generated) < FEWEST or not self._trained:
            return None
        tokens, weights = np.array(self._generated).T
        long = np.quantile(tokens, LONGEST)
        generated = weights[tokens >= long].sum() / weights.sum()
        return float(np.mean(np.array(self._trained) >= long) / generated)
