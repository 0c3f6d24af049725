"""The command `dapo rollouts`."""

from __future__ import annotations

import json
import pydoc
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from common.errors import ConfigError
from common.rollout_log import kept_versions, read_rollouts
from common.rollout_view import Order, Wanted, as_text, select


def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/latest.")],
    version: Annotated[
        int | None, typer.Option(metavar="N", help="Only of the batch that made version N.")
    ] = None,
    fate: Annotated[
        Literal["trained", "filtered", "failed"] | None,
        typer.Option(metavar="FATE", help="Only trained, filtered or failed groups."),
    ] = None,
    outcome: Annotated[
        Literal["correct", "wrong", "no_answer", "error"] | None,
        typer.Option(
            metavar="OUTCOME",
            help="Only correct, wrong, no_answer or error, as the checker said.",
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The best sample of each group, best first.")
    ] = False,
    worst: Annotated[
        bool, typer.Option("--worst", help="The worst sample of each group, worst first.")
    ] = False,
    truncated: Annotated[
        bool, typer.Option("--truncated", help="Only responses that the cap cut off.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Show at most N samples.")] = 20,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Read samples: what was asked, answered, and made of it.

    A run keeps a few groups of each batch in RUN/rollouts (rollouts.per_batch), trained, filtered
    and failed ones. The newest batch comes first; on a terminal they are shown page by page.

    \b
      dapo rollouts runs/latest --worst
      dapo rollouts runs/latest --fate filtered --limit 5
    """
    if best and worst:
        raise ConfigError("--best and --worst exclude each other; give one")
    order: Order = "best" if best else "worst" if worst else "newest"
    kept = kept_versions(run)
    if not kept:
        raise ConfigError(
            f"{run} has no rollouts to read: give a run directory whose recipe has not "
            "rollouts.per_batch = 0, once a batch is trained"
        )
    if version is not None and version not in kept:
        raise ConfigError(f"no rollouts of version {version} are kept, but of {_spans(kept)}")
    wanted = Wanted(fate, outcome, truncated or None)
    samples = select(read_rollouts(run, version), wanted, order, limit)
    if json_:
        for sample in samples:
            typer.echo(json.dumps(sample))
    elif samples:
        _show(as_text(samples) + "\n")
    else:
        typer.echo("no sample is like that")


def _show(text: str) -> None:
    """Page by page on a terminal."""
    pydoc.pager(text) if sys.stdout.isatty() else typer.echo(text, nl=False)


def _spans(versions: list[int]) -> str:
    """1 to 4, 6, 8 to 9."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], version]
        else:
            spans.append([version])
    return ", ".join(" to ".join(map(str, span)) for span in spans)
