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

_MAX_CHAIN = 20
# Digits may be any number; everything else in a claim is bounded.
_MAX_MARKUP = 2000
_DIGITS = dict.fromkeys(map(ord, "0123456789,. "))
_START = re.compile(r"\\frac|\.?[0-9]")
_STRIP = frozenset(" \t\n\"'*_`,;:。.→")
_STRIP_LEFT = _STRIP - {"."}
_CLOSING = {"(": ")", "[": "]"}
_LETTER = re.compile(r"[^\W\d_]")
_COMPUTED = re.compile(r"\\(?:frac|sqrt|binom)")
_WORDS = re.compile(r"\\?[^\W\d_]+")
_RELATION = re.compile(r"[<>≤≥≠≈≡±∓→…?;∈∪~]|:(?!=)")
_COEFFICIENT = re.compile(r"[0-9.]+\s{0,3}\*?\s{0,3}[^\W\d_]\w?|[^\W\d_]\s{0,3}/\s{0,3}[0-9]+")


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
    if len(earlier) == 1 and _LETTER.search(last) and _is_name(last):
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
    """Whether a side of an equation names a quantity: x, m+n, a_9, f(3), the area.

    A side with a number added to it (`x + 34`) or with a lone coefficient (`2x`) states
    something else, and so do two names in one side.
    """
    if not _LETTER.search(_COMPUTED.sub("", part)) or _RELATION.search(part):
        return False
    outer = _outside_brackets(part)
    if "," in outer or not names_something(_WORDS.findall(part)):
        return False
    if _COEFFICIENT.fullmatch(outer.strip()):
        return False
    terms = re.split(r"[+\-]", outer)
    return all(_LETTER.search(term) for term in terms if term.strip())


def _outside_brackets(part: str) -> str:
    """The part without what stands in brackets, braces or a subscript."""
    kept = []
    depth = 0
    for previous, character in zip(" " + part, part, strict=False):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth <= 0 and previous != "_" and character != "_":
            kept.append(character)
    return "".join(kept)


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
