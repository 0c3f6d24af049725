"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a key of RECIPE; may be repeated."
    ),
]
