"""The command `dapo status`."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.live import Live

from common.audit import audit, has_ended, run_settings
from common.errors import DapoError
from common.ledger import Fate
from common.metrics import last_row
from common.overview import overview
from common.status import read_status, target_of
from common.status_view import render

REFRESH_S = 1.0
WIDTH = 100
"""Columns where the output is no terminal."""


def status(
    target: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory, or redis:// address of a server.")
    ],
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="NAME", help="Name of the run, where RUN is a server of several."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Every second, until the run ends.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show who is alive, where the time goes, and what holds a run up.

    One verdict names the bottleneck, the figure that shows it, and the knob to turn. Exit status 1
    if the run has stalled.

    \b
      dapo status runs/latest --watch
      dapo status redis://10.0.0.1:6379/0 --run mine --json
    """
    folder, url, name = target_of(target, run)

    def look() -> dict[str, Any]:
        status = read_status(url, name)
        if folder is None:
            return overview(name, status, None)
        if "error" in status:
            status |= kept_on_disk(folder)
        return overview(name, status, last_row(folder, "batch"), has_ended(folder))

    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(markup=False, width=WIDTH)
    page = _follow(look, console, json_) if watch else look()
    if not watch:
        typer.echo(json.dumps(page)) if json_ else console.print(render(page))
    raise typer.Exit(1 if page["verdict"] == "stalled" else 0)


def kept_on_disk(folder: Path) -> dict[str, Any]:
    """What the learner would report if there were a server, as far as the run's directory says."""
    with contextlib.suppress(DapoError):
        settings, known = run_settings(folder), audit(folder, None)
        learner = {
            "batches": settings.get("run", {}).get("batches"),
            "max_staleness": settings.get("admission", {}).get("max_staleness"),
            "fates": {fate: getattr(known, fate) for fate in get_args(Fate)},
        }
        return {"reports": {"learner": learner}}
    return {}


def _follow(look: Callable[[], dict[str, Any]], console: Console, as_json: bool) -> dict[str, Any]:
    """Look again and again, until the run is over; returns the last page.

    A page in place on a terminal; elsewhere a line of JSON each second, or the verdict where it
    changes.
    """
    page, said = look(), ""
    if console.is_terminal and not as_json:
        with Live(render(page), console=console, auto_refresh=False) as live:
            while page["verdict"] != "ended":
                time.sleep(REFRESH_S)
                page = look()
                live.update(render(page), refresh=True)
        return page
    while True:
        if as_json:
            typer.echo(json.dumps(page))
        elif page["verdict"] != said:
            typer.echo(": ".join(filter(None, (page["verdict"], page["figure"], page["knob"]))))
        said = page["verdict"]
        if said == "ended":
            return page
        time.sleep(REFRESH_S)
        page = look()
