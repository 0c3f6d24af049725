"""Statistics of an evaluation: what `n` samples per problem say about a policy, and how surely.

Pure functions. `n` is the number of samples of a problem, `c` how many of them are correct. The
unit of sampling is the problem: errors and intervals are over problems, never over samples, which
are not independent of each other. Shapes: P problems, M measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]

RESAMPLES = 2000
LEVEL = 0.95
_CHUNK = 4_000_000
"""Drawn figures that exist at one time."""


def budgets(n: int) -> list[int]:
    """The k of pass@k that are reported for `n` samples: the powers of two below `n`, and `n`."""
    return [2**power for power in range(max(0, n - 1).bit_length())] + [n]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that `k` of the `n` samples, drawn without replacement, hold a correct one.

    1 - C(n-c, k) / C(n, k): the unbiased estimator of pass@k from n >= k independent samples
    (Chen et al. 2021, arXiv 2107.03374, eq. 1), in exact integers.

    Raises:
        ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {c} correct samples among {n} has no meaning")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(correct: int, wrong: Iterable[int]) -> float:
    """maj@n: whether the answer that most samples give is the right one.

    `correct` counts the votes for the right answer, `wrong` those for each other answer; samples
    without an answer do not vote. Where m answers share the lead and the right one is among them,
    it scores 1/m: what a fair draw among the leaders is right on average, and the same for every
    order of the samples. Nobody voted for the right one: 0.
    """
    rivals = [votes for votes in wrong if votes >= correct]
    if correct == 0 or any(votes > correct for votes in rivals):
        return 0.0
    return 1.0 / (1 + len(rivals))


def standard_error(values_P: Reals) -> float:
    """Standard error of a mean over problems (ddof 1); NaN for fewer than two of them."""
    if len(values_P) < 2:
        return math.nan
    return float(np.std(values_P, ddof=1) / math.sqrt(len(values_P)))


def intervals(
    values_PM: Reals, seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> Reals:
    """Confidence intervals of the means over problems: (M, 2), the lower and the upper end.

    For measures between 0 and 1. Percentile bootstrap (Efron 1979): problems are drawn with
    replacement, all measures from the same draws; equal seeds give equal intervals. It knows no
    values but those it has seen, so that over a handful of problems it is too narrow; where all
    problems score alike, `interval_of_equals` takes its place.

    Raises:
        ValueError: there are no problems.
    """
    problems, measures = values_PM.shape
    if problems == 0:
        raise ValueError("an interval needs at least one problem")
    draw = np.random.default_rng(seed)
    rows = max(1, _CHUNK // (problems * max(1, measures)))
    means = [
        values_PM[draw.integers(problems, size=(min(rows, resamples - start), problems))].mean(1)
        for start in range(0, resamples, rows)
    ]
    tail = (1 - level) / 2
    ends: Reals = np.quantile(np.concatenate(means), [tail, 1 - tail], axis=0).T
    for measure in np.flatnonzero(np.ptp(values_PM, axis=0) == 0):
        ends[measure] = interval_of_equals(float(values_PM[0, measure]), problems, level)
    return ends


def interval_of_equals(value: float, problems: int, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a mean of which every observation, within 0 and 1, was the same `value`.

    Others may exist: their share is at most q = 1 - (tail)^(1/P), the exact bound for an event that
    did not happen in P trials (Clopper and Pearson 1934), and they are 0 or 1 at the worst.
    """
    q = 1 - ((1 - level) / 2) ** (1 / problems)
    return value * (1 - q), value * (1 - q) + q
