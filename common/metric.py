"""What a metric is: where its figure comes from, its name, and what to make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "dapo_"
Source = Literal["every", "learner", "generator", "verifier", "batch", "round", "eval"]
"""every: the reports of all roles; learner, generator, verifier: the report of that role, made each
second; batch, round, eval: a row of metrics.jsonl of that kind, the newest one."""
LEARNERS = ("batch", "round", "eval")
"""Sources that only the learner has."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure. With a `label`, the figure is a mapping, and each of its keys a value of it."""

    source: Source
    key: str
    name: str
    means: str
    healthy: str
    action: str
    label: str = ""
    scale: float = 1.0

    @property
    def full_name(self) -> str:
        """Name as Prometheus shows it."""
        return PREFIX + self.name

    @property
    def is_counter(self) -> bool:
        """By Prometheus' convention a name that ends so only grows, but for a restart."""
        return self.name.endswith("_total")

    @property
    def roles(self) -> tuple[str, ...]:
        """Which roles export it."""
        if self.source == "every":
            return ("learner", "generator", "verifier")
        return ("learner",) if self.source in LEARNERS else (self.source,)
