"""The `dapo` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from common import data_cli, doctor_cli, eval_cli, rollouts_cli, simulate_cli, status_cli
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
app.add_typer(data_cli.app)
app.command("eval")(eval_cli.evaluate)
app.command("status")(status_cli.status)
app.command("rollouts")(rollouts_cli.rollouts)
app.command("doctor")(doctor_cli.doctor)
app.command("simulate")(simulate_cli.simulate)
app.command("examiner", hidden=True)(eval_cli.examiner)

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
        bool, typer.Option("--dry-run", help="Print configuration and checks, and stop.")
    ] = False,
) -> None:
    """Run every role of RECIPE on this machine, with an embedded server if it names none.

    A run that was stopped goes on where it was. Ctrl-C saves a checkpoint and ends all roles.
    """
    config = _load(recipe, set_)
    if dry_run:
        from common.checks import dry_run_text
        from common.presets import comparison_text

        typer.echo(dump_toml(config))
        if comparison := comparison_text(config):
            typer.echo(f"{comparison}\n")
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
def generator(
    recipe: Recipe,
    set_: Sets = None,
    frozen: Annotated[str | None, typer.Option("--frozen", hidden=True)] = None,
) -> None:
    """Start one generator. Any number may join and leave while the run goes on.

    With generator.engine=simulated it only pretends to generate: to rehearse a deployment.
    """
    from common.messages import Version
    from generator.main import main as start

    start(_load(recipe, set_), Version.parse(frozen) if frozen else None)


@app.command()
def verifier(recipe: Recipe, set_: Sets = None) -> None:
    """Start one verifier process."""
    from verifier.main import main as start

    start(_load(recipe, set_))


@app.command()
def model(recipe: Recipe, set_: Sets = None) -> None:
    """Make the model and the data files that RECIPE names in [base], if they are missing.

    Without [base] it only looks whether the model is where RECIPE says.
    """
    from common.startup import require_model
    from learner.base import make_base

    config = _load(recipe, set_)
    if config.base is not None:
        make_base(config, typer.echo)
    typer.echo(f"ready: {require_model(config)}")


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
def dead(
    target: Annotated[str, typer.Argument(help="Run directory, or redis:// address of a server.")],
    action: Annotated[str, typer.Argument(help="list or requeue.")] = "list",
    ids: Annotated[list[str] | None, typer.Argument(help="Letters to requeue.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Requeue every letter.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON.")] = False,
) -> None:
    """List the dead letters of a run, or put them back on their streams.

    An entry that no worker could read or survive is a dead letter; its group was failed and tried
    again at once. One that is put back is worked on if its group still waits for it.
    """
    import json

    from common.dead import DeadLetters, as_dicts, as_text
    from common.errors import ConfigError

    if action not in ("list", "requeue") or (action == "requeue") != bool(ids or all_):
        raise ConfigError("write `dapo dead RUN list`, or `requeue` with ids or --all")
    with DeadLetters.at(target) as letters:
        found = letters.read()
        if action == "list":
            typer.echo(json.dumps(as_dicts(found), indent=2) if json_ else as_text(found))
            return
        count = letters.requeue([letter.id for letter in found] if all_ else ids or [])
        typer.echo(json.dumps({"requeued": count}) if json_ else f"{count} put back")


@app.command()
def report(run: Run) -> None:
    """Write RUN/report/: a page to read (index.html), summary.json, a table, curves as PNG."""
    from common.report import write_report

    typer.echo(f"report: {write_report(run.resolve()) / 'index.html'}")


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
    """Run the command line; what a person can mend is one line and its status, no traceback."""
    try:
        app([*command, *sys.argv[1:]] if command else None, standalone_mode=True)
    except DapoError as error:
        sys.stdout.flush()
        print(f"{ERROR_MARK}{error}", file=sys.stderr)
        raise SystemExit(error.status) from None


if __name__ == "__main__":
    main()
