"""The command `dapo eval`, and the role `examiner` that it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Hugging Face folder, or a run directory.")
]
Data = Annotated[
    list[Path], typer.Argument(metavar="DATA", help="Files of problems; each gets a line.")
]
Frozen = Annotated[str, typer.Option("--frozen", metavar="VERSION", help="Version to serve.")]


def evaluate(
    model: Model,
    data: Data,
    k: Annotated[
        int | None,
        typer.Option("--k", metavar="N", min=1, help="Samples per problem; default: eval.samples."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where settings come from; default: MODEL, if a run."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="As eval.temperature.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="X", help="As eval.top_p.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Longest response; default: the recipe's.")
    ] = None,
    problems: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The first N of each file; default: all.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="raw|dapo|chat",
            help="As data.template; without a recipe dapo, if MODEL has a chat template.",
        ),
    ] = None,
    generators: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="As generator.count.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="As run.seed.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Override any other key; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for the results; default: runs/eval-…"),
    ] = None,
    show: Annotated[int, typer.Option(metavar="N", min=0, help="Show the N hardest problems.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate MODEL on DATA: avg@k, pass@k and maj@k with intervals.

    Starts generators and verifiers on a server of their own; nothing is filtered, and the intervals
    are of 95 %. The result of each problem is in problems.jsonl of the results folder. Ctrl-C keeps
    the problems that are done; the exit status is 1 then.

    \b
      dapo eval /models/Qwen2.5-7B aime24.jsonl aime25.jsonl --k 32
      dapo eval runs/latest heldout.jsonl --show 5
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
    from verifier import registry

    config = load_config(recipe)
    registry.install(config.verifier.checkers)
    main(config, Version.parse(frozen))
