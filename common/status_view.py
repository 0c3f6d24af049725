"""The page of `dapo status` for a terminal of 100 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from common.display import DASH, show, span

COLOURS = {"healthy": "green", "ended": "green", "starting": "cyan", "stalled": "red"}
MEMBERS_SHOWN = 12
QUIET_S = 600.0
"""An error that is older is not shown any more."""


def render(page: dict[str, Any]) -> RenderableType:
    """What `common.overview.overview` made, as a panel."""
    parts: list[RenderableType] = [_verdict(page), Text(), _members(page["members"])]
    parts += _errors(page["members"])
    parts += [Text(), _figures(page)]
    return Panel(Group(*parts), title=f"[bold]{page['run']}[/bold]", title_align="left")


def _verdict(page: dict[str, Any]) -> Text:
    colour = COLOURS.get(page["verdict"], "yellow")
    text = Text(page["verdict"].upper(), f"bold {colour}") + Text(f"  {page['figure']}")
    if page["knob"]:
        text += Text(f"\n→ {page['knob']}", colour)
    return text


def _members(members: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("member", "version", "lease", "rate", "time", "memory", "lag"):
        table.add_column(name, no_wrap=True)
    for row in members[:MEMBERS_SHOWN]:
        if not row["alive"]:
            last = f"last report {span(row['report_age_s'])} ago"
            table.add_row(row["name"], row["version"], Text("gone", "bold red"), "", last)
            continue
        version = str(row["version"] or ("no weights" if row["role"] == "generator" else ""))
        rate = f"{show(row['rate'])} {row['unit']}" if row["unit"] else ""
        table.add_row(
            row["name"], version, f"{row['lease_age_s']:.0f} s old", rate, _largest(row["shares"]),
            f"{show(row['rss_mib'])} MiB", f"{show(row['lag_s'])} s",
        )  # fmt: skip
    if len(members) > MEMBERS_SHOWN:
        table.add_row(Text(f"and {len(members) - MEMBERS_SHOWN} more", "dim"))
    if not members:
        table.add_row(Text("nobody holds a lease", "yellow"))
    return table


def _errors(members: list[dict[str, Any]]) -> list[Text]:
    """The last error of each member that had one lately."""
    return [
        Text(
            f"{row['name']}, {span(row['last_error_age_s'])} ago: {row['last_error']}",
            "red",
            overflow="ellipsis",
            no_wrap=True,
        )  # fmt: skip
        for row in members
        if row["last_error_age_s"] is not None and row["last_error_age_s"] < QUIET_S
    ][:MEMBERS_SHOWN]


def _figures(page: dict[str, Any]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    trained, since = page["batches"]["trained"], page["since_progress_s"]
    ago = f", last progress {span(since)} ago" if since is not None else ""
    published = f", version {page['published']} is published" if page["published"] else ""
    planned = show(page["batches"]["planned"])
    table.add_row("batches", f"{trained:,} of {planned} trained{ago}{published}")
    if page["waiting_for"]:
        table.add_row("waiting for", page["waiting_for"])
    if page["groups"]:
        table.add_row("groups", f"{_counts(page['groups'])} (limit {show(page['capacity'])})")
    if page["fates"]:
        table.add_row("fates", _counts(page["fates"]))
    if page["queues"]:
        table.add_row("queues", _counts(page["queues"]))
    worst, bound = page["staleness"]["max"], page["staleness"]["bound"]
    stale = f"{show(page['staleness']['mean'])} mean, {show(worst)} worst, bound {show(bound)}"
    table.add_row("accept rate", _share(page["acceptance"]))
    table.add_row("staleness", stale)
    rates = page["tokens_per_second"]
    table.add_row(
        "tokens/s", f"{show(rates['generated'])} generated, {show(rates['trained'])} trained"
    )
    for name, shares in page["shares"].items():
        if shares:
            table.add_row(f"{name} time" if name == "learner" else f"{name}' time", _split(shares))
    return table


def _largest(shares: Mapping[str, float]) -> str:
    """`generating 83%`, what a member does most."""
    if not shares:
        return DASH
    name = max(shares, key=lambda state: shares[state])
    return f"{name} {shares[name]:.0%}"


def _split(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.0%} {name}" for name, share in shares.items())


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{show(count)} {name}" for name, count in counts.items())


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"
