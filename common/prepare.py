"""`dapo data prepare`: problem files made fit to train on, and a report of what they hold.

Every row that is read is either written or left out for exactly one reason. The output and the
report depend on the input alone, so that two people who prepare the same files get the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.distinct import Group, Reason, merged, settle
from common.errors import ConfigError, DataError
from common.gold_check import check_golds
from common.golds import STRICT, as_integer, comparable, read_gold
from common.languages import has_prose, scripts
from common.likeness import Likeness, collapse, fold_notation, has_figure
from common.prepare_report import Conflict, Found, Overlap, Report, lengths_of
from common.problem_files import Conversation, Problem, read_problems
from common.template import bare_conversation, carries_dapo, own_instruction, render
from verifier import registry
from verifier.math_answer import GoldError
from verifier.outcome import shorten
from verifier.own_checkers import is_place

SYMBOLIC = "math_verify"
"""The checker of golds that are no plain numbers."""
DEFAULT_CHECKER = "math"

Tell = Callable[[str, int], None]
"""Told now and then what is done, and how many rows of it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to prepare.

    `checker` reads the golds of rows that name none; `symbolic` gives rows whose gold it cannot
    read the symbolic checker. `near` takes prompts that differ in notation only for the same.
    `against` are evaluation files, and `similarity` is the share of equal runs of words from
    which on a row is like one of their problems. `tokenizer` and `template` count tokens.
    """

    checker: str = DEFAULT_CHECKER
    symbolic: bool = False
    near: bool = False
    against: tuple[Path, ...] = ()
    similarity: float = 0.5
    drop_overlap: bool = False
    drop_instructions: bool = False
    keep_conflicts: bool = False
    keep_damaged: bool = False
    tokenizer: Any = None
    template: str = "raw"
    max_prompt_tokens: int | None = None


def prepare(inputs: Sequence[Path], out: Path, options: Options, tell: Tell) -> Report:
    """Read `inputs`, write what is fit to train on to `out` as JSONL, and report.

    Raises:
        DataError: a file or a row cannot be read, or no row is left.
        ConfigError: options that contradict each other, or a checker that does not exist.
    """
    checker = options.checker
    registry.install({checker: checker} if is_place(checker) else {})
    registry.get(checker)
    if options.max_prompt_tokens is not None and options.tokenizer is None:
        raise ConfigError("--max-prompt-tokens counts tokens: give --tokenizer DIR as well")
    reader = _Reader(options, tell)
    for path in inputs:
        reader.read(path)
    report = reader.report
    report.output = str(out)
    rows = _settled(reader.groups(), options, report)
    rows = _confirmed(rows, report, tell)
    _note_prompts(rows, report)
    if options.against:
        rows = _apart(rows, options, report, tell)
    if options.drop_instructions:
        own = {item.where for item in report.own_instructions}
        rows = _without(rows, own, "instruction", report)
    if options.tokenizer is not None:
        rows = _short_enough(rows, options, report, tell)
    if not rows:
        raise DataError(f"no row of {', '.join(map(str, inputs))} is left\n{report.to_text()}")
    report.written = len(rows)
    _write(rows, out)
    return report


class _Reader:
    """Reads rows into groups of one problem each, and counts what they hold."""

    def __init__(self, options: Options, tell: Tell) -> None:
        self.options, self.tell, self.report = options, tell, Report()
        self._groups: dict[bytes, Group] = {}
        self._texts: set[bytes] = set()
        self._lengths = array("l")

    def read(self, path: Path) -> None:
        before = self.report.rows
        for problem in read_problems(path):
            self.report.rows += 1
            self._take(problem)
            self.tell(f"reading {path}", self.report.rows - before)
        if self.report.rows == before:
            raise DataError(f"no rows in {path}")
        known = self.report.inputs.get(str(path), 0)
        self.report.inputs[str(path)] = known + self.report.rows - before

    def _take(self, problem: Problem) -> None:
        report = self.report
        if carries_dapo(problem.prompt[-1].content):
            report.dapo_instructions += 1
            problem = dataclasses.replace(problem, prompt=bare_conversation(problem.prompt))
        try:
            problem = with_gold(problem, self.options)
        except GoldError as error:
            report.unreadable.append(Found(problem.where, str(error)))
            report.leave_out("unreadable", 1)
            return
        self._count(problem)
        self._texts.add(_digest(problem.text))
        self._groups.setdefault(_digest(collapse(problem.text)), Group()).add(problem)

    def _count(self, problem: Problem) -> None:
        report, text = self.report, problem.text
        self._lengths.append(len(text))
        value = as_integer(problem.gold)
        report.integer_golds += value is not None
        report.negative_golds += value is not None and value < 0
        report.minus_one_golds += value == -1
        report.figures += has_figure(text)
        report.count_scripts(scripts(text))

    def groups(self) -> list[Group]:
        """The groups in the order of their first rows."""
        report, groups = self.report, list(self._groups.values())
        report.characters = lengths_of(self._lengths)
        report.distinct_texts, report.distinct_prompts = len(self._texts), len(groups)
        report.repeated_prompts = sum(group.rows > 1 for group in groups)
        report.surplus_rows = sum(group.rows for group in groups) - len(groups)
        return groups


def with_gold(problem: Problem, options: Options) -> Problem:
    """A problem with its gold as text, in the form of its checker; that is named if it has to be.

    Raises:
        GoldError: the gold cannot be read, and the symbolic checker is not wanted or no help.
        DataError: nothing provides the checker that the row names.
    """
    name = problem.checker or options.checker
    try:
        gold = read_gold(problem.gold, name)
    except registry.UnknownChecker as error:
        raise DataError(f"{problem.where}: {error}") from None
    except GoldError:
        if not options.symbolic or problem.gold is None:
            raise
        name = SYMBOLIC
        gold = read_gold(problem.gold, name)
    named = None if name == DEFAULT_CHECKER and problem.checker is None else name
    return dataclasses.replace(problem, checker=named, gold=gold)


def _settled(groups: list[Group], options: Options, report: Report) -> list[Problem]:
    """One row of each group, or none where its golds are no use."""
    near = merged(groups, lambda group: _digest(fold_notation(group.first.text)))
    report.notation_variants = len(groups) - len(near)
    chosen = near if options.near else groups
    rows = [row for group in chosen for row in _of_group(group, options, report)]
    kept = {row.where for row in rows}
    report.conflicts = [_conflict(group, kept) for group in groups if len(group.by_gold) > 1]
    told = {row.where for conflict in report.conflicts for row in conflict.rows}
    report.notation_conflicts = [
        _conflict(group, kept)
        for group in near
        if len(group.by_gold) > 1 and {row.where for row in group.by_gold.values()} - told
    ]
    return rows


def _of_group(group: Group, options: Options, report: Report) -> list[Problem]:
    fates = settle(
        group.by_gold, keep_conflicts=options.keep_conflicts, keep_damaged=options.keep_damaged
    )
    report.leave_out("duplicate", group.rows - len(fates))
    lists = {"placeholder": report.placeholders, "float_damaged": report.float_damaged}
    for gold, reason in fates.items():
        if reason is not None:
            report.leave_out(reason, 1)
            if reason in lists:
                lists[reason].append(Found(group.by_gold[gold].where, f"gold {gold}"))
    return [group.by_gold[gold] for gold, reason in fates.items() if reason is None]


def _conflict(group: Group, kept: set[str]) -> Conflict:
    rows = [Found(row.where, row.gold) for row in group.by_gold.values()]
    return Conflict(rows, [row.what for row in rows if row.where in kept])


def _confirmed(rows: list[Problem], report: Report, tell: Tell) -> list[Problem]:
    """Golds of slow checkers are tried out, in processes that can be killed."""
    slow = [row for row in rows if row.checker not in (None, *STRICT)]
    if not slow:
        return rows
    tell("trying the golds of slow checkers", len(slow))
    asked = [(str(row.checker), row.gold) for row in slow]
    failed = set()
    for row, verdict in zip(slow, check_golds(asked), strict=True):
        found = Found(row.where, f"gold {shorten(row.gold)!r}: {verdict.reason}")
        if verdict.outcome == "error":
            failed.add(row.where)
            report.unreadable.append(found)
        elif not verdict.correct:
            report.unconfirmed.append(found)
    return _without(rows, failed, "unreadable", report)


def _note_prompts(rows: Iterable[Problem], report: Report) -> None:
    for row in rows:
        if asked := own_instruction(row.text):
            report.own_instructions.append(Found(row.where, collapse(asked)))
        if not has_prose(row.text):
            report.without_prose.append(Found(row.where, collapse(row.text[:80])))


def _apart(rows: list[Problem], options: Options, report: Report, tell: Tell) -> list[Problem]:
    """Find the rows that are like a problem of an evaluation file."""
    problems: list[Problem] = []
    hit: dict[str, set[int]] = {}
    for path in options.against:
        hit[str(path)] = set()
        problems += read_problems(path)
    likeness = Likeness(problem.text for problem in problems)
    for number, row in enumerate(rows, 1):
        tell("comparing with evaluation files", number)
        match = likeness.most_similar(row.text)
        if match is None or match.similarity < options.similarity:
            continue
        other = problems[match.number]
        hit[other.where.rpartition(", row ")[0]].add(match.number)
        equal = comparable(row.gold) == comparable(other.gold)
        similarity = round(match.similarity, 3)
        report.overlaps.append(Overlap(row.where, other.where, similarity, equal))
    report.overlapping_problems = {name: len(numbers) for name, numbers in hit.items()}
    if not options.drop_overlap:
        return rows
    return _without(rows, {item.where for item in report.overlaps}, "overlap", report)


def _short_enough(
    rows: list[Problem], options: Options, report: Report, tell: Tell
) -> list[Problem]:
    """Count tokens, and leave out the prompts that are too long."""
    counts = array("l")
    for number, row in enumerate(rows, 1):
        tell("counting tokens", number)
        text = render(row.prompt, options.tokenizer, options.template)
        ids = options.tokenizer.encode(text, add_special_tokens=options.template == "raw")
        counts.append(len(ids))
    report.tokens = lengths_of(counts)
    limit = options.max_prompt_tokens
    if limit is None:
        return rows
    long = [(row, count) for row, count in zip(rows, counts, strict=True) if count > limit]
    report.too_long = [Found(row.where, f"{count} tokens") for row, count in long]
    return _without(rows, {item.where for item in report.too_long}, "too_long", report)


def _without(
    rows: list[Problem], places: set[str], reason: Reason, report: Report
) -> list[Problem]:
    left = [row for row in rows if row.where not in places]
    report.leave_out(reason, len(rows) - len(left))
    return left


def _write(rows: Iterable[Problem], out: Path) -> None:
    temporary = out.with_name(out.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(output_row(row), ensure_ascii=False) + "\n")
        temporary.rename(out)
    except OSError as error:
        raise DataError(
            f"{out} cannot be written ({error.strerror}); choose another --out"
        ) from None


def output_row(row: Problem) -> dict[str, Any]:
    """A row as it is written; what says nothing beyond the defaults is left out.

    So is a checker's file, which data cannot name: that of the recipe, verifier.checker, is for it.
    """
    found = {"prompt": _prompt(row.prompt), "answer": row.gold, "source": row.source}
    checker = None if row.checker and is_place(row.checker) else row.checker
    optional = {"checker": checker, "boxed": row.boxed}
    return found | {key: value for key, value in optional.items() if value is not None}


def _prompt(prompt: Conversation) -> str | list[dict[str, str]]:
    if len(prompt) == 1:
        return prompt[0].content
    return [message._asdict() for message in prompt]


def _digest(text: str) -> bytes:
    """Stands for a text in memory; half the length of most prompts or less."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
