"""The published DAPO scorer's verdicts, false ones included, for reproducing results.

Written from a description of the scorer in verl (2026-08): the last 300 characters, the last
"answer:" anywhere in them, a fixed list of deletions, then equality of strings. Its options
are fixed; those of the strict checker are accepted and ignored, so that either can be named
in a data row. Use `verifier.math_answer` for training.
"""

from __future__ import annotations

import re

from verifier.outcome import Verdict, shorten

_TAIL_CHARS = 300
_BOX_TAIL_CHARS = 100

_CLAIM = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACEMENTS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)

_DELETIONS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *("\\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)

_DOLLAR_PAIR = re.compile(r"\$[^$\n]*\$")
_UNWRAPPED = tuple(re.compile(p) for p in (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}"))
_OVERLINE = re.compile(r"\\overline\{(.*?)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}")
_BARE_FRAC = re.compile(r"frac([^{])(.)")
_BARE_SQRT = re.compile(r"sqrt([^{])")


def check(
    response: str,
    gold: str,
    *,
    boxed: bool = True,
    exact_arithmetic: bool = False,
    truncated: bool = False,
) -> Verdict:
    """The published scorer's verdict on `response`; the keyword options have no effect."""
    del boxed, exact_arithmetic, truncated
    tail = response[-_TAIL_CHARS:]
    claims = _CLAIM.findall(tail)
    if claims:
        claim, reference = normalise(claims[-1]), normalise(str(gold))
        if claim == reference:
            return Verdict("correct", shorten(claim), "line", "equal strings")
        return Verdict("wrong", shorten(claim), "line", f"not {shorten(reference)!r}")
    content = _last_box(tail[-_BOX_TAIL_CHARS:])
    if content is None:
        return Verdict("no_answer", reason='no "answer:" in the tail and no box')
    if content == str(gold):
        return Verdict("correct", shorten(content), "box", "equal strings")
    return Verdict("wrong", shorten(content), "box", "not the gold as it stands")


def normalise(text: str) -> str:
    """The scorer's normal form of a claim or a gold. Not idempotent, as published."""
    text = text.split("=")[-1]
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    for phrase in _DELETIONS:
        text = text.replace(phrase, "")
    pair = _DOLLAR_PAIR.search(text)
    if pair:
        text = pair.group()
    for pattern in (*_UNWRAPPED, _OVERLINE, _BOXED):
        text = pattern.sub(r"\1", text)
    text = _BARE_FRAC.sub(r"frac{\1}{\2}", text)
    text = _BARE_SQRT.sub(r"sqrt{\1}", text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    if without_commas.isdigit():
        text = without_commas
    return text.strip()


def _last_box(tail: str) -> str | None:
    """The content of the last `\\boxed{` in `tail`; None if it has none or it is not closed."""
    start = tail.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position in range(start, len(tail)):
        if tail[position] == "{":
            depth += 1
        elif tail[position] == "}":
            depth -= 1
            if depth == 0:
                return tail[start:position]
    return None
