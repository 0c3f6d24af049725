"""The command `dapo status`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from common.audit import has_ended
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
    run: Annotated[str | None, typer.Option("--run", help="Name of the run on the server.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Every second until the end.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show who is alive, what the run waits for, and one verdict on what holds it up.

    The verdict names the bottleneck, the figure that shows it, and the knob to turn. Exit status 1
    if the run has stalled.
    """
    folder, url, name = target_of(target, run)

    def look() -> dict[str, Any]:
        batch = last_row(folder, "batch") if folder else None
        return overview(name, read_status(url, name), batch, bool(folder and has_ended(folder)))

    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(markup=False, width=WIDTH)
    page = _follow(look, console, json_) if watch else look()
    if not watch:
        typer.echo(json.dumps(page)) if json_ else console.print(render(page))
    raise typer.Exit(1 if page["verdict"] == "stalled" else 0)


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
