"""The figures of a report in words: the same tables for a terminal and for the page."""

from __future__ import annotations

from typing import Any

DASH = "–"
Rows = list[tuple[str, str]]


def as_text(figures: dict[str, Any]) -> str:
    """The figures of `summary` as a table for reading."""
    lines = [headline(figures)]
    if not figures["batches"]:
        lines.append("No batch has been trained yet: there is nothing to say about learning.")
    for title, rows in tables(figures):
        lines += ["", title, *(f"  {name:<34}  {value}" for name, value in rows)]
    return "\n".join(lines) + "\n"


def headline(figures: dict[str, Any]) -> str:
    """Which run, how far it is, and how long it took."""
    planned = figures["batches_planned"]
    of = f" of {planned}" if planned is not None else ""
    state = "complete" if figures["complete"] else "not complete"
    head = f"Run {figures['run']}: {figures['batches']}{of} batches in {span(figures['seconds'])}"
    return f"{head}, {state}"


def tables(figures: dict[str, Any]) -> list[tuple[str, Rows]]:
    """Title and rows of each table; a row without a name says what the values below are."""
    made = [("Result", _result_rows(figures)), ("Groups", _group_rows(figures))]
    if figures["batches"]:
        made.insert(1, ("Learning", _learning_rows(figures)))
        made += [("Policy versions", _version_rows(figures)), ("Time", _time_rows(figures))]
    return made


def _result_rows(figures: dict[str, Any]) -> Rows:
    rows = []
    for when in ("before", "after"):
        accuracy = show(figures[f"accuracy_{when}"])
        error = figures[f"accuracy_{when}_error"]
        rows.append((f"held-out accuracy {when}", accuracy + (f" ± {error:.3f}" if error else "")))
    return rows


def _learning_rows(figures: dict[str, Any]) -> Rows:
    """First and last tenth of the run, side by side."""
    names = {
        "accuracy_per_batch": "accuracy before the filter",
        "acceptance": "share of groups accepted",
        "reward": "shaped reward",
        "length": "response length, tokens",
        "at_cap_share": "share at the cap",
        "entropy": "entropy, nats",
    }
    rows = [("", "first and last tenth of the batches")]
    for key, name in names.items():
        first, last = figures[f"{key}_first"], figures[f"{key}_last"]
        rows.append((name, f"{show(first)} → {show(last)}"))
    lengths = f"{show(figures['length_generated'])} / {show(figures['length_trained'])}"
    return [*rows, ("length, generated / trained", lengths)]


def _group_rows(figures: dict[str, Any]) -> Rows:
    rows = [(fate, f"{count:,}") for fate, count in figures["fates"].items()]
    rows.append(("in flight", f"{figures['in_flight_groups']:,}"))
    rows.append(("every group has one fate", "yes" if figures["balanced"] else "NO: dapo audit"))
    least, most = figures["batch_groups_min"], figures["batch_groups_max"]
    return [*rows, ("groups in a batch, least / most", f"{show(least)} / {show(most)}")]


def _version_rows(figures: dict[str, Any]) -> Rows:
    worst, bound = figures["max_staleness"], figures["staleness_bound"]
    return [
        ("staleness, worst / bound", f"{show(worst)} / {show(bound)}"),
        ("samples of several versions", f"{figures['multi_version_samples']:,}"),
        ("log-prob gap, worst batch mean", show(figures["logprob_gap_mean_max"])),
        ("log-prob gap, worst token", show(figures["logprob_gap_max"])),
        ("probe gap, worst round", show(figures["probe_gap_max"])),
    ]


def _time_rows(figures: dict[str, Any]) -> Rows:
    phases = figures["phases_s"]
    total = sum(phases.values()) or 1.0
    rows = [
        (f"seconds, {name}", f"{seconds:,.1f} ({seconds / total:.0%})")
        for name, seconds in phases.items()
    ]
    rate = show(figures["tokens_generated_per_second"])
    rows.append(("tokens/s generated", rate))
    rows.append(("tokens/s trained", show(figures["tokens_trained_per_second"])))
    rows.append(("tokens trained", f"{figures['tokens_trained']:,}"))
    rows.append(("batches per hour", show(figures["batches_per_hour"])))
    made = figures["samples_by_generator"].items()
    return rows + [(f"samples of {name}", f"{count:,}") for name, count in made]


def show(value: float | None) -> str:
    """A number with the digits that matter."""
    if value is None:
        return DASH
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    if abs(value) < 0.1:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def span(seconds: float) -> str:
    """A duration in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
