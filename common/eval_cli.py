"""The command `dapo eval`, and the role `examiner` that it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path, typer.Argument(help="Hugging Face folder, or a run directory.", show_default=False)
]
Data = Annotated[
    list[Path], typer.Argument(help="Files of problems; each gets a table.", show_default=False)
]
Frozen = Annotated[str, typer.Option("--frozen", metavar="VERSION", help="Version to serve.")]


def evaluate(
    model: Model,
    data: Data,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Samples per problem.")] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Where settings come from; default: the run's own.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the sampling.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Of the sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest response.")] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="First N of each file.")] = None,
    template: Annotated[str | None, typer.Option(help="raw, dapo or chat.")] = None,
    generators: Annotated[int | None, typer.Option(min=1, help="Engines to start.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any other key; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the results.", show_default="runs/eval-…")
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Show the N hardest problems.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Evaluate MODEL on DATA: avg@k, pass@k and maj@k with 95 % intervals, for each file.

    Real generators and verifiers on a server of their own; nothing is filtered. Per-problem
    results are in problems.jsonl of the results folder. Ctrl-C keeps the problems that are done;
    the exit status is 1 then.
    """
    from common.eval_run import evaluate as run
    from common.eval_settings import Wish
    from common.eval_table import as_text, hardest_as_text
    from common.results import hardest, read_results

    wish = Wish(
        data, k, recipe, set_ or [], temperature, top_p, max_tokens, problems, template,
        generators, seed,
    )  # fmt: skip
    folder, result = run(model, wish, out)
    if json_:
        typer.echo(json.dumps(result, ensure_ascii=False))
    else:
        typer.echo(as_text(result))
        if show:
            hard = hardest(read_results(folder / "problems.jsonl"), show)
            typer.echo(f"\nhardest problems\n\n{hardest_as_text(hard)}")
        typer.echo(f"\nper problem: {folder / 'problems.jsonl'}")
    raise typer.Exit(0 if result["complete"] else 1)


def examiner(recipe: Path, frozen: Frozen) -> None:
    """Put the problems of data.heldout to generators that serve frozen weights."""
    from common.config import load_config
    from common.messages import Version
    from learner.examination import main

    main(load_config(recipe), Version.parse(frozen))
