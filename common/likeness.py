"""When two problems are the same: by their text, by their notation, by their words.

White space never counts. Notation (dollar signs, spacing commands, punctuation, case) differs
between copies of one problem, but operators do not. Similarity by words also finds the copies
that were worded anew, as when a question for a fraction was turned into one for an integer.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

WORDS = 5
"""Length of the runs of words that are compared."""

_FIGURE = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_WORD = re.compile(r"[一-鿿]|[^\W_一-鿿]+")
_FRACTION = re.compile(r"\\[dt]frac(?![a-z])")
_NOTATION = re.compile(
    r"""\\(?:left|right|displaystyle)(?![a-z])
    |\\[,;!:\ ()\[\]]       # spacing commands, delimiters of mathematics
    |[\s${}.,:;?!"'“”‘’()、，。]
    """,
    re.VERBOSE,
)


def has_figure(text: str) -> bool:
    """Whether a prompt carries the code of a figure."""
    return "[asy]" in text


def collapse(text: str) -> str:
    """The text with each run of white space made one space."""
    return " ".join(text.split())


def fold_notation(text: str) -> str:
    """The text without what copies of one problem differ in; operators and signs stay."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return _NOTATION.sub("", _FRACTION.sub(r"\\frac", text))


def word_runs(text: str) -> frozenset[tuple[str, ...]]:
    """All runs of `WORDS` words; a Han character is a word, and code of a figure is none."""
    plain = unicodedata.normalize("NFKC", _FIGURE.sub(" ", text)).casefold()
    words = _WORD.findall(plain)
    last = max(1, len(words) - WORDS + 1)
    return frozenset(tuple(words[start : start + WORDS]) for start in range(last))


class Match(NamedTuple):
    """The most similar problem: its number among those given, and how similar it is, to 1."""

    number: int
    similarity: float


class Likeness:
    """Finds, of some problems, the one whose words are most like those of another text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._sizes: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = {}
        for number, text in enumerate(texts):
            runs = word_runs(text)
            self._sizes.append(len(runs))
            for run in runs:
                self._holders.setdefault(run, []).append(number)

    def most_similar(self, text: str) -> Match | None:
        """By the Jaccard similarity of the word runs; None if no run is shared."""
        runs = word_runs(text)
        shared: Counter[int] = Counter()
        for run in runs:
            shared.update(self._holders.get(run, ()))
        found = (
            Match(number, count / (len(runs) + self._sizes[number] - count))
            for number, count in shared.items()
        )
        return max(found, key=lambda match: (match.similarity, -match.number), default=None)
