"""Rows of one problem, and which of them is kept.

A group holds the rows whose text is the same, white space aside. Of the rows with equal golds the
first stands for all. Golds that differ need a decision: one that was damaged or is a placeholder
is no gold, and if two are left nobody knows which is right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from common.golds import PLACEHOLDER, comparable, float_damaged, placeholder_among
from common.problem_files import Problem

Reason = Literal[
    "duplicate", "conflict", "placeholder", "float_damaged", "unreadable",
    "overlap", "instruction", "too_long",
]  # fmt: skip
"""Why a row is left out; each has one reason."""


@dataclass(slots=True)
class Group:
    """The rows of one problem: how many, and the first with each gold, in their order.

    `by_gold` goes by the value of a gold where it is a plain number, so 0.50 and 1/2 are equal.
    """

    rows: int = 0
    by_gold: dict[str, Problem] = field(default_factory=dict)

    def add(self, problem: Problem) -> None:
        self.rows += 1
        self.by_gold.setdefault(comparable(problem.gold), problem)

    def merge(self, other: Group) -> None:
        """Take in the rows of a group that is the same problem after all."""
        self.rows += other.rows
        for gold, problem in other.by_gold.items():
            self.by_gold.setdefault(gold, problem)

    @property
    def first(self) -> Problem:
        return next(iter(self.by_gold.values()))


def merged(groups: Iterable[Group], key: Callable[[Group], Hashable]) -> list[Group]:
    """Groups of equal key made one, each in the place of its first."""
    found: dict[Hashable, Group] = {}
    for group in groups:
        name = key(group)
        if name not in found:
            found[name] = Group()
        found[name].merge(group)
    return list(found.values())


def settle(
    golds: Iterable[str], *, keep_conflicts: bool = False, keep_damaged: bool = False
) -> dict[str, Reason | None]:
    """The fate of each distinct gold of one problem: None for the one that is kept, if any.

    `keep_conflicts` keeps the first of golds that contradict each other instead of none.
    """
    fates: dict[str, Reason | None] = dict.fromkeys(golds)
    if not keep_damaged:
        fates |= {gold: "float_damaged" for gold in fates if float_damaged(gold)}
    left = [gold for gold, fate in fates.items() if fate is None]
    if placeholder_among(left):
        fates[PLACEHOLDER] = "placeholder"
        left.remove(PLACEHOLDER)
    if len(left) > 1:
        fates |= dict.fromkeys(left[1:] if keep_conflicts else left, "conflict")
    return fates
