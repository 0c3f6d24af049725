"""Simulates the pipeline in time around the real admission rule and prints what a bound costs.

Discrete events: a pool of sample slots generates groups, verdicts are instant, one learner trains
and publishes. Lengths are log-normal; a few groups are long: one of their samples runs into the
generation cap, at twenty times the mean length. The unit of time is that mean. Columns:

rate        batches per time, as a share of what the slower of the learner alone and the
            generators alone would reach
ceiling     the batch time that cannot be beaten without bias, (slowest group + training +
            publication) / (S + 1) or that of the slower part alone, over the one measured
long        share of long groups among those trained over their share among those that pass
staleness   mean over trained groups, in batches
stale       groups lost per trained group

    python -m tests.benchmarks.bench_admission [--batches 600]
"""

import argparse
import heapq
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from learner.admission import Admission, Group, Train


@dataclass(frozen=True)
class Setting:
    """Times in mean sample lengths."""

    batch_groups: int = 16
    samples: int = 8
    sigma: float = 0.5
    long_share: float = 0.07
    cap: float = 20.0
    filter_rate: float = 0.4
    slots: int = 96
    train: float = 3.8
    publish: float = 0.2


class Dropping(Admission):
    """Never holds: what is overtaken and too late is lost. For comparison only."""

    def _overtaken(self, ahead: Iterable[Group]) -> list[Group]:
        return []


@dataclass
class Rollout:
    ordinal: int
    lengths: list[float]
    long: bool
    passes: bool
    remaining: int = 0
    oldest: int = 0
    cancelled: bool = False


@dataclass(frozen=True)
class Result:
    rate: float
    batch_time: float
    long_ratio: float
    staleness: float
    stale_per_trained: float


def draw(ordinal: int, setting: Setting, rng: random.Random) -> Rollout:
    mu = -(setting.sigma**2) / 2  # mean 1
    lengths = [
        min(setting.cap, rng.lognormvariate(mu, setting.sigma)) for _ in range(setting.samples)
    ]
    long = rng.random() < setting.long_share
    if long:
        lengths[0] = setting.cap
    return Rollout(ordinal, lengths, long, rng.random() >= setting.filter_rate)


def generators_alone(setting: Setting, groups: int = 4000, seed: int = 1) -> float:
    """Batches per time with an endless stream of prompts and nobody to wait for."""
    rng = random.Random(seed)
    busy: list[float] = []
    accepted, now = 0, 0.0
    for ordinal in range(groups):
        while len(busy) > setting.slots - setting.samples:
            now = heapq.heappop(busy)
        rollout = draw(ordinal, setting, rng)
        accepted += rollout.passes
        for length in rollout.lengths:
            heapq.heappush(busy, now + length)
    return accepted / setting.batch_groups / now


@dataclass
class Pipeline:
    """The pool, the learner and the rule between them."""

    setting: Setting
    admission: Admission
    rng: random.Random
    unclaimed_limit: int = 4
    now: float = 0.0
    idle: bool = True
    free: int = 0
    events: list[tuple[float, str, int]] = field(default_factory=list)
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    stream: deque[int] = field(default_factory=deque)
    started: int = 0
    passing: int = 0
    passing_long: int = 0
    trained_at: list[float] = field(default_factory=list)
    trained_long: int = 0
    staleness: int = 0
    stale: int = 0

    def __post_init__(self) -> None:
        self.free = self.setting.slots

    def after(self, delay: float, kind: str, ordinal: int = -1) -> None:
        heapq.heappush(self.events, (self.now + delay, kind, ordinal))

    def run(self, batches: int) -> None:
        self.act()
        while len(self.trained_at) < batches:
            self.now, kind, ordinal = heapq.heappop(self.events)
            if kind == "sample":
                if not self.sample_done(self.rollouts.get(ordinal)):
                    continue
            elif kind == "trained":
                self.admission.trained()
                self.trained_at.append(self.now)
                self.after(self.setting.publish, "published")
            else:
                self.admission.publish(self.admission.version, self.stream)
                self.idle = True
            self.act()

    def sample_done(self, rollout: Rollout | None) -> bool:
        """Whether this may have changed what can be done next."""
        if rollout is None:
            return False  # cancelled, its slots are free already
        self.free += 1
        rollout.remaining -= 1
        if rollout.remaining:
            return bool(self.stream) and self.free >= self.setting.samples
        self.admission.observe(rollout.ordinal, rollout.oldest)
        self.admission.verdict(rollout.passes)
        if rollout.passes:
            self.admission.accept(rollout.ordinal, rollout.oldest)
        else:
            self.admission.close(rollout.ordinal)
            del self.rollouts[rollout.ordinal]
        return True

    def act(self) -> None:
        for ordinal in self.admission.lost():
            self.admission.close(ordinal)
            self.stale += 1
            self.free += self.rollouts.pop(ordinal).remaining
            if ordinal in self.stream:
                self.stream.remove(ordinal)
        if self.idle and isinstance(decision := self.admission.decide(), Train):
            for ordinal in decision.ordinals:
                rollout = self.rollouts.pop(ordinal)
                self.trained_long += rollout.long
                self.staleness += self.admission.version - rollout.oldest
            self.admission.begin(decision.ordinals)
            self.idle = False
            self.after(self.setting.train, "trained")
        self.dispatch_and_claim()

    def dispatch_and_claim(self) -> None:
        claimed = True
        while claimed:
            for _ in range(self.admission.can_dispatch(len(self.stream), self.unclaimed_limit)):
                rollout = draw(self.started, self.setting, self.rng)
                self.admission.dispatch(rollout.ordinal)
                self.rollouts[rollout.ordinal] = rollout
                self.stream.append(rollout.ordinal)
                self.started += 1
                self.passing += rollout.passes
                self.passing_long += rollout.passes and rollout.long
            claimed = False
            while self.stream and self.free >= self.setting.samples:
                rollout = self.rollouts[self.stream.popleft()]
                self.admission.claim(rollout.ordinal)
                rollout.oldest = self.admission.published
                rollout.remaining = self.setting.samples
                self.free -= self.setting.samples
                for length in rollout.lengths:
                    self.after(length, "sample", rollout.ordinal)
                claimed = True


def simulate(
    max_staleness: int,
    rule: type[Admission] = Admission,
    oversample: float = 1.0,
    setting: Setting | None = None,
    batches: int = 300,
    seed: int = 0,
) -> Result:
    """One run; the first tenth of the batches is left out of the rate."""
    setting = setting or Setting()
    admission = rule(setting.batch_groups, max_staleness, oversample)
    pipeline = Pipeline(setting, admission, random.Random(seed))
    pipeline.run(batches)
    warm = batches // 10
    times = pipeline.trained_at
    batch_time = (times[-1] - times[warm]) / (len(times) - 1 - warm)
    alone = min(1 / (setting.train + setting.publish), generators_alone(setting))
    trained = batches * setting.batch_groups
    return Result(
        rate=1 / batch_time / alone,
        batch_time=batch_time,
        long_ratio=(pipeline.trained_long / trained) / (pipeline.passing_long / pipeline.passing),
        staleness=pipeline.staleness / trained,
        stale_per_trained=pipeline.stale / trained,
    )


def slowest_group(setting: Setting, groups: int, seed: int = 2) -> float:
    """Mean over draws of the slowest of so many groups."""
    rng = random.Random(seed)
    draws = 500
    return (
        sum(max(max(draw(0, setting, rng).lengths) for _ in range(groups)) for _ in range(draws))
        / draws
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=600)
    batches = parser.parse_args().batches
    setting = Setting()
    learner = 1 / (setting.train + setting.publish)
    generators = generators_alone(setting)
    print(
        f"B = {setting.batch_groups}, n = {setting.samples}, filter {setting.filter_rate}, "
        f"{setting.long_share:.0%} of the groups with a sample {setting.cap:g} times as long; "
        f"batches per time: learner alone {learner:.3f}, generators alone {generators:.3f}"
    )
    slowest = slowest_group(setting, setting.batch_groups)
    print("rule             S   rate  ceiling   long  staleness  stale")
    for name, rule, oversample in (
        ("hold", Admission, 1.0),
        ("drop", Dropping, 1.0),
        ("hold, over 1.5", Admission, 1.5),
    ):
        for bound in (0, 1, 4, 8):
            result = simulate(bound, rule, oversample, setting, batches)
            hold = (slowest + setting.train + setting.publish) / (bound + 1)
            floor = max(hold, 1 / learner, 1 / generators)
            print(
                f"{name:<14} {bound:>3} {result.rate:>6.2f} {floor / result.batch_time:>8.2f} "
                f"{result.long_ratio:>6.2f} {result.staleness:>10.2f} "
                f"{result.stale_per_trained:>6.2f}"
            )


if __name__ == "__main__":
    main()
