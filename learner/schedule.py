"""The learning rate of a batch. It moves with batches, not with optimizer steps."""

from __future__ import annotations

import math

from common.sections import LearnerSection


def learning_rate(batch: int, batches: int, learner: LearnerSection) -> float:
    """Rate of batch `batch`, counted from 1, of a run of `batches`.

    With `warmup_batches` = W a linear rise, n / W of the rate in batch n. Then constant, or a
    fall over the rest that begins with the full rate in batch W + 1; the floor, the rate ×
    min_learning_rate_ratio, is where a batch after the last would be. Beyond it stays the floor.
    """
    warmup, rate = learner.warmup_batches, learner.learning_rate
    if batch <= warmup:
        return rate * batch / warmup
    passed = min(1.0, (batch - 1 - warmup) / max(1, batches - warmup))
    left = {
        "constant": 1.0,
        "linear": 1.0 - passed,
        "cosine": (1.0 + math.cos(math.pi * passed)) / 2,
    }[learner.schedule]
    floor = learner.min_learning_rate_ratio
    return rate * (floor + (1.0 - floor) * left)
