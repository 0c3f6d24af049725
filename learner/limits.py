"""What bounds the rate of a setting besides the admission rule, and what a synchronous loop does.

All times are seconds of one batch.
"""

from __future__ import annotations

import heapq
import math
import random

from learner.simulation import Problem, Setting, draw_problem


class Pool:
    """Slots that take the samples of one group after the other, as soon as all find room."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.now = 0.0
        self._ends: list[float] = []

    def start(self, problem: Problem) -> None:
        while len(self._ends) > self.slots - len(problem.seconds):
            self.now = heapq.heappop(self._ends)
        for seconds in problem.seconds:
            heapq.heappush(self._ends, self.now + seconds)

    @property
    def end(self) -> float:
        """When all that was started is done."""
        return max(self._ends, default=self.now)


def learner_alone(setting: Setting) -> float:
    """If groups were always there."""
    return setting.train_s + setting.publish_s


def generators_alone(setting: Setting, groups: int = 4000, seed: int = 1) -> float:
    """With an endless stream of prompts and nobody to wait for."""
    rng, pool, accepted = random.Random(seed), Pool(setting.slots), 0
    for _ in range(groups):
        problem = draw_problem(setting, rng)
        accepted += problem.passes
        pool.start(problem)
    return pool.now * setting.batch_groups / max(1, accepted) / setting.generators


def waiting_for_all(setting: Setting, max_staleness: int, draws: int = 300, seed: int = 2) -> float:
    """The price of no bias: (slowest group + training + publication) / (S + 1).

    The slowest group is the mean over draws of the slowest of a batch.
    """
    rng = random.Random(seed)
    slowest = (
        max(max(draw_problem(setting, rng).seconds) for _ in range(setting.batch_groups))
        for _ in range(draws)
    )
    return (sum(slowest) / draws + learner_alone(setting)) / (max_staleness + 1)


def synchronous_loop(setting: Setting, batches: int = 200, seed: int = 3) -> float:
    """A loop that generates `oversample` groups for each that is missing, waits for all of them,
    does so again for what is still missing, then trains and publishes."""
    rng, total = random.Random(seed), 0.0
    for _ in range(batches):
        accepted = 0
        while accepted < setting.batch_groups:
            pool = Pool(setting.slots * setting.generators)
            missing = setting.batch_groups - accepted
            for _ in range(math.ceil(missing * setting.oversample)):
                problem = draw_problem(setting, rng)
                accepted += problem.passes
                pool.start(problem)
            total += pool.end
    return total / batches + learner_alone(setting)
