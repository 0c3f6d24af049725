"""The `dapo` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from common import data_cli, doctor_cli, eval_cli, rollouts_cli, simulate_cli, status_cli
from common.command_group import CommandGroup
from common.config import Config, dump_toml, load_config
from common.errors import ERROR_MARK, DapoError
from common.options import Sets

Recipe = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="TOML file, such as those in deploy/recipes/.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, such as runs/latest.")]


def _load(recipe: Path, sets: list[str] | None) -> Config:
    from common.startup import resolve
    from verifier import registry

    config = resolve(load_config(recipe, sets))
    registry.install(config.verifier.checkers)
    return config


def run(
    recipe: Recipe,
    set_: Sets = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the configuration and all checks, start nothing."),
    ] = False,
) -> None:
    """Run every role of RECIPE on this machine, to the end.

    A server of its own is started if the recipe names none. Ctrl-C saves a checkpoint and ends
    every role; the same command goes on from there, also after a crash.

    Exit status 0: the run is complete (with --dry-run: nothing is wrong). 1: it was told to end
    earlier. 2: something has to be mended, which the last line names. 75: the same may succeed
    later.

    \b
      dapo run deploy/recipes/arithmetic.toml
      dapo run deploy/recipes/arithmetic.toml --set run.batches=2 --dry-run
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
    from common.own_checks import require_own_checkers
    from common.run import run_all

    require_own_checkers(config.verifier, config.data.train)
    raise typer.Exit(0 if run_all(config) else 1)


def learner(recipe: Recipe, set_: Sets = None) -> None:
    """Start the learner, or one of its ranks under torchrun.

    The server is the one of redis.url or DAPO_REDIS_URL. SIGTERM saves a checkpoint and ends it.

    \b
      dapo learner mine.toml
      torchrun --nproc-per-node 2 -m learner mine.toml
    """
    from learner.main import main as start

    start(_load(recipe, set_))


def generator(
    recipe: Recipe,
    set_: Sets = None,
    frozen: Annotated[str | None, typer.Option("--frozen", hidden=True)] = None,
) -> None:
    """Start one generator; any number may join and leave during a run.

    The server is the one of redis.url or DAPO_REDIS_URL. With generator.engine=simulated it only
    pretends to generate, to rehearse a deployment.

    \b
      dapo generator mine.toml
      dapo generator mine.toml --set generator.engine=simulated
    """
    from common.messages import Version
    from generator.main import main as start

    start(_load(recipe, set_), Version.parse(frozen) if frozen else None)


def verifier(recipe: Recipe, set_: Sets = None) -> None:
    """Start one verifier; any number may join and leave during a run.

    The server is the one of redis.url or DAPO_REDIS_URL.

    \b
      dapo verifier mine.toml
    """
    from verifier.main import main as start

    start(_load(recipe, set_))


def model(recipe: Recipe, set_: Sets = None) -> None:
    """Make the model and data files that RECIPE names in [base].

    Does nothing if they are there already. Without [base] it only looks whether the model is where
    RECIPE says, and the exit status is 2 if it is not. `dapo run` does this by itself.

    \b
      dapo model deploy/recipes/arithmetic.toml
    """
    from common.startup import require_model
    from learner.base import make_base

    config = _load(recipe, set_)
    if config.base is not None:
        make_base(config, typer.echo)
    typer.echo(f"ready: {require_model(config)}")


def audit(
    run: Run,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that every prompt group has exactly one fate.

    Counts the groups by fate, from the files of RUN; its server, if one answers, says which are
    under way. Exit status 1 if a group has two fates, or none though the run has ended.

    \b
      dapo audit runs/latest
    """
    import json

    from common.audit import audit as examine
    from common.status import open_groups

    result = examine(run.resolve(), open_groups(run.resolve()))
    typer.echo(json.dumps(result.as_dict(), indent=2) if json_ else result.as_text())
    raise typer.Exit(0 if result.balanced else 1)


def dead(
    target: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory, or redis:// address of a server.")
    ],
    action: Annotated[
        str, typer.Argument(metavar="ACTION", help="list, or requeue: put back.")
    ] = "list",
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Letters to requeue, as listed.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Requeue every letter.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the dead letters of a run, or put them back.

    An entry that no worker could read or survive is a dead letter; its group was failed and tried
    again at once. One that is put back is worked on if its group still waits for it.

    \b
      dapo dead runs/latest
      dapo dead runs/latest requeue --all
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


def report(run: Run) -> None:
    """Write RUN/report/: a page to read, and what it is made of.

    index.html needs no network; beside it are summary.json, report.txt and the curves as PNG. A run
    writes its report by itself when it ends; this writes it anew, at any time.

    \b
      dapo report runs/latest
    """
    from common.report import write_report

    typer.echo(f"report: {write_report(run.resolve()) / 'index.html'}")


def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="New folder to write.")],
) -> None:
    """Write the newest valid checkpoint as a Hugging Face folder.

    FOLDER must not exist yet. A run that has ended has its final weights in RUN/export already.

    \b
      dapo export runs/latest /models/mine
    """
    from learner.export import export as write

    typer.echo(f"exported version {write(run.resolve(), folder)} to {folder}")


def verify(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSONL: response, gold, expected or correct.")
    ],
    checker: Annotated[
        str, typer.Option(metavar="NAME", help="Checker, or FILE.py:FUNCTION of your own.")
    ] = "math",
    boxed: Annotated[
        bool,
        typer.Option("--boxed/--no-boxed", help="Accept a box where no line claims an answer."),
    ] = True,
    exact_arithmetic: Annotated[
        bool, typer.Option("--exact-arithmetic", help="Evaluate simple expressions: 68/2 is 34.")
    ] = False,
    workers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Processes for checkers that may hang.")
    ] = 2,
    against: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A second checker: list where the two differ."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a checker with labelled responses.

    A row of FILE has a `response`, its `gold`, and a label: `expected` (correct, wrong or
    no_answer) or `correct` (true or false). Prints how often the checker agrees, false positives
    and negatives, missing answers and errors, and every row on which they disagree. Exit status 1
    if there is one.

    \b
      dapo verify labelled.jsonl
      dapo verify labelled.jsonl --checker math_verify --against math
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


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Run": {"run": run, "eval": eval_cli.evaluate, "export": export},
    "Look at a run": {
        "status": status_cli.status, "rollouts": rollouts_cli.rollouts, "report": report,
        "audit": audit, "dead": dead,
    },
    "Prepare a run": {
        "doctor": doctor_cli.doctor, "simulate": simulate_cli.simulate, "model": model,
        "verify": verify,
    },
    "Start one role by hand": {"learner": learner, "generator": generator, "verifier": verifier},
}  # fmt: skip
"""Heading of `dapo --help`, name, command. `data` brings commands of its own."""

app = typer.Typer(
    name="dapo",
    cls=CommandGroup,
    help="Train language models with DAPO as an asynchronous actor-learner pipeline.\n\n"
    "`dapo COMMAND --help` has examples. Exit status 2: something has to be mended, and the last "
    "line says what; 75: the same may succeed later.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _heading, _commands in COMMANDS.items():
    for _name, _function in _commands.items():
        app.command(_name, rich_help_panel=_heading)(_function)
app.add_typer(data_cli.app, rich_help_panel="Prepare a run")
app.command("examiner", hidden=True)(eval_cli.examiner)


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
