"""What a check of this machine has found, and where it looked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.config import Config

State = Literal["ok", "note", "FAULT"]


@dataclass(frozen=True)
class Finding:
    """One line of `dapo doctor`. The text of a FAULT, and of most notes, ends with a remedy."""

    name: str
    state: State
    text: str

    def line(self) -> str:
        return f"{self.state:<5} {self.name}: {self.text}"


@dataclass(frozen=True)
class Site:
    """What is examined: a folder for run directories, and the recipe of a run, if one is named."""

    folder: Path
    config: Config | None = None


Found = tuple[State, str]


def ok(text: str) -> Found:
    return "ok", text


def note(text: str) -> Found:
    return "note", text


def fault(text: str) -> Found:
    return "FAULT", text
