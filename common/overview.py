"""A run on one page, as plain values: what `dapo status` prints, with --json as it is.

Pure: made of what `common.status` read, and of the newest batch of metrics.jsonl where the run's
directory is at hand. A figure that nobody has reported yet is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.diagnosis import Diagnosis, diagnose, figures_of
from common.history import number

GONE_S = 600.0
"""A member that reported within it and holds no lease is shown as gone."""
RATES = {
    "generator": ("tokens_per_second", "tokens/s"),
    "verifier": ("groups_per_second", "groups/s"),
}
BATCH = (
    "accuracy_raw", "reward_raw", "length_mean_raw", "at_cap_share", "entropy", "gap_mean",
    "staleness_mean", "staleness_max", "tokens_per_second",
)  # fmt: skip

Status = Mapping[str, Any]


def overview(run: str, status: Status, batch: Status | None, ended: bool = False) -> dict[str, Any]:
    """The page; `ended` says that the run's directory marks the run as over."""
    figures, row = figures_of(status, batch), dict(batch or {})
    verdict = _without_server(status, ended) or diagnose(figures)
    learner = status.get("reports", {}).get("learner", {})
    return {
        "run": run,
        "verdict": verdict.verdict,
        "figure": verdict.figure,
        "knob": verdict.knob,
        "batches": {"trained": figures.batches, "planned": learner.get("batches")},
        "since_progress_s": figures.since_progress_s,
        "waiting_for": figures.waiting_for,
        "published": status.get("published"),
        "members": _members(status),
        "queues": status.get("streams", {}),
        "groups": dict(figures.groups),
        "capacity": learner.get("capacity"),
        "fates": learner.get("fates", {}),
        "acceptance": figures.acceptance,
        "staleness": {
            "mean": number(row, "staleness_mean"),
            "max": number(row, "staleness_max"),
            "bound": learner.get("max_staleness"),
        },
        "tokens_per_second": {
            "generated": _generated(status), "trained": _trained(learner, batch),
        },
        "shares": {
            "learner": dict(figures.learner),
            "generators": dict(figures.generators),
            "verifiers": dict(figures.verifiers),
        },
        "batch": {key: number(row, key) for key in BATCH},
    }  # fmt: skip


def _without_server(status: Status, ended: bool) -> Diagnosis | None:
    """The verdict where no server answers: that is how a run ends, and also how it breaks."""
    if "error" not in status:
        return None
    if ended:
        return Diagnosis("ended", "all batches are trained, and the server is gone")
    return Diagnosis("stalled", status["error"], "start the run again: it goes on where it was")


def _members(status: Status) -> list[dict[str, Any]]:
    """Who is alive by lease, and who reported lately and is not; by role and name."""
    living, reports = status.get("members", {}), status.get("reports", {})
    rows = []
    for name in living.keys() | reports.keys():
        report, lease = reports.get(name, {}), living.get(name)
        age = status["time"] - report["time"] if "time" in report else None
        if lease is None and (age is None or age > GONE_S):
            continue
        role = (lease or report).get("role", "?")
        key, unit = RATES.get(role, ("", ""))
        rows.append({
            "name": name, "role": role, "alive": lease is not None,
            "lease_age_s": lease["lease_age_s"] if lease else None, "report_age_s": age,
            "version": report.get("version"), "rate": report.get(key), "unit": unit,
            "shares": report.get("shares", {}), "rss_mib": report.get("rss_mib"),
            "lag_s": report.get("lag_s"), "errors": report.get("errors_logged", 0),
            "last_error": report.get("last_error", ""),
            "last_error_age_s": _age(status, report),
        })  # fmt: skip
    order = ("learner", "verifier", "generator")
    place = {role: index for index, role in enumerate(order)}
    return sorted(rows, key=lambda row: (place.get(row["role"], len(order)), row["name"]))


def _age(status: Status, report: Status) -> float | None:
    """Seconds since the last error; None if there was none."""
    when = report.get("last_error_time")
    return max(0.0, status["time"] - when) if when else None


def _generated(status: Status) -> float:
    """Tokens per second of all living generators, in the last second."""
    reports = status.get("reports", {})
    living = (n for n, m in status.get("members", {}).items() if m.get("role") == "generator")
    return sum(number(reports.get(name), "tokens_per_second") or 0.0 for name in living)


def _trained(learner: Status, batch: Status | None) -> float | None:
    """Tokens per second of the last batch; without the run's directory, since the learner began."""
    if batch is not None:
        return number(dict(batch), "tokens_per_second")
    spent = sum(learner.get("seconds", {}).values())
    tokens = number(dict(learner), "tokens_total")
    return tokens / spent if tokens is not None and spent else None
