"""The page of a report: one HTML file that needs no network, no script and no server.

Curves are SVG inside it. Whatever a model, a data file or a configuration wrote is escaped by the
template, and the page's own policy forbids scripts besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from common.curves import panel_svgs
from common.history import History
from common.ledger import FATES
from common.report_tables import headline, show, span, tables
from common.rollout_log import Group, read_rollouts
from common.rollout_view import Order, Sample, Wanted, facts, heading, printable, select

GROUPS_READ = 500
"""Kept groups, from the newest on, among which samples to show are looked for."""
SHOWN = 3
"""Samples of each kind."""
LONGEST = 20_000
"""Characters of a text that are shown."""
TOLD = ("Result", "Groups")
"""Tables that the page has in another form."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Card:
    """One sample to read."""

    heading: str
    facts: list[tuple[str, str]]
    prompt: str
    response: str
    outcome: str


def page(run_dir: Path, history: History, figures: Figures) -> str:
    """The HTML of a run's report; `figures` are those of `common.report.summary`."""
    svgs = panel_svgs(history, figures["staleness_bound"])
    config = run_dir / "config.toml"
    return _template().render(
        run=figures["run"],
        complete=figures["complete"],
        headline=headline(figures),
        tiles=tiles(figures),
        panels=[(title, Markup(svg)) for title, svg in svgs],
        tables=[table for table in tables(figures) if table[0] not in TOLD],
        ledger=_ledger(figures),
        balanced=figures["balanced"],
        evaluations=[_evaluation(row) for row in figures["evaluations"]],
        samples=_samples(list(islice(read_rollouts(run_dir), GROUPS_READ))),
        config=config.read_text() if config.exists() else "",
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("common"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")


def tiles(figures: Figures) -> list[tuple[str, str, str]]:
    """(name, value, detail) of what is asked first."""
    planned = figures["batches_planned"]
    bound, worst = figures["staleness_bound"], figures["max_staleness"]
    made = figures["tokens_generated_per_second"]
    trained, filtered = figures["fates"]["trained"], figures["filtered_groups"]
    return [
        ("Held-out accuracy", _change(figures), _errors(figures)),
        ("Batches", show(figures["batches"]), "" if planned is None else f"of {planned:,} planned"),
        ("Time", span(figures["seconds"]), f"{show(figures.get('batches_per_hour'))} batches/h"),
        ("Groups trained", show(trained), f"{filtered:,} filtered"),
        ("Tokens per second", show(figures.get("tokens_trained_per_second")),
         f"trained; {show(made)} generated"),
        ("Worst staleness", show(worst), "" if bound is None else f"versions; bound {bound}"),
        ("Log-prob gap", show(figures["logprob_gap_mean_max"]), "worst batch mean"),
        ("Ledger", "balanced" if figures["balanced"] else "NOT balanced",
         f"{figures['in_flight_groups']:,} groups in flight"),
    ]  # fmt: skip


def _change(figures: Figures) -> str:
    ends = [figures["accuracy_before"], figures["accuracy_after"]]
    return " → ".join("–" if value is None else f"{value:.1%}" for value in ends)


def _errors(figures: Figures) -> str:
    ends = [figures["accuracy_before_error"], figures["accuracy_after_error"]]
    known = [f"± {value:.1%}" for value in ends if value is not None]
    return "standard error " + ", ".join(known) if known else "before → after"


def _ledger(figures: Figures) -> list[tuple[str, str, float]]:
    """(name, groups, share of all) of every fate, and of what has none yet."""
    counts: dict[str, int] = {fate: figures["fates"][fate] for fate in FATES}
    counts["in flight"] = figures["in_flight_groups"]
    total = sum(counts.values()) or 1
    return [(name, f"{count:,}", count / total) for name, count in counts.items()]


def _evaluation(row: dict[str, Any]) -> dict[str, str]:
    """A line of the table of evaluations, by column."""
    error, truncated = row["standard_error"], row["truncated_share"]
    spread = "" if error is None else f" ± {error:.1%}"
    accuracy = row["accuracy"]
    columns = {
        "when": str(row["label"]),
        "version": show(row["version"]),
        "accuracy": "–" if accuracy is None else f"{accuracy:.1%}{spread}",
        "pass@k": _percent(row["pass_at_k"]),
        "majority": _percent(row["majority"]),
        "problems": show(row["problems"]),
        "samples": show(row["samples"]),
        "cut off": _percent(truncated),
        "no answer": _percent(row["no_answer_share"]),
    }
    return columns


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, int | float) else "–"


def _samples(groups: list[Group]) -> list[tuple[str, list[Card]]]:
    """Title and cards of each kind of sample that there is."""
    kinds: list[tuple[str, Wanted, Order]] = [
        ("Best reward", Wanted(fate="trained"), "best"),
        ("Worst reward of responses that ended", Wanted("trained", truncated=False), "worst"),
        ("Cut off at the length cap", Wanted(truncated=True), "newest"),
        ("Of groups that were filtered", Wanted(fate="filtered"), "newest"),
        ("Of groups that failed", Wanted(fate="failed"), "newest"),
    ]
    found = ((title, _one_of_each(select(groups, wanted, order))) for title, wanted, order in kinds)
    return [(title, [card(sample) for sample in samples]) for title, samples in found if samples]


def _one_of_each(samples: list[Sample]) -> list[Sample]:
    """The first sample of each group, of the first few groups."""
    groups: dict[Any, Sample] = {}
    for sample in samples:
        groups.setdefault((sample["version"], sample.get("group")), sample)
    return list(groups.values())[:SHOWN]


def card(sample: Sample) -> Card:
    """A sample as the page shows it."""
    known = [(name, printable(value)) for name, value in facts(sample)]
    prompt, response = (_cut(printable(str(sample.get(key) or ""))) for key in ("prompt", "text"))
    return Card(printable(heading(sample)), known, prompt, response, str(sample.get("outcome")))


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}\n… {len(text) - LONGEST:,} characters more: dapo rollouts"
