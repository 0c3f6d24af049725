"""How the run gets on: what rank 0 reports each second, for `dapo status` and Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from common.config import Config
from common.diagnosis import stall_limit
from common.prometheus import Prometheus
from common.vitals import Clock, Vitals
from learner.dispatcher import Dispatcher

RECENT = 5
"""Batches over which the shares of time and the interval between batches are taken."""


class Progress:
    """Told of batches, rounds and evaluations by the main thread; read by the event loop."""

    def __init__(
        self, config: Config, prometheus: Prometheus, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.prometheus, self._now = config, prometheus, now
        states = ("waiting", "training", "publishing", "evaluating", "saving")
        self.clock = Clock(*states, marks=RECENT, now=now)
        self.vitals = Vitals(self.clock)
        self.rounds_failed = 0
        self._tokens = 0.0
        self._since = self._now()
        self._judged = 0
        self._batches: deque[float] = deque([self._since], maxlen=RECENT + 1)

    def batch(self, tokens: float) -> dict[str, float]:
        """A batch was trained; returns its pace, by the time since the one before."""
        now = self._now()
        pace = tokens / max(1e-9, now - self._batches[-1])
        self._batches.append(now)
        self._since = now
        self._tokens += tokens
        self.clock.mark()
        return {"tokens_per_second": pace}

    def evaluation(self) -> None:
        """An evaluation was done."""
        self._since = self._now()

    def report(
        self, dispatcher: Dispatcher, published: str, queues: dict[str, int]
    ) -> dict[str, Any]:
        """The learner's report, which Prometheus gets too; called every second or so."""
        if dispatcher.judged != self._judged:
            self._judged, self._since = dispatcher.judged, self._now()
        admission = dispatcher.admission
        counts = admission.counts()
        judging = min(queues["rollouts"], counts.generating + counts.judging)
        report = {
            "role": "learner", **self.vitals.figures(), "version": admission.version,
            "published": published, "batches": self.config.run.batches,
            "batch_groups": self.config.algorithm.groups_per_batch,
            "max_staleness": self.config.admission.max_staleness,
            "stall_s": self.config.run.stall_s,
            "open": counts.open, "capacity": counts.capacity, "accepted": counts.accepted,
            "pending": counts.pending, "training": counts.training,
            "groups": {
                "unclaimed": counts.unclaimed,
                "generating": counts.generating + counts.judging - judging,
                "judging": judging, "accepted": counts.accepted, "training": counts.training,
            },
            "unclaimed": dispatcher.unclaimed, "generators": dispatcher.generators,
            "members": {"learner": 1, "generator": 0, "verifier": 0} | dispatcher.members,
            "waiting_for": dispatcher.waiting_for(), "queues": queues,
            "acceptance": round(admission.acceptance, 4),
            "fates": {k: n for k, n in dispatcher.fate_counts().items() if k != "open"},
            "tokens_total": self._tokens, "rounds_failed": self.rounds_failed,
            "since_progress_s": round(self.since_s(), 1),
            "batch_interval_s": self._interval(),
        }  # fmt: skip
        self.prometheus.log("learner", admission.version, report)
        return report

    def since_s(self) -> float:
        """Seconds since a batch or an evaluation was done, or a group was seen to be judged."""
        return self._now() - self._since

    def stall_limit(self) -> float:
        """Seconds without progress after which the log says so."""
        return stall_limit(self.config.run.stall_s, self._interval())

    def _interval(self) -> float | None:
        """Mean seconds from batch to batch of late; None before the first."""
        times = list(self._batches)
        if len(times) < 2:
            return None
        return round((times[-1] - times[0]) / (len(times) - 1), 3)
