"""What a claim says: the one number it states, or why it states none.

A claim is read, never searched: everything in it must be accounted for. Two values, a hedge,
a relation or an operator that is left over make it unreadable, so that a claim with two
different values can never be credited with one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from verifier.arithmetic import evaluate
from verifier.number import Number, from_fraction, parse_unsigned
from verifier.surface import undress
from verifier.words import lead_keeps_value, names_something, tail_keeps_value

_DIGIT = re.compile("[0-9]")
_MAX_CHAIN = 20
# Digits may be any number; everything else in a claim is bounded.
_MAX_MARKUP = 2000
_DIGITS = dict.fromkeys(map(ord, "0123456789,. "))
_START = re.compile(r"\\frac|\.?[0-9]")
_STRIP = frozenset(" \t\n\"'*_`,;:。.→\\")
_STRIP_LEFT = _STRIP - {".", "\\"}
_CLOSING = {"(": ")", "[": "]"}
_LETTER = re.compile(r"[^\W\d_]")
_NAME_TOKEN = re.compile(r"\b[A-Za-z][0-9]\b|\\?[^\W\d_]+|[0-9]+(?:\.[0-9]+)?|\S")
_NAME_MARKS = frozenset("^|'*/∠△°")
_COMPUTED = re.compile(r"\\(?:frac|sqrt|binom)")
_ADDED = re.compile(r"[+\-]")
_LABELS = frozenset(
    (
        "angle",
        "\\angle",
        "triangle",
        "\\triangle",
        "log",
        "\\log",
        "problem",
        "part",
        "case",
        "term",
    )
)
_WORDS = re.compile(r"\\?[^\W\d_]+")


@dataclass(frozen=True, slots=True)
class Reading:
    """The number a claim states, or None and the reason."""

    number: Number | None
    reason: str = ""


def read(claim: str, *, exact_arithmetic: bool = False) -> Reading:
    """Read one claim. Expressions are computed only with `exact_arithmetic`."""
    claim = claim.strip()
    if len(claim) > _MAX_MARKUP and len(claim.translate(_DIGITS)) > _MAX_MARKUP:
        return Reading(None, "too long for one number")
    text = _peel(undress(claim))
    if not text:
        return Reading(None, "nothing but markup")
    text = text.replace(":=", "=").replace("==", "=").lstrip("= ")
    parts = text.split("=")
    if len(parts) > _MAX_CHAIN:
        return Reading(None, "too many equals signs")
    if len(parts) > 1:
        return _chain([_peel(part) for part in parts], exact_arithmetic)
    number = _literal(text, with_lead=True)
    if number is None or _is_quotient(number):
        return _expression(text, exact_arithmetic)
    return Reading(number)


def _is_quotient(number: Number) -> bool:
    """68/2 is an expression for 34, not a way to write it."""
    return number.form == "fraction" and number.integral


def _expression(text: str, exact_arithmetic: bool) -> Reading:
    if not exact_arithmetic:
        return Reading(None, "not a single plain number")
    value = evaluate(text)
    if value is None:
        return Reading(None, "not a single number, and not computable")
    return Reading(from_fraction(value))


def _chain(parts: list[str], exact_arithmetic: bool) -> Reading:
    """`x = 34`, `m + n = 13 + 21 = 34`, `34 = x`: names first, then values that all agree."""
    if not all(parts):
        return Reading(None, "an equation with an empty side")
    *earlier, last = parts
    if len(earlier) == 1 and not _DIGIT.search(last) and _is_name(last):
        number = _literal(earlier[0])
        if number is not None and not _is_quotient(number):
            return Reading(number)
    number = _literal(last)
    if number is None or _is_quotient(number):
        final = _expression(last, exact_arithmetic)
        if final.number is None:
            return Reading(None, "the last side of the equation is not a plain number")
        number = final.number
    names_over = False
    for part in earlier:
        value = _value(part)
        if value is None and not names_over and _is_name(part):
            continue
        names_over = True
        if value is None or value.canon != number.canon:
            return Reading(None, "the sides of the equation do not agree, or cannot be compared")
    return Reading(number)


def _value(part: str) -> Number | None:
    literal = _literal(part)
    if literal is not None:
        return literal
    computed = evaluate(part)
    return None if computed is None else from_fraction(computed)


def _literal(text: str, with_lead: bool = False) -> Number | None:
    """The number in `text` if everything around it leaves its value alone."""
    start = _START.search(text)
    if not start:
        return None
    lead = text[: start.start()]
    sign = lead.rstrip()[-1:]
    if sign in ("+", "-") and sign:
        lead = lead.rstrip()[:-1]
    if lead.strip() and not (with_lead and lead_keeps_value(lead)):
        return None
    parsed = parse_unsigned(text, start.start(), negative=sign == "-")
    if parsed is None:
        return None
    number, end = parsed
    if text[end - 1] == ".":
        end -= 1  # the end of a sentence
    tail = text[end:]
    bare = tail.lstrip()
    percent = bare.startswith("%")
    if not tail_keeps_value(bare[1:] if percent else bare if bare.startswith("°") else tail):
        return None
    return Number(number.canon, number.form, percent) if percent else number


def _is_name(part: str) -> bool:
    """Whether a side of an equation names a quantity: x, m+n, 100m+n, a_9, f(3), the area.

    A number may stand in it only as an argument, an index, an exponent, one of several
    coefficients or a label ("angle 2"). With a number added (`x + 34`) or as a lone factor
    (`2x`) a side states something else, and so it does when it joins two names.
    """
    outer = _outside_brackets(part)
    if outer is None or not _LETTER.search(_COMPUTED.sub("", part)):
        return False
    if not names_something(_WORDS.findall(part)):
        return False
    outer = outer.strip().lstrip("+-")
    tokens = _NAME_TOKEN.findall(outer)
    if not tokens or tokens[0][0].isdigit() and not _ADDED.search(outer):
        return False
    named = False  # whether the current term has a name yet
    previous = "+"
    for token in tokens:
        if token in "+-":
            if not named and previous not in "+-":
                return False
            named = False
        elif token[0].isdigit():
            if previous not in ("+", "-", "^") and previous.lower() not in _LABELS:
                return False
        elif _LETTER.search(token):
            if previous[0].isdigit() and len(token) > 1 and token[0] != "\\":
                return False  # 3 apples, 48 which
            named = True
        elif token not in _NAME_MARKS or (token == "^" and not named):
            return False
        previous = token
    return named


def _outside_brackets(part: str) -> str | None:
    """`part` with its brackets, braces and indices taken out; None where they make no name.

    A bracket after a name is an argument; elsewhere it must hold a name and stands for one.
    """
    kept: list[str] = []
    depth = opened = 0
    for position, character in enumerate(part):
        if character in "([{":
            opened = opened if depth else position
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return None
            before = part[:opened].rstrip()[-1:] if depth == 0 else ""
            if depth == 0 and not (_LETTER.match(before) or before in tuple("^_)]}'")):
                if not _LETTER.search(part, opened, position):
                    return None
                kept.append(" x ")
        elif depth == 0 and part[position - 1 : position] != "_" and character != "_":
            kept.append(character)
    return "".join(kept) if depth == 0 else None


def _peel(text: str) -> str:
    """Without surrounding white space, quotes, punctuation and matching brackets."""
    left, right = 0, len(text)
    partners: dict[int, int] | None = None
    while left < right:
        if text[left] in _STRIP_LEFT:
            left += 1
        elif text[right - 1] in _STRIP and not (text[right - 1] == "." and text[right - 2] == "."):
            right -= 1
        elif text[left] in _CLOSING:
            if partners is None:
                partners = _partners(text)
            if partners.get(left) != right - 1:
                break
            left, right = left + 1, right - 1
        else:
            break
    return text[left:right]


def _partners(text: str) -> dict[int, int]:
    """The closing bracket of every opening one that is closed by its own kind."""
    stack: list[int] = []
    partners: dict[int, int] = {}
    for position, character in enumerate(text):
        if character in "([":
            stack.append(position)
        elif character in ")]" and stack:
            opening = stack.pop()
            if _CLOSING[text[opening]] == character:
                partners[opening] = position
    return partners
