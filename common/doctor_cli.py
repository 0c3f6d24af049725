"""The command `dapo doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from common.config import load_config
from common.doctor import examine
from common.finding import Site
from common.options import Sets


def doctor(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="TOML file: also look at its server and run.dir."),
    ] = None,
    set_: Sets = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check what is installed on this machine, and whether it works.

    One line for each: ok, note or FAULT. A server, a lock and a collective of two processes are
    really tried; nothing is left running. Exit status 1 if there is a FAULT.

    `dapo run RECIPE --dry-run` checks the recipe itself.

    \b
      dapo doctor
      dapo doctor mine.toml
    """
    config = load_config(recipe, set_) if recipe else None
    site = Site(config.run.dir if config else Path("runs"), config)
    findings = []
    for finding in examine(site):
        findings.append(finding)
        if not json_:
            typer.echo(finding.line())
    faults = [finding.name for finding in findings if finding.state == "FAULT"]
    if json_:
        rows = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"healthy": not faults, "findings": rows}))
    raise typer.Exit(1 if faults else 0)
