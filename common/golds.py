"""Reference answers: read in the form of a checker, and recognised where they are not genuine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from verifier import registry
from verifier.math_answer import GoldError, normalise_gold

STRICT = ("math", "math_dapo_compat")
"""Checkers whose golds must be numbers that the strict checker can read."""

EXACT_IN_FLOAT = 2**53
"""Integers up to here survive a float64."""

FULL_MANTISSA = 2**45
"""An odd part below this is far from filling the 53 bits of a float64."""

PLACEHOLDER = "-1"
"""What some data sets hold where the answer was not known."""


def read_gold(gold: Any, checker: str) -> str:
    """The gold in the form that the checker compares with; canonical for the strict ones.

    Raises:
        GoldError: it is missing, or no plain number where the checker needs one.
        UnknownChecker: nothing installed provides that checker.
    """
    if registry.get(checker).name in STRICT:
        return _canonical(gold)
    text = "" if gold is None else str(gold).strip()
    if not text:
        raise GoldError("the gold answer is missing")
    return text


def comparable(gold: Any) -> str:
    """A text that is the same for golds of equal value, as far as they are plain numbers."""
    try:
        return _canonical(gold)
    except GoldError:
        return "".join(str(gold).split())


def as_integer(gold: str) -> int | None:
    """The integer that a canonical gold spells. Never by way of a float."""
    digits = gold.removeprefix("-")
    return int(gold) if digits.isascii() and digits.isdecimal() and len(digits) <= 4000 else None


def float_damaged(gold: str) -> bool:
    """Whether an integer looks as if a float64 had rounded it on its way.

    A float64 that is printed as an integer shows digits which are not those of the number that
    was rounded: 105263157894736842 comes back as …848. Such an integer is above 2**53, exactly a
    float64 with all of its bits in use, and yet not the shortest decimal that names this float64.
    Genuine integers of that kind are rare (one in sixteen at 18 digits, one in four million
    at 23), which is why powers of two and factorials, whose bits are few or whose decimals end in
    zeros, are taken for genuine.
    """
    value = as_integer(gold)
    if value is None or abs(value) <= EXACT_IN_FLOAT or value % 1000 == 0:
        return False
    value = abs(value)
    odd_part = value // (value & -value)
    if odd_part < FULL_MANTISSA or odd_part > EXACT_IN_FLOAT or len(gold) > 300:
        return False
    return _shortest(float(value)) != value


def _shortest(number: float) -> int:
    """The shortest decimal that reads back as this float, as an integer."""
    mantissa, _, exponent = f"{number!r}".partition("e+")
    whole, _, fraction = mantissa.partition(".")
    if not exponent:
        return int(whole)
    return int(whole + fraction) * 10 ** (int(exponent) - len(fraction))


def placeholder_among(golds: Iterable[str]) -> bool:
    """Whether these golds of one problem hold a -1 beside a positive integer."""
    known = set(golds)
    positive = any((as_integer(gold) or 0) > 0 for gold in known)
    return PLACEHOLDER in known and positive


def _canonical(gold: Any) -> str:
    return _canonical_text(gold) if isinstance(gold, str) else normalise_gold(gold)


@lru_cache(maxsize=1 << 16)
def _canonical_text(gold: str) -> str:
    return normalise_gold(gold)
