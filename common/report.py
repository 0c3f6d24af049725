"""The end report of a run directory: figures, a table, curves and a page, with no server and no
torch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from common.audit import audit, run_settings
from common.history import History, Row, finite, number, read_history
from common.report_tables import as_text


def write_report(run_dir: Path) -> Path:
    """Write `report/` in the run directory, and return that folder.

    index.html (`common.report_page`), summary.json (`summary`), report.txt, curves.png and
    accuracy.png; files of an earlier report are replaced.

    Raises:
        ConfigError: there is no such run directory, or its config.toml cannot be read.
        CheckpointError: the ledger or a batch file is damaged.
    """
    # matplotlib takes half a second to load, and only this needs it
    from common.curves import accuracy_figure, curves_figure, save
    from common.report_page import page

    history = read_history(run_dir)
    figures = _summary(run_dir, history)
    folder = run_dir / "report"
    folder.mkdir(exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    (folder / "report.txt").write_text(as_text(figures))
    bound = figures["staleness_bound"]
    save(curves_figure(history, figures["run"], bound), folder / "curves.png")
    save(accuracy_figure(history, figures["run"]), folder / "accuracy.png")
    (folder / "index.html").write_text(page(run_dir, history, figures), errors="replace")
    return folder


def summary(run_dir: Path) -> dict[str, Any]:
    """The figures of a run; null for what it has not measured. `write_report` tells what raises.

    Seconds are from the first to the last row of the metrics; rates are over the time from the
    beginning of the first batch to the end of the last, pauses of a restart included.
    """
    return _summary(run_dir, read_history(run_dir))


def _summary(run_dir: Path, history: History) -> dict[str, Any]:
    settings = run_settings(run_dir)
    balance = audit(run_dir, None)
    batches = history.batches
    before, after = history.evaluation("before"), history.evaluation("after")
    return {
        "run": settings.get("run", {}).get("name", run_dir.name),
        "complete": balance.complete,
        "batches": batches[-1]["step"] if batches else 0,
        "batches_planned": settings.get("run", {}).get("batches"),
        "seconds": round(history.seconds, 3),
        "accuracy_before": number(before, "accuracy"),
        "accuracy_before_error": number(before, "standard_error"),
        "accuracy_after": number(after, "accuracy"),
        "accuracy_after_error": number(after, "standard_error"),
        "evaluations": [_evaluation(row) for row in history.evals],
        "max_staleness": _whole(max(finite(batches, "staleness_max"), default=None)),
        "staleness_bound": settings.get("admission", {}).get("max_staleness"),
        "multi_version_samples": int(sum(finite(batches, "multi_version_samples"))),
        "batch_groups_min": _whole(min(finite(batches, "groups"), default=None)),
        "batch_groups_max": _whole(max(finite(batches, "groups"), default=None)),
        "fates": balance.fates,
        "filtered_groups": balance.filtered,
        "in_flight_groups": balance.in_flight,
        "balanced": balance.balanced,
        **_learning(batches),
        **_gaps(history),
        **_time(history, settings.get("algorithm", {}).get("group_size")),
    }


def _evaluation(row: Row) -> dict[str, Any]:
    keys = (
        *("label", "accuracy", "standard_error", "accuracy_interval", "pass_at_k", "pass_at"),
        *("majority", "problems", "samples", "truncated_share", "no_answer_share", "versions"),
        "files",
    )
    return {"version": row["step"]} | {key: row.get(key) for key in keys}


def _learning(batches: list[Row]) -> dict[str, Any]:
    """Figures of learning: the mean over the first and the last tenth of the batches."""
    tenth = max(1, len(batches) // 10)
    names = {
        "accuracy_raw": "accuracy_per_batch",
        "acceptance": "acceptance",
        "reward_raw": "reward",
        "length_mean_raw": "length",
        "truncated_share": "at_cap_share",
        "entropy": "entropy",
    }
    figures: dict[str, Any] = {}
    for key, name in names.items():
        figures[f"{name}_first"] = _mean(finite(batches[:tenth], key))
        figures[f"{name}_last"] = _mean(finite(batches[-tenth:], key))
    figures["length_generated"] = _mean(finite(batches, "length_mean_raw"))
    figures["length_trained"] = _mean(finite(batches, "length_mean"))
    return figures


def _gaps(history: History) -> dict[str, Any]:
    """How far engine and learner were apart; batches without a token of their version say nothing.

    A round that failed, or whose members all came too late, has no probe to compare.
    """
    measured = [row for row in history.batches if number(row, "gap_tokens") != 0]
    probed = [row for row in history.rounds if row.get("members")]
    return {
        "logprob_gap_mean_max": max(finite(measured, "gap_mean"), default=None),
        "logprob_gap_max": max(finite(measured, "gap_max"), default=None),
        "probe_gap_max": max(finite(probed, "probe_gap"), default=None),
        "rounds": len(history.rounds),
        "rounds_failed": sum(bool(row.get("failed")) for row in history.rounds),
    }


def _time(history: History, group_size: int | None) -> dict[str, Any]:
    """Seconds by phase, tokens, rates, and who made the samples that were trained."""
    batches, phases = history.batches, history.phases
    seconds = 0.0
    if batches:
        seconds = batches[-1]["time"] - batches[0]["time"] + sum(phases[0])
    trained = sum(finite(batches, "tokens_trained"))
    judged = None
    if group_size:
        judged = sum(
            (number(row, "length_mean_raw") or 0.0) * (number(row, "groups_judged") or 0.0)
            for row in batches
        )
        judged = round(judged * group_size)
    samples: Counter[str] = Counter()
    for row in batches:
        samples.update(row.get("by_generator") or {})
    return {
        "seconds_training": round(seconds, 3),
        "phases_s": {
            "wait": round(sum(phase.wait for phase in phases), 3),
            "train": round(sum(phase.train for phase in phases), 3),
            "publish": round(sum(phase.publish for phase in phases), 3),
        },
        "tokens_trained": int(trained),
        "tokens_generated": judged,
        "tokens_trained_per_second": _rate(trained, seconds),
        "tokens_generated_per_second": _rate(judged, seconds),
        "samples_trained_per_second": _rate(sum(finite(batches, "samples")), seconds),
        "batches_per_hour": _rate(len(batches) * 3600, seconds),
        "samples_by_generator": dict(sorted(samples.items())),
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 6) if values else None


def _rate(amount: float | None, seconds: float) -> float | None:
    return round(amount / seconds, 3) if amount is not None and seconds > 0 else None
