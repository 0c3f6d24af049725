"""The strict rule-based checker: integers, rationals and terminating decimals, exactly.

Invariants: it never raises; its time is linear in the response; a verdict does not depend on
white space or Markdown around the claim; a claim that holds two different values is never
`correct`. Symbolic answers are not read here: name "math_verify" in the data row for them.
"""

from __future__ import annotations

from common.errors import DapoError
from verifier.extract import Claim, locate
from verifier.number import Number, answers
from verifier.outcome import Verdict, error, shorten
from verifier.reading import Reading, read
from verifier.text import fold


class GoldError(DapoError, ValueError):
    """A reference answer that is missing or cannot be read as one number."""


def check(
    response: str,
    gold: str,
    *,
    boxed: bool = True,
    exact_arithmetic: bool = False,
    truncated: bool = False,
) -> Verdict:
    """Whether the answer that `response` claims equals `gold`.

    `boxed` lets a `\\boxed{}` count when no line claims an answer; `exact_arithmetic` credits
    expressions such as `68/2`; `truncated` says that the engine's finish reason was "length".
    A gold that cannot be read gives the outcome "error".
    """
    if not isinstance(response, str):
        return error(f"the response is no text but {type(response).__name__}")
    try:
        reference = _read_gold(gold)
    except GoldError as problem:
        return error(str(problem))
    claim = locate(response, boxed=boxed, truncated=truncated)
    if claim is None:
        return Verdict("no_answer", reason=_why_nothing(boxed))
    reading = _read_claim(claim, exact_arithmetic)
    extracted = shorten(claim.text)
    if reading.number is None:
        return Verdict("wrong", extracted, claim.where, reading.reason)
    value = shorten(reading.number.text)
    if answers(reading.number, reference):
        return Verdict("correct", extracted, claim.where, "equal values", value)
    reason = f"{value} is not {shorten(reference.text)}"
    return Verdict("wrong", extracted, claim.where, reason, value)


def normalise_gold(gold: str | int) -> str:
    """The canonical spelling of a gold: "-5", "3/4", "34%". Idempotent.

    Raises GoldError, which says what is wrong, if it is missing or not one plain number.
    """
    return _read_gold(gold).text


def _read_gold(gold: object) -> Number:
    if gold is None or (isinstance(gold, str) and not gold.strip()):
        raise GoldError("the gold answer is missing")
    if isinstance(gold, float) and gold.is_integer() and abs(gold) < 2**53:
        gold = int(gold)
    if isinstance(gold, int) and not isinstance(gold, bool):
        try:
            gold = str(gold)
        except ValueError:
            raise GoldError("the gold integer is too long; give it as a string") from None
    if not isinstance(gold, str):
        raise GoldError(
            f"the gold answer {gold!r} is a {type(gold).__name__}; give a string or an integer"
        )
    reading = read(fold(gold), exact_arithmetic=False)
    if reading.number is None:
        return _gold_quotient(gold)
    return reading.number


def _gold_quotient(gold: str) -> Number:
    """A gold such as 68/2 is a clumsy but clear way to give 34; nothing else is computed."""
    text = fold(gold)
    computed = read(text, exact_arithmetic=True).number
    if computed is not None and set(text) <= set("0123456789/ -"):
        return computed
    raise GoldError(
        f"the gold answer {shorten(gold)!r} is not one plain number; a symbolic answer needs "
        'the checker "math_verify"'
    )


def _read_claim(claim: Claim, exact_arithmetic: bool) -> Reading:
    """The value that all statements of a claim agree on."""
    readings = [read(text, exact_arithmetic=exact_arithmetic) for text in claim.texts]
    for reading in readings:
        if reading.number is None:
            return reading
    if len({reading.number.text for reading in readings if reading.number}) > 1:
        return Reading(None, "several claims that differ")
    return readings[0]


def _why_nothing(boxed: bool) -> str:
    return 'no "Answer:" line' + (" and no box" if boxed else "") + " with content"
