"""Words around a number: which leave its value alone, and which do not.

A claim may name what is counted ("34 apples") or introduce its value ("the total is 34").
That vocabulary is open, so the words that change, doubt or multiply a value are listed
instead, and everything that is not a word (digits, operators, brackets) is refused.
"""

from __future__ import annotations

import re


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HEDGES = _words(
    """
    or nor but not no never none if when whenever unless otherwise except either neither both
    maybe perhaps possibly probably likely unlikely presumably apparently might may could would
    can cannot approximately approx about around roughly nearly almost circa least most between
    through until alternatively another other else instead rather wait however actually unsure
    uncertain guess guessing think believe assume assuming suppose depending provided unknown
    undefined incorrect wrong impossible different respectively versus vs also plus minus modulo
    mod base radix hexadecimal octal binary
    """
)
_AMOUNTS = _words(
    """
    hundred hundreds thousand thousands million millions billion billions trillion trillions
    dozen dozens lakh crore half halves third thirds quarter quarters fifth fifths sixth sixths
    seventh sevenths eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth
    thousandths tens ones percent pct percentage ppm ppb
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty
    ninety twice thrice double triple
    pi sqrt sin cos tan log ln exp factorial infinity inf nan root
    """
)
_CHANGING = _HEDGES | _AMOUNTS
# Harmless later in a phrase, but right after the number they continue it.
_NOT_FIRST = _words("and to of squared cubed per over by divided multiplied raised times x")
_LEAD_CHANGING = _CHANGING | _words(
    "than over under above below up more less fewer from near close beyond exceeds to"
)
_LEAD_PLAIN = _words(
    """
    a total of exactly precisely simply just only therefore thus hence so it the answer final
    value usd us eur gbp cny rmb inr rs hk aud cad dollars
    """
)
_COPULAS = ("is", "are", "was", "were", "equals", "equal to", "gives", "get", "have", "obtain")
# Names of quantities may hold these: "log base two of x = 34".
_IN_NAMES = _words("pi sqrt sin cos tan log ln exp root base mod double third most least")

_UNIT_LETTERS = frozenset("mgshLlNJWVCFK")
_SHORT_WORDS = _words(
    """
    cm mm km dm nm kg mg cg ml cl dl hl ft in yd mi oz lb hr hp kw kj pa ms ns hz ha ac gm sq cu
    mb gb tb kb rs cc pc st nd rd th as at by he is it me my of on so we us an ok pm am qt pt to
    """
)
_GLUED_UNITS = _words(
    """
    cm mm km dm kg mg ml cl dl ft yd oz lb lbs hr hrs min mins sec secs kmh kph mph usd eur sq
    kwh hz khz mhz th st nd rd
    """
)
_HAN = r"㐀-䶿一-鿿"
_HAN_CHANGING = re.compile("[或和与及到至约万千百亿十半零一二三四五六七八九两不非无若余多]|分之")
_HAN_LEAD = re.compile(rf"[{_HAN}\s,，:“”]{{0,30}}(?:是|为|为:|有|得|共|等于|:)\s{{0,3}}")

_WORD = r"[^\W\d_]+(?:['\-][^\W\d_]+)*"
_TAIL = re.compile(
    rf"(?P<word>{_WORD})(?P<power>\s?\^\s?(?:\{{\s{{0,4}}-?[123]\s{{0,4}}\}}|-?[123](?![0-9])))?"
    rf"|(?P<slash>/)(?=\s?[^\W\d_])"
    rf"|(?P<space>\s+)"
    rf"|(?P<mark>[.,;:()\"'。，、！!…—–]|\.)"
)
_OPTION = re.compile(r"\(?[A-H][).:]")
_LETTERS = re.compile(_WORD)
_GREEK = re.compile("[Ͱ-Ͽἀ-῿\u2100-\u214f\U0001d400-\U0001d7ff]")
_EXCLAMATION = re.compile(r"\s{0,4}!")


def tail_keeps_value(tail: str) -> bool:
    """Whether what follows a number leaves its value alone: units, counted things, remarks."""
    if _EXCLAMATION.match(tail) or ".." in tail or "…" in tail or "、" in tail:
        return False  # a factorial, digits left out, a list
    if tail.count("(") != tail.count(")"):
        return False
    position = 0
    first = True
    glued = bool(tail) and not tail[0].isspace()
    after_degree = tail.startswith("°")
    if after_degree:
        position, glued = 1, False
    while position < len(tail):
        match = _TAIL.match(tail, position)
        if not match:
            return False
        word = match["word"]
        if word:
            attached = glued and position == 0
            if attached and not _glued_unit(word):
                return False
            known = attached and word.isascii() or after_degree and word in ("C", "F")
            if not known and not _word_keeps_value(word, first):
                return False
            if match["power"] and not _measures(word):
                return False
            first = False
        elif match["slash"] and first:
            return False
        elif match["mark"]:
            first = False
        position = match.end()
    return True


def lead_keeps_value(lead: str) -> bool:
    """Whether what stands before a number introduces it: "the total is", "exactly", "Rs."."""
    text = lead.strip()
    if not text:
        return True
    if lead[-1].isalnum() and lead[-1].isascii():
        return False  # points34
    if _OPTION.fullmatch(text):
        return True
    if _HAN_LEAD.fullmatch(text):
        return not _HAN_CHANGING.search(text)
    words = [word.lower() for word in _LETTERS.findall(text)]
    if any(character in text for character in "?!…≈<>≤≥≠±∓→|^_"):
        return False
    if any(word in _LEAD_CHANGING or word.endswith("n't") for word in words):
        return text.lower().endswith("equal to") and not set(words[:-1]) & _LEAD_CHANGING
    if text.endswith(":") or (words and text.lower().endswith(_COPULAS)):
        return True
    return all(word in _LEAD_PLAIN for word in words) and not re.search(r"[^\w\s.,]", text)


def names_something(words: list[str]) -> bool:
    """Whether the words left of an equals sign may name a quantity, alternatives excluded."""
    lowered = [word.lower() for word in words]
    return not any(word in _CHANGING - _IN_NAMES or word == "and" for word in lowered)


def _word_keeps_value(word: str, first: bool) -> bool:
    lowered = word.lower()
    if lowered in _CHANGING or lowered.endswith("n't") or _HAN_CHANGING.search(word):
        return False
    if any(part in _CHANGING for part in re.split(r"['\-]", lowered)):
        return False
    if first and lowered in _NOT_FIRST:
        return False
    if _GREEK.search(word):
        return len(word) > 1 and word[0] in "μµΩ"
    if not word.isascii():
        return True
    if len(word) == 1:
        return word in _UNIT_LETTERS or (not first and word in ("a", "I"))
    return len(word) > 2 or lowered in _SHORT_WORDS


def _glued_unit(word: str) -> bool:
    return word.lower() in _GLUED_UNITS or not word[0].isascii() or word in ("m", "g")


def _measures(word: str) -> bool:
    """Whether a word may carry the exponent of a unit: cm^2, units^2, s^{-2}."""
    return len(word) > 1 or word in _UNIT_LETTERS
