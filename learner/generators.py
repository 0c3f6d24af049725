"""What the learner makes of the generators' reports: signs of life of groups, and their pace."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from learner.groups import OpenGroup

Reports = Mapping[str, Mapping[str, Any]]
"""What each member reported last, by its name (`Broker.reports`); those of the dead stay."""


class Pace(NamedTuple):
    """Of all living generators: samples running now, and tokens per second of late."""

    running: int = 0
    tokens_per_s: float = 0.0


def pace(reports: Reports, living: Collection[str]) -> Pace:
    """The sum over those that live."""
    theirs = [reports[name] for name in living if name in reports]
    return Pace(
        sum(report.get("running", 0) for report in theirs),
        sum(report.get("tokens_per_second", 0.0) for report in theirs),
    )


def hear(waiting: Mapping[str, OpenGroup], reports: Reports, now: float) -> None:
    """Note for each group that waits for tokens when it last got any.

    A figure that has not changed is no sign of life: a dead generator leaves its last one behind.
    """
    for member, report in reports.items():
        for gid, tokens in report.get("progress", {}).items():
            group = waiting.get(gid)
            if group is not None and group.tokens.get(member) != tokens:
                group.tokens[member], group.since = tokens, now


def silent(waiting: Mapping[str, OpenGroup], now: float, limit_s: float) -> list[str]:
    """Groups without a new token for so long. It is not about elapsed time: a long response is no
    fault, and a limit on it would cut the share of long groups."""
    return [gid for gid, group in waiting.items() if now - group.since > limit_s]
