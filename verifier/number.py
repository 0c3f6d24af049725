"""What a literal number is worth, exactly and in linear time.

Integers and decimals are compared as strings of digits, so that they may have any length:
`int()` refuses more than 4,300 digits by default and is quadratic. Only fractions of moderate
length are reduced; longer ones are equal only when they are written alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

# Below the interpreter's limit of 4,300 digits, and reduced in well under a millisecond.
MAX_REDUCED_DIGITS = 4000

Form = Literal["integer", "decimal", "fraction"]

# Digits with groups of three (comma or one space) or without, and a decimal part.
UNSIGNED = (
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?"
    r"|\.[0-9]+"
)
_GAP = r"\s{0,4}"
_PART = rf"(?:\{{{_GAP}([+-]?){_GAP}([0-9][0-9, ]*)\}}|([0-9]))"
_TEX_FRACTION = re.compile(rf"\\frac{_GAP}{_PART}{_GAP}{_PART}")
_UNSIGNED = re.compile(UNSIGNED)
_INTEGER = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+")
_SLASH = re.compile(rf"{_GAP}/{_GAP}([+-]?)([0-9]+)")
_MIXED_SLASH = re.compile(r" {1,4}([0-9]+)/([0-9]+)")


@dataclass(frozen=True, slots=True)
class Number:
    """A value in one canonical spelling, and the form in which it was written.

    `canon` is "-5" for integers, "n/d" in lowest terms for the rest; equal values have equal
    spellings up to the length that is reduced.
    """

    canon: str
    form: Form
    percent: bool = False

    @property
    def integral(self) -> bool:
        return "/" not in self.canon and "." not in self.canon

    @property
    def text(self) -> str:
        return self.canon + ("%" if self.percent else "")


def from_fraction(value: Fraction, form: Form = "fraction") -> Number:
    if value.denominator == 1:
        return Number(str(value.numerator), form)
    return Number(f"{value.numerator}/{value.denominator}", form)


def answers(claimed: Number, gold: Number) -> bool:
    """Whether a claimed number is the gold.

    A percent sign counts unless the gold has it too; a gold in percent may be met bare.
    """
    if claimed.percent and not gold.percent:
        return False
    return claimed.canon == gold.canon


def parse_unsigned(text: str, position: int, negative: bool) -> tuple[Number, int] | None:
    """The number literal that begins at `position`, and where it ends; None if there is none.

    Understands integers with thousands separators, decimals, `3/4`, `\\frac{3}{4}`, `\\frac34`
    and mixed numbers. What follows the literal is the caller's to judge.
    """
    fraction = _tex_fraction(text, position)
    if fraction is not None:
        sign, numerator, denominator, end = fraction
        number = _ratio(negative != sign, "0", numerator, denominator)
        return (number, end) if number else None
    match = _UNSIGNED.match(text, position)
    if not match:
        return None
    whole, end = match[0], match.end()
    if "." in whole:
        integer, _, decimals = whole.partition(".")
        return _decimal(negative, _digits(integer), decimals), end
    slash = _SLASH.match(text, end)
    if slash:
        if " " in whole:  # 1 234/5: a thousands group or a mixed number
            return None
        sign = negative != (slash[1] == "-")
        number = _ratio(sign, "0", _digits(whole), slash[2])
        return (number, slash.end()) if number else None
    mixed = _mixed_part(text, end)
    if mixed is not None:
        numerator, denominator, end = mixed
        number = _ratio(negative, _digits(whole), numerator, denominator)
        return (number, end) if number else None
    return _decimal(negative, _digits(whole), ""), end


def _mixed_part(text: str, end: int) -> tuple[str, str, int] | None:
    slash = _MIXED_SLASH.match(text, end)
    if slash:
        return slash[1], slash[2], slash.end()
    while end < len(text) and text[end] == " ":
        end += 1
    fraction = _tex_fraction(text, end)
    if fraction is None or fraction[0]:
        return None
    return fraction[1], fraction[2], fraction[3]


def _tex_fraction(text: str, position: int) -> tuple[bool, str, str, int] | None:
    """`\\frac` of two integers: whether it is negative, both parts, and where it ends."""
    if not text.startswith("\\frac", position):
        return None
    match = _TEX_FRACTION.match(text, position)
    if not match:
        return None
    parts = []
    for digits, bare in ((match[2], match[3]), (match[5], match[6])):
        part = bare or digits.strip()
        if not _INTEGER.fullmatch(part):
            return None
        parts.append(_digits(part))
    negative = (match[1] == "-") != (match[4] == "-")
    return negative, parts[0], parts[1], match.end()


def _digits(text: str) -> str:
    return text.replace(",", "").replace(" ", "").lstrip("0") or "0"


def _signed(negative: bool, digits: str) -> str:
    return f"-{digits}" if negative and digits != "0" else digits


def _decimal(negative: bool, whole: str, decimals: str) -> Number:
    """`whole` has no leading zeros."""
    form: Form = "decimal" if decimals else "integer"
    decimals = decimals.rstrip("0")
    if not decimals:
        return Number(_signed(negative, whole), form)
    if len(whole) + len(decimals) > MAX_REDUCED_DIGITS:
        return Number(_signed(negative, f"{whole}.{decimals}"), form)
    value = Fraction(int(whole + decimals), 10 ** len(decimals))
    return from_fraction(-value if negative else value, form)


def _ratio(negative: bool, whole: str, numerator: str, denominator: str) -> Number | None:
    """whole + numerator/denominator; None when it has no value or is too long to compute."""
    numerator, denominator = _digits(numerator), _digits(denominator)
    if denominator == "0":
        return None
    if max(map(len, (whole, numerator, denominator))) > MAX_REDUCED_DIGITS // 2:
        if whole != "0":
            return None
        return Number(_signed(negative, numerator) + "/" + denominator, "fraction")
    value = int(whole) + Fraction(int(numerator), int(denominator))
    return from_fraction(-value if negative else value)
