"""Symbolic answers through math-verify. Runs only inside a killable process (`verifier.pool`).

SymPy may take any time on what a model writes, and math-verify's own limits are signals,
which fail off the main thread and silently score everything wrong: they are switched off
here. Where the answer is, this project's rules decide (`verifier.extract`). Plain numbers on
both sides are compared exactly, as by the strict checker; all else is math-verify's to judge.
"""

from __future__ import annotations

import logging
from typing import Any

from verifier.extract import Claim, locate
from verifier.number import answers
from verifier.outcome import Outcome, Verdict, error, shorten
from verifier.reading import read
from verifier.text import fold

# Longer claims are no answer to a problem with a symbolic gold; parsing them takes seconds.
MAX_CLAIM_CHARS = 2000


def warm_up() -> None:
    """Import math-verify and SymPy and build their parser, so that no check pays for it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    _parse("\\boxed{\\frac{1}{2}}")


def check(
    response: str,
    gold: str,
    *,
    boxed: bool = True,
    exact_arithmetic: bool = True,
    truncated: bool = False,
) -> Verdict:
    """Whether the answer that `response` claims is symbolically equal to `gold`.

    `exact_arithmetic` has no effect: expressions are always evaluated. May raise whatever
    math-verify raises and may run for ever; the pool turns both into the outcome "error".
    """
    del exact_arithmetic
    claim = locate(response, boxed=boxed, truncated=truncated)
    if claim is None:
        return Verdict("no_answer", reason="no claim with content")
    if len(claim.text) > MAX_CLAIM_CHARS:
        return Verdict("wrong", shorten(claim.text), claim.where, "too long for an answer")
    exact = _compare_numbers(claim, gold)
    if exact is not None:
        return exact
    reference = _parse_value(fold(str(gold)))
    if not reference:
        return error(f"the gold answer {shorten(str(gold))!r} cannot be parsed")
    values = [_parse_value(text) for text in claim.texts]
    return _judge(claim, values, reference)


def _compare_numbers(claim: Claim, gold: str) -> Verdict | None:
    """The exact verdict where the claim and the gold are plain numbers, else None."""
    reference = read(fold(str(gold))).number
    numbers = [read(text).number for text in claim.texts]
    if reference is None or None in numbers:
        return None
    equal = all(answers(number, reference) for number in numbers if number)
    outcome: Outcome = "correct" if equal else "wrong"
    extracted, values = shorten(claim.text), {number.text for number in numbers if number}
    value = shorten(values.pop()) if len(values) == 1 else ""
    return Verdict(outcome, extracted, claim.where, "plain numbers compared exactly", value)


def _judge(claim: Claim, values: list[list[Any]], reference: list[Any]) -> Verdict:
    extracted = shorten(claim.text)
    if not all(values):
        return Verdict("wrong", extracted, claim.where, "not parsed as mathematics")
    spelling = shorten(str(values[0][0])) if len(values) == 1 else ""
    if all(_equal(reference, value) for value in values):
        return Verdict("correct", extracted, claim.where, "symbolically equal", spelling)
    return Verdict("wrong", extracted, claim.where, "symbolically different", spelling)


def _parse_value(text: str) -> list[Any]:
    """math-verify's reading of one answer: as LaTeX in a box, or as plain text."""
    text = text.strip().strip("*_`").strip()
    if "\\boxed" in text or "$" in text or "\\(" in text or "\\[" in text:
        return _parse(text)
    return _parse(f"\\boxed{{{text.rstrip('.')}}}") or _parse(text)


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    return parse(text, parsing_timeout=None, raise_on_error=True)  # type: ignore[arg-type]


def _equal(reference: list[Any], value: list[Any]) -> bool:
    from math_verify import verify

    return bool(verify(reference, value, timeout_seconds=None, raise_on_error=True))
