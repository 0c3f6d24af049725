"""How long the samples of a group take: distributions for the simulation of admission."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol


class Durations(Protocol):
    """A distribution of groups."""

    def draw(self, samples: int, rng: random.Random) -> tuple[list[float], bool]:
        """Seconds of each sample of a group, and whether the group counts as long."""


@dataclass(frozen=True)
class LogNormal:
    """Samples are log-normal with mean `mean_s`; one sample of a long group is a straggler.

    `sigma` is the standard deviation of the logarithm, `long_share` the share of groups that are
    long, and `long_factor` how many times longer their straggler takes than it would.
    """

    mean_s: float = 1.0
    sigma: float = 0.5
    long_share: float = 0.0
    long_factor: float = 20.0

    def draw(self, samples: int, rng: random.Random) -> tuple[list[float], bool]:
        log_mean = math.log(self.mean_s) - self.sigma**2 / 2
        seconds = [rng.lognormvariate(log_mean, self.sigma) for _ in range(samples)]
        long = rng.random() < self.long_share
        if long:
            seconds[0] *= self.long_factor
        return seconds, long


@dataclass(frozen=True)
class Measured:
    """Samples lie on the line through measured quantiles, independently of each other.

    `points` are (share of samples, seconds), both rising, from share 0 to share 1. A group is long
    if one of its samples is beyond the last quantile but one.
    """

    points: tuple[tuple[float, float], ...]

    def draw(self, samples: int, rng: random.Random) -> tuple[list[float], bool]:
        shares = [rng.random() for _ in range(samples)]
        return [self._seconds(share) for share in shares], max(shares) >= self.points[-2][0]

    def _seconds(self, share: float) -> float:
        place = bisect_right(self.points, (share, math.inf))
        (left, low), (right, high) = self.points[place - 1], self.points[place]
        return low + (high - low) * (share - left) / (right - left)
