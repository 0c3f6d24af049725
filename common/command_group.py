"""How `dapo --help` lists the commands: under headings, in one column, no line cut short."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

WHOLE = 10_000
"""Characters of a command's first sentence that are shown: all."""


class CommandGroup(TyperGroup):
    """A group whose commands stand under the heading that each was registered with."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading, in the order of their first commands."""
        width = max(map(len, self.commands))
        panels: dict[str, list[tuple[str, str]]] = {}
        command: Any
        for name, command in self.commands.items():
            if not command.hidden:
                line = (name.ljust(width), command.get_short_help_str(WHOLE))
                panels.setdefault(command.rich_help_panel, []).append(line)
        for heading, lines in panels.items():
            with formatter.section(heading):
                formatter.write_dl(lines)
