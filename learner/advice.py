"""Simulated runs over bounds and numbers of generators: a table, and what to choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from learner.limits import (
    generators_alone,
    learner_alone,
    synchronous_loop,
    waiting_for_all,
)
from learner.simulation import Result, Setting, simulate

NEARLY = 0.95
"""Share of the best rate above which a smaller bound, or fewer generators, are as good."""
BIASED = 0.9
"""Long groups trained at less than this share of their own are called a bias."""
GROUPS = 6000
"""Groups trained in a simulation, by default: enough for two digits."""


@dataclass(frozen=True)
class Row:
    """One simulated run.

    `share` is its rate as a share of what the slower of learner and generators would reach alone;
    `ceiling` the same for the limit that no bias sets (`waiting_for_all`).
    """

    generators: int
    max_staleness: int
    batches_per_hour: float
    share: float
    ceiling: float
    result: Result


@dataclass(frozen=True)
class Table:
    """Simulated runs of a setting. `synchronous` and the limits `alone` are batches per hour, by
    number of generators."""

    setting: Setting
    rows: list[Row]
    learner_alone: float
    generators_alone: dict[int, float]
    synchronous: dict[int, float]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"advice": advise(self)}


def simulate_table(
    setting: Setting, bounds: Iterable[int], generators: Iterable[int],
    batches: int | None = None, seed: int = 0, tell: Callable[[str], None] = lambda text: None,
) -> Table:  # fmt: skip
    """Simulate each bound with each number of generators; `batches` None: `GROUPS` in all.

    `tell` is told of each run when it begins.
    """
    table = Table(setting, [], _per_hour(learner_alone(setting)), {}, {})
    bounds = sorted(set(bounds))
    for count in sorted(set(generators)):
        mine = replace(setting, generators=count)
        alone = max(learner_alone(mine), generators_alone(mine))
        table.generators_alone[count] = _per_hour(generators_alone(mine))
        table.synchronous[count] = _per_hour(synchronous_loop(mine))
        for bound in bounds:
            tell(f"simulating S = {bound} with {_count(count)}")
            length = batches or max(20 + 2 * bound, GROUPS // setting.batch_groups)
            result = simulate(mine, bound, length, seed)
            ceiling = alone / max(alone, waiting_for_all(mine, bound))
            rate, share = _per_hour(result.batch_s), alone / result.batch_s
            table.rows.append(Row(count, bound, rate, share, ceiling, result))
    return table


def _per_hour(seconds: float) -> float:
    return 3600.0 / seconds


def advise(table: Table) -> str:
    """Which bound and how many generators: the fewest generators, then the smallest bound, whose
    rate is nearly the best of the table."""
    best = max(row.batches_per_hour for row in table.rows)
    good = [row for row in table.rows if row.batches_per_hour >= NEARLY * best]
    row = min(good, key=lambda row: (row.generators, row.max_staleness))
    gain = row.batches_per_hour / table.synchronous[row.generators]
    parts = [
        f"Choose S = {row.max_staleness} with {_count(row.generators)}: "
        f"{row.batches_per_hour:,.1f} batches per hour, {gain:.1f} times a synchronous loop, at a "
        f"mean staleness of {row.result.staleness_mean:.1f}",
        _limit(table, row),
    ]
    if row.result.long_ratio < BIASED:
        parts.append(
            f"but long groups are trained at {row.result.long_ratio:.2f} of their share: the "
            "policy `hold` has no such bias"
        )
    return "; ".join(parts) + "."


def _limit(table: Table, row: Row) -> str:
    """What a higher rate would take."""
    if row.share >= NEARLY:
        if table.learner_alone <= table.generators_alone[row.generators]:
            return "the learner is the limit, and more generators would not help"
        return "the generators are the limit, and more of them would help"
    return (
        f"that is {row.share:.0%} of what learner and generators could do, the rest is waiting "
        "for slow groups: a larger S, or shorter responses, would help"
    )


def _count(generators: int) -> str:
    return f"{generators} generator{'s' * (generators > 1)}"


COLUMNS = (
    ("generators", 10), ("S", 4), ("batches/h", 10), ("share", 6), ("ceiling", 8),
    ("learner", 8), ("gen. busy", 10), ("staleness", 10), ("worst", 6), ("long", 6), ("stale", 6),
)  # fmt: skip


def as_text(table: Table) -> str:
    """The table for reading, its legend, and the advice."""
    setting = table.setting
    lines = [
        f"B = {setting.batch_groups} groups of {setting.group_size} samples, "
        f"{setting.filter_rate:.0%} filtered, policy {setting.policy}, oversample "
        f"{setting.oversample:g}; {setting.slots} samples per generator at once; training "
        f"{setting.train_s:g} s, publication {setting.publish_s:g} s",
        f"learner alone {table.learner_alone:,.1f} batches/h; generators alone "
        + ", ".join(f"{rate:,.1f} with {n}" for n, rate in table.generators_alone.items()),
        "",
        " ".join(f"{name:>{width}}" for name, width in COLUMNS),
    ]
    shown: set[int] = set()
    for row in table.rows:
        if row.generators not in shown:
            shown.add(row.generators)
            lines.append(_line(row.generators, "sync", table.synchronous[row.generators]))
        lines.append(_line(row.generators, row.max_staleness, row.batches_per_hour, row))
    return "\n".join([*lines, "", LEGEND, "", advise(table)])


def _line(generators: int, bound: int | str, rate: float, row: Row | None = None) -> str:
    cells = [str(generators), str(bound), f"{rate:,.1f}"]
    if row:
        result = row.result
        cells += [f"{row.share:.2f}", f"{row.ceiling:.2f}", f"{result.learner_busy:.0%}",
                  f"{result.generators_busy:.0%}", f"{result.staleness_mean:.2f}",
                  str(result.staleness_max), f"{result.long_ratio:.2f}",
                  f"{result.stale:.2f}"]  # fmt: skip
    widths = (width for _, width in COLUMNS)
    return " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))


LEGEND = """\
sync       a synchronous loop that waits for every sample of a batch
share      rate as a share of the slower of learner and generators alone
ceiling    the most that share can be without bias: batch time is at least
           (slowest group + training + publication) / (S + 1)
learner    share of the time that the learner trains or publishes
gen. busy  share of the generators' slots in use
staleness  mean over trained groups, in batches; then the worst
long       share of long groups among those trained over their share in the data: 1 is no bias
stale      groups lost per group trained"""
