"""The command line is frozen: a command, an option or a default changes on purpose only.

`command_line.txt` has a block for each command. After a change that is meant, write it anew with

    python -m tests.unit.test_command_line > tests/unit/command_line.txt
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from common.cli import app

FROZEN = Path(__file__).with_name("command_line.txt")
REMEDY = "if this is meant: python -m tests.unit.test_command_line > tests/unit/command_line.txt"
COLUMN = 36


def commands(command: Any, words: tuple[str, ...] = ("dapo",)) -> Iterator[tuple[str, Any]]:
    """Every command below and including this one, with the words that call it."""
    yield " ".join(words), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


EVERY = dict(commands(typer.main.get_command(app)))
SHOWN = {words: command for words, command in EVERY.items() if not command.hidden}
LEAVES = [words for words, command in SHOWN.items() if not hasattr(command, "commands")]


def block(words: str, command: Any) -> str:
    """A command as it is frozen: its line, then one for each argument and option."""
    context = command.make_context(words, [], resilient_parsing=True)
    hidden = "  (hidden)" if command.hidden else ""
    lines = [f"{words}{hidden}", f"    {command.get_short_help_str(10_000)}"]
    for parameter in command.get_params(context):
        name, text = parameter.get_help_record(context) or (" ".join(parameter.opts), "(hidden)")
        lines.append(f"    {name:{COLUMN - 1}} {text}")
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """All commands, in the order of `dapo --help`."""
    return "\n".join(block(words, command) for words, command in EVERY.items())


def page(words: str, columns: int) -> str:
    """What `--help` prints on a terminal of so many columns."""
    arguments = [*words.split()[1:], "--help"]
    done = CliRunner().invoke(
        app, arguments, prog_name="dapo", env={"COLUMNS": str(columns)}, catch_exceptions=False
    )
    assert done.exit_code == 0
    return done.output


def test_the_command_line_is_the_frozen_one() -> None:
    assert command_line() == FROZEN.read_text(encoding="utf-8"), REMEDY


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", SHOWN)
def test_no_help_is_wider_than_the_terminal_or_cut_short(words: str, columns: int) -> None:
    text = page(words, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert not [line for line in text.splitlines()[1:] if line.endswith("...")]
    assert "object at 0x" not in text


@pytest.mark.parametrize("words", LEAVES)
def test_every_command_says_in_one_line_what_it_does_and_has_an_example(words: str) -> None:
    first, rest = SHOWN[words].help.split("\n", 1)
    assert len(first) <= 66  # the list of commands has 80 columns
    assert first.endswith(".")
    assert f"  {words} " in rest or f"  {words}\n" in rest


if __name__ == "__main__":
    print(command_line(), end="")
