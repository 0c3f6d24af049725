"""`dapo data`: work on problem files before a run."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from common.command_group import CommandGroup
from common.errors import ConfigError, DataError

app = typer.Typer(
    name="data",
    cls=CommandGroup,
    help="Prepare problem files for a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

TELL_EVERY_S = 2.0


@app.callback()
def data() -> None:
    """Prepare problem files for a run."""


@app.command(rich_help_panel="Commands")
def prepare(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT", help="JSONL or parquet file of problems.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="JSONL file to write; a report goes beside it.")
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Evaluation file to look for; may be repeated."),
    ] = None,
    similarity: Annotated[
        float,
        typer.Option(
            metavar="X", min=0.05, max=1.0, help="Share of equal word runs that counts as overlap."
        ),
    ] = 0.5,
    drop_overlap: Annotated[
        bool, typer.Option("--drop-overlap", help="Leave out what is like an evaluation problem.")
    ] = False,
    checker: Annotated[
        str,
        typer.Option(metavar="NAME", help="Checker of rows that name none, or FILE.py:FUNCTION."),
    ] = "math",
    symbolic: Annotated[
        bool,
        typer.Option("--symbolic", help="Rows whose gold the checker cannot read get math_verify."),
    ] = False,
    drop_unreadable: Annotated[
        bool,
        typer.Option("--drop-unreadable", help="Golds that cannot be read are no failure."),
    ] = False,
    near: Annotated[
        bool,
        typer.Option("--near", help="Prompts that differ in notation only are the same prompt."),
    ] = False,
    keep_conflicts: Annotated[
        bool,
        typer.Option("--keep-conflicts", help="Of contradicting golds keep the first, not none."),
    ] = False,
    keep_damaged: Annotated[
        bool,
        typer.Option("--keep-damaged", help="Keep golds that look rounded by a float."),
    ] = False,
    drop_instructions: Annotated[
        bool,
        typer.Option("--drop-instructions", help="Leave out prompts with their own instruction."),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Hugging Face folder; count tokens with its tokenizer."),
    ] = None,
    template: Annotated[
        Literal["raw", "dapo", "chat"],
        typer.Option(
            metavar="raw|dapo|chat", help="Template in which tokens are counted, as data.template."
        ),
    ] = "raw",
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Leave out prompts of more tokens."),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the report as one JSON object.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE and its report.")] = False,
) -> None:
    """Check problem files and write one clean JSONL file.

    The file is for data.train; FILE.report.json lists every row that something was found in.

    A row needs a prompt (`prompt`, `question` or `problem`; text or chat messages) and a gold
    (`answer`, or `reward_model.ground_truth` as verl has it). Repeated prompts are written once.
    Left out are golds that contradict each other, placeholders (-1 beside a real gold), integers
    that a float has rounded, and golds that the checker cannot read; these make the exit status 1
    unless --symbolic or --drop-unreadable deals with them. The paper's instruction is taken off
    prompts that carry it: data.template = "dapo" adds it when a run starts.

    \b
      dapo data prepare math.parquet --out train.jsonl
      dapo data prepare *.jsonl --out train.jsonl --against aime24.jsonl
    """
    from common.prepare import Options
    from common.prepare import prepare as run

    report_path = out.with_name(out.name + ".report.json")
    _require_free(inputs, [out, report_path], force)
    options = Options(
        checker=checker,
        symbolic=symbolic,
        near=near,
        against=tuple(against or ()),
        similarity=similarity,
        drop_overlap=drop_overlap,
        drop_instructions=drop_instructions,
        keep_conflicts=keep_conflicts,
        keep_damaged=keep_damaged,
        tokenizer=_load_tokenizer(tokenizer),
        template=template,
        max_prompt_tokens=max_prompt_tokens,
    )
    report = run(inputs, out, options, Progress())
    text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
    report_path.write_text(text + "\n", encoding="utf-8")
    typer.echo(text if json_ else f"{report.to_text()}\nreport: {report_path}")
    if report.unreadable and not drop_unreadable:
        typer.echo(
            f"{len(report.unreadable):,} golds cannot be read, and their rows are not in {out}: "
            "--symbolic gives them the checker math_verify, --drop-unreadable accepts it",
            err=True,
        )
        raise typer.Exit(1)


class Progress:
    """Says on standard error what is done, if it takes long."""

    def __init__(self) -> None:
        self._due = time.monotonic() + TELL_EVERY_S

    def __call__(self, what: str, rows: int) -> None:
        if time.monotonic() >= self._due:
            print(f"{what}: {rows:,} rows", file=sys.stderr)
            self._due = time.monotonic() + TELL_EVERY_S


def _require_free(inputs: list[Path], outputs: list[Path], force: bool) -> None:
    if outputs[0].suffix == ".parquet":
        raise ConfigError(f"--out {outputs[0]}: JSONL is written; choose a name in .jsonl")
    if outputs[0].is_dir():
        raise ConfigError(f"--out {outputs[0]} is a folder; give the name of a file")
    if not outputs[0].parent.is_dir():
        raise ConfigError(f"--out {outputs[0]}: the folder {outputs[0].parent} does not exist")
    read = {path.resolve() for path in inputs}
    for path in outputs:
        if path.resolve() in read:
            raise ConfigError(f"--out {path} is also an input; choose another name")
        if path.exists() and not force:
            raise ConfigError(f"{path} exists; choose another --out, or overwrite it with --force")


def _load_tokenizer(folder: Path | None) -> Any:
    if folder is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise DataError(f"--tokenizer {folder} holds no tokenizer: {first}") from None
