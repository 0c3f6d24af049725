"""What preparing data found: figures and rows, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from common.languages import ENOUGH

SHOWN = 10
"""How many rows of a kind the text lists; the JSON has all."""

MEANINGS = {
    "duplicate": "repeats a prompt and its gold",
    "conflict": "same prompt, contradicting golds",
    "placeholder": "a gold of -1 beside a real one",
    "float_damaged": "the gold was rounded by a float",
    "unreadable": "the checker cannot read the gold",
    "overlap": "in an evaluation file",
    "instruction": "an instruction of its own",
    "too_long": "longer than --max-prompt-tokens",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A row that something was found in, and what."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """Rows of one problem whose golds differ; `kept` are the golds that stay."""

    rows: list[Found]
    kept: list[str]


@dataclass(frozen=True, slots=True)
class Overlap:
    """A row that is like a problem of an evaluation file. Similarity 1: all words are equal."""

    where: str
    against: str
    similarity: float
    equal_golds: bool


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of all prompts."""

    median: int
    p90: int
    p99: int
    longest: int


def lengths_of(values: Iterable[int]) -> Lengths | None:
    """Quantiles that are lengths of actual prompts; None if there is no prompt."""
    array: npt.NDArray[np.int64] = np.fromiter(values, np.int64)
    if not array.size:
        return None
    found = np.quantile(array, [0.5, 0.9, 0.99, 1.0], method="inverted_cdf")
    return Lengths(*map(int, found))


@dataclass
class Report:
    """Figures over all rows read unless said otherwise; the lists name single rows, of equal ones
    the first."""

    inputs: dict[str, int] = field(default_factory=dict)
    output: str = ""
    rows: int = 0
    written: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    distinct_texts: int = 0
    distinct_prompts: int = 0
    """Once white space is folded."""
    repeated_prompts: int = 0
    """Of those, the ones with more than one row."""
    surplus_rows: int = 0
    notation_variants: int = 0
    """Distinct prompts that differ from an earlier one in notation only."""
    conflicts: list[Conflict] = field(default_factory=list)
    notation_conflicts: list[Conflict] = field(default_factory=list)
    placeholders: list[Found] = field(default_factory=list)
    float_damaged: list[Found] = field(default_factory=list)
    unreadable: list[Found] = field(default_factory=list)
    unconfirmed: list[Found] = field(default_factory=list)
    """Golds that their own checker does not credit as an answer."""
    integer_golds: int = 0
    negative_golds: int = 0
    minus_one_golds: int = 0
    dapo_instructions: int = 0
    """Rows that carried the paper's instruction; it was taken off."""
    own_instructions: list[Found] = field(default_factory=list)
    without_prose: list[Found] = field(default_factory=list)
    too_long: list[Found] = field(default_factory=list)
    figures: int = 0
    scripts: dict[str, int] = field(default_factory=dict)
    """Rows with at least five letters of a script other than Latin."""
    scripts_any: dict[str, int] = field(default_factory=dict)
    """Rows with at least one."""
    characters: Lengths | None = None
    tokens: Lengths | None = None
    """Of the distinct prompts, in the template."""
    overlaps: list[Overlap] = field(default_factory=list)
    overlapping_problems: dict[str, int] = field(default_factory=dict)
    """Problems of each evaluation file that are like a row."""

    def leave_out(self, reason: str, rows: int) -> None:
        """Count rows that are not written."""
        if rows:
            self.left_out[reason] = self.left_out.get(reason, 0) + rows

    def count_scripts(self, letters: Mapping[str, int]) -> None:
        """Count a prompt with so many letters of each script."""
        for script, count in letters.items():
            self.scripts_any[script] = self.scripts_any.get(script, 0) + 1
            if count >= ENOUGH:
                self.scripts[script] = self.scripts.get(script, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return asdict(self)

    def to_text(self) -> str:
        """The figures, then some rows of each kind that was found."""
        return "\n".join([*_figures(self), *_prompts(self), *_lists(self), *_balance(self)])


def _figures(report: Report) -> list[str]:
    names = ", ".join(f"{_short(name)} ({rows:,})" for name, rows in report.inputs.items())
    other = report.distinct_prompts + report.surplus_rows - report.integer_golds
    return [
        f"{report.rows:,} rows read: {names}",
        _line("distinct prompts", f"{report.distinct_texts:,} as written, "
              f"{report.distinct_prompts:,} with white space folded"),
        _line("surplus rows", f"{report.surplus_rows:,} in {report.repeated_prompts:,} groups"),
        _line("notation variants", f"{report.notation_variants:,} distinct prompts differ from "
              f"another in notation only, {len(report.notation_conflicts)} with other golds"),
        _line("golds", f"{report.integer_golds:,} integers ({report.negative_golds:,} negative, "
              f"{report.minus_one_golds:,} are -1), {other:,} other"),
    ]  # fmt: skip


def _prompts(report: Report) -> list[str]:
    lines = [_line("figures", f"{report.figures:,} prompts with [asy] code")]
    for script, count in sorted(report.scripts_any.items()):
        many = report.scripts.get(script, 0)
        text = f"{many:,} prompts with {ENOUGH} letters or more, {count:,} with any"
        lines.append(_line(f"{script} script", text))
    for name, lengths in (("characters", report.characters), ("tokens", report.tokens)):
        if lengths:
            text = (
                f"median {lengths.median:,}, 90 % {lengths.p90:,}, 99 % {lengths.p99:,}, "
                f"longest {lengths.longest:,}"
            )
            lines.append(_line(name, text))
    if report.dapo_instructions:
        lines.append(_line("instruction", f"the paper's, taken off {report.dapo_instructions:,} "
                           "rows"))  # fmt: skip
    for name, problems in report.overlapping_problems.items():
        rows = [item for item in report.overlaps if item.against.startswith(f"{name}, ")]
        equal = sum(item.equal_golds for item in rows)
        text = f"{problems:,} problems are like {len(rows):,} rows here, {equal:,} with equal golds"
        lines.append(_line("overlap", f"{_short(name)}: {text}"))
    return lines


def _lists(report: Report) -> list[str]:
    kinds: dict[str, Sequence[Found | Conflict | Overlap]] = {
        "conflicting golds": report.conflicts,
        "conflicting golds of notation variants": report.notation_conflicts,
        "placeholder golds": report.placeholders,
        "golds damaged by a float": report.float_damaged,
        "golds that the checker cannot read": report.unreadable,
        "golds that their own checker does not credit": report.unconfirmed,
        "prompts with an instruction of their own": report.own_instructions,
        "prompts that are an expression alone": report.without_prose,
        "prompts that are too long": report.too_long,
        "rows like an evaluation problem": report.overlaps,
    }
    lines: list[str] = []
    for title, found in kinds.items():
        if found:
            lines.append(f"{title}: {len(found):,}")
            lines += [f"  {_told(item)}" for item in found[:SHOWN]]
        if len(found) > SHOWN:
            lines.append(f"  and {len(found) - SHOWN:,} more")
    return lines


def _told(item: Found | Conflict | Overlap) -> str:
    if isinstance(item, Conflict):
        golds = ", ".join(f"{row.what} in {_short(row.where)}" for row in item.rows)
        return f"{golds}: {' and '.join(item.kept) or 'none'} kept"
    if isinstance(item, Overlap):
        gold = "" if item.equal_golds else ", other gold"
        like = f"similarity {item.similarity:.2f} to {_short(item.against)}"
        return f"{_short(item.where)}: {like}{gold}"
    return f"{_short(item.where)}: {item.what}"


def _short(where: str) -> str:
    """The place of a row without the folders; the JSON has them."""
    return where.rpartition("/")[2]


def _balance(report: Report) -> list[str]:
    lines = [
        _line("left out", f"{count:,} {reason.replace('_', ' ')}: {MEANINGS[reason]}")
        for reason, count in sorted(report.left_out.items())
    ]
    return [*lines, f"{report.written:,} rows written to {report.output}"]


def _line(name: str, text: str) -> str:
    return f"  {name:<20}{text}"
