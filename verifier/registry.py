"""Checkers by name: built in, in a file that the recipe names, of packages, and reasoning-gym's.

A data row may name its checker, by one of these names. A checker of one's own is a callable
`f(response: str, gold: str, **options)` that returns a `Verdict`, a bool or a score; it comes from
a file (`verifier.checkers`) or from a package, by the entry point group "dapo.checkers". It runs in
a killable process; that of a package does not if it carries the attribute `fast = True`. A score
below 1 is wrong (partial credit is not rewarded), and an exception inside a checker is the outcome
"error", never "wrong".
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import entry_points
from typing import Any

from common.errors import ConfigError
from verifier import math_answer, math_dapo_compat, own_checkers
from verifier.extract import locate
from verifier.outcome import OUTCOMES, Verdict, error, shorten

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

_own: dict[str, str] = {}
"""Name and FILE.py:FUNCTION of the checkers that this process was told of by `install`."""


def install(checkers: Mapping[str, str]) -> None:
    """Make these the checkers of one's own in this process, by name; nothing is loaded yet.

    `checkers` comes from a recipe or an option, never from data: see `verifier/own_checkers.py`.

    Raises:
        ConfigError: a name is that of another checker.
    """
    packaged = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)} if checkers else ()
    for name in checkers:
        if name in _BUILT_IN or name in packaged or name == REASONING_GYM:
            raise ConfigError(
                f"verifier.checkers.{name}: a checker of that name is there already; "
                f"choose another name, such as my_{name}"
            )
    _own.clear()
    _own.update(checkers)
    get.cache_clear()


def installed() -> dict[str, str]:
    """What `install` was given, for a process that is to know the same checkers."""
    return dict(_own)


def names() -> list[str]:
    """The names that `get` knows; `reasoning_gym:<dataset>` stands for a family."""
    known = [*_BUILT_IN, *_own, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]
    if importlib.util.find_spec(REASONING_GYM) is not None:
        known.append(f"{REASONING_GYM}:<dataset>")
    return known


@lru_cache(maxsize=256)
def get(name: str) -> Checker:
    """The checker of that name. Raises UnknownChecker, which lists the known names."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if name in _own:
        return Checker(name, partial(own_checkers.judge, _own[name]), pooled=True)
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
    remedy = ""
    if ".py" in name:
        remedy = "; an option takes FILE.py:FUNCTION, in a recipe verifier.checkers gives it a name"
    raise UnknownChecker(f"no checker is named {name!r}; known: {', '.join(names())}{remedy}")


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
        return _well_formed(result)
    try:
        score = math.nan if isinstance(result, str) else float(result)
    except (TypeError, ValueError):
        score = math.nan
    if math.isnan(score):
        return error(
            f"the checker returned {shorten(repr(result))}: return True, False, a number, or a "
            "verifier.outcome.Verdict"
        )
    return Verdict("correct" if score >= 1.0 else "wrong", reason=f"score {score:g}")


def _well_formed(verdict: Verdict) -> Verdict:
    """A checker's verdict; an error if a field of it is not what the verdict's type says."""
    texts = (verdict.extracted or "", verdict.reason, verdict.value)
    if verdict.outcome in OUTCOMES and all(isinstance(text, str) for text in texts):
        return verdict
    return error(
        f"the checker returned {shorten(repr(verdict))}: an outcome is one of "
        f"{', '.join(OUTCOMES)}, and the rest is text"
    )


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
