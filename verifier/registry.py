"""Checkers by name: the built-in ones, those of installed packages, and reasoning-gym's.

A data row names its checker. Packages add their own through the entry point group
"dapo.checkers": a callable `f(response: str, gold: str, **options)` that returns a `Verdict`,
a bool or a score. Such a checker runs in a killable process unless it carries the attribute
`fast = True`. A score below 1 is wrong (partial credit is not rewarded), and an exception
inside a checker is the outcome "error", never "wrong".
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from common.errors import ConfigError
from verifier import math_answer, math_dapo_compat
from verifier.extract import locate
from verifier.outcome import Verdict, error, shorten

ENTRY_POINT_GROUP = "dapo.checkers"
REASONING_GYM = "reasoning_gym"
_OPTIONS_OF_LOCATE = ("boxed", "truncated")

CheckFunction = Callable[..., Verdict | bool | float]


class UnknownChecker(ConfigError):
    """A checker's name that nothing installed provides."""


@dataclass(frozen=True, slots=True)
class Checker:
    """A function that judges one response, and whether it must run in a killable process."""

    name: str
    function: CheckFunction
    pooled: bool


def _math_verify(response: str, gold: str, **options: Any) -> Verdict:
    from verifier import symbolic  # SymPy is loaded only where it is used

    return symbolic.check(response, gold, **options)


_BUILT_IN = {
    "math": Checker("math", math_answer.check, pooled=False),
    "math_dapo_compat": Checker("math_dapo_compat", math_dapo_compat.check, pooled=False),
    "math_verify": Checker("math_verify", _math_verify, pooled=True),
}


def names() -> list[str]:
    """The names that `get` knows; `reasoning_gym:<dataset>` stands for a family."""
    known = [*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]
    if importlib.util.find_spec(REASONING_GYM) is not None:
        known.append(f"{REASONING_GYM}:<dataset>")
    return known


@lru_cache(maxsize=256)
def get(name: str) -> Checker:
    """The checker of that name. Raises UnknownChecker, which lists the known names."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    family, _, dataset = name.partition(":")
    if family == REASONING_GYM and dataset:
        return _reasoning_gym(name, dataset)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            try:
                function = point.load()
            except (ImportError, AttributeError) as problem:
                raise UnknownChecker(
                    f"the checker {name!r} ({point.value}) cannot be loaded: {problem}"
                ) from problem
            return Checker(name, function, pooled=not getattr(function, "fast", False))
    raise UnknownChecker(f"no checker is named {name!r}; known: {', '.join(names())}")


def run(name: str, response: str, gold: str, options: Mapping[str, Any]) -> Verdict:
    """Judge in this process. Never raises for what a checker does; it may take for ever."""
    checker = get(name)
    try:
        return as_verdict(checker.function(response, gold, **options))
    except Exception as problem:  # a checker is foreign code: its failure is an outcome
        return error(f"{type(problem).__name__}: {shorten(str(problem))}")


def as_verdict(result: Verdict | bool | float) -> Verdict:
    """A checker's result as a verdict; a score of 1 or more is correct."""
    if isinstance(result, Verdict):
        return result
    score = float(result)
    if math.isnan(score):
        return error("the checker returned NaN")
    return Verdict("correct" if score >= 1.0 else "wrong", reason=f"score {score:g}")


def _reasoning_gym(name: str, dataset: str) -> Checker:
    if importlib.util.find_spec(REASONING_GYM) is None:
        raise UnknownChecker(
            f"the checker {name!r} needs the package reasoning-gym, which is not installed"
        )
    try:
        score = importlib.import_module(REASONING_GYM).get_score_answer_fn(dataset)
    except ValueError as problem:
        raise UnknownChecker(f"reasoning-gym has no dataset {dataset!r}: {problem}") from problem

    def check(response: str, gold: str, **options: Any) -> Verdict:
        """reasoning-gym's own scorer on the claimed text; `entry` is the row's entry, if any."""
        where = {key: options[key] for key in _OPTIONS_OF_LOCATE if key in options}
        claim = locate(response, **where)
        if claim is None:
            return Verdict("no_answer", reason="no claim with content")
        entry = {"metadata": {}, **options.get("entry", {}), "answer": gold}
        verdict = as_verdict(score(answer=claim.text, entry=entry))
        extracted = shorten(claim.text)
        return Verdict(verdict.outcome, extracted, claim.where, verdict.reason)

    return Checker(name, check, pooled=True)
