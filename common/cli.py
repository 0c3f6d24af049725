"""The `dapo` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common.config import Config, dump_toml, load_config
from common.errors import ERROR_MARK, DapoError

app = typer.Typer(
    name="dapo",
    help="Train language models with DAPO as an asynchronous actor-learner pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Recipe = Annotated[Path, typer.Argument(help="TOML file; see deploy/recipes/.", show_default=False)]
Run = Annotated[Path, typer.Argument(help="Run directory, such as runs/latest.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a key; may be repeated."),
]


def _load(recipe: Path, sets: list[str] | None) -> Config:
    from common.startup import resolve

    return resolve(load_config(recipe, sets))


@app.command()
def run(
    recipe: Recipe,
    set_: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")
    ] = False,
) -> None:
    """Run every role of RECIPE on this machine, with an embedded server if it names none.

    A run that was stopped goes on where it was. Ctrl-C saves a checkpoint and ends all roles.
    """
    config = _load(recipe, set_)
    if dry_run:
        from common.checks import dry_run_text

        typer.echo(dump_toml(config))
        typer.echo(dry_run_text(config))
        return
    from common.run import run_all

    raise typer.Exit(0 if run_all(config) else 1)


@app.command()
def learner(recipe: Recipe, set_: Sets = None) -> None:
    """Start one rank of the learner (under torchrun: each of its ranks)."""
    from learner.main import main as start

    start(_load(recipe, set_))


@app.command()
def generator(recipe: Recipe, set_: Sets = None) -> None:
    """Start one generator. Any number may join and leave while the run goes on."""
    from generator.main import main as start

    start(_load(recipe, set_))


@app.command()
def verifier(recipe: Recipe, set_: Sets = None) -> None:
    """Start one verifier process."""
    from verifier.main import main as start

    start(_load(recipe, set_))


@app.command()
def model(recipe: Recipe, set_: Sets = None) -> None:
    """Make the base model and the data files that RECIPE names in [base], if they are missing."""
    from common.startup import base_dir
    from learner.base import make_base

    config = _load(recipe, set_)
    make_base(config, typer.echo)
    typer.echo(f"ready: {base_dir(config)}")


@app.command()
def audit(
    run: Run,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check that every prompt group has exactly one fate. Exit status 1 if the ledger is off."""
    import json

    from common.audit import audit as examine
    from common.status import open_groups

    result = examine(run.resolve(), open_groups(run.resolve()))
    typer.echo(json.dumps(result.as_dict(), indent=2) if json_ else result.as_text())
    raise typer.Exit(0 if result.balanced else 1)


@app.command()
def report(run: Run) -> None:
    """Write RUN/report/: summary.json, a table, and curves as PNG."""
    from common.report import write_report

    typer.echo(f"report: {write_report(run.resolve())}")


@app.command()
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Write the newest valid checkpoint of RUN as a Hugging Face folder."""
    from learner.export import export as write

    typer.echo(f"exported version {write(run.resolve(), folder)} to {folder}")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="JSONL: response, gold, expected or correct.")],
    checker: Annotated[str, typer.Option(help="Name of the checker.")] = "math",
    boxed: Annotated[
        bool, typer.Option(help="Accept a box where no line claims an answer.")
    ] = True,
    exact_arithmetic: Annotated[bool, typer.Option(help="Evaluate simple expressions.")] = False,
    workers: Annotated[int, typer.Option(help="Processes for slow checkers.")] = 2,
    against: Annotated[
        str | None, typer.Option(help="A second checker: list where the two differ.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Run a checker over labelled responses. Exit status 1 if it disagrees with a label.

    Prints agreement, false positives and negatives, missing answers, errors, checks per second,
    and the rows on which they disagree.
    """
    import json

    from verifier.verify_file import verify_file

    result = verify_file(
        file,
        checker,
        boxed=boxed,
        exact_arithmetic=exact_arithmetic,
        workers=workers,
        against=against,
    )
    typer.echo(json.dumps(result.to_dict()) if json_ else result.to_text())
    raise typer.Exit(0 if result.agree == result.n else 1)


def main(*command: str) -> None:
    """Run the command line; what a person can mend is one line and status 2, no traceback."""
    try:
        app([*command, *sys.argv[1:]] if command else None, standalone_mode=True)
    except DapoError as error:
        sys.stdout.flush()
        print(f"{ERROR_MARK}{error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
