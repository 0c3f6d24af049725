"""Which scripts a text is written in, for a rough count of languages."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

ENOUGH = 5
"""Letters of a script from which on a text counts as written in it: a symbol is no language."""

_SCRIPTS = {
    "CJK": "han",
    "HIRAGANA": "kana",
    "KATAKANA": "kana",
    "HANGUL": "hangul",
    "CYRILLIC": "cyrillic",
    "ARABIC": "arabic",
    "HEBREW": "hebrew",
    "DEVANAGARI": "devanagari",
    "THAI": "thai",
}
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_NOT_PROSE = re.compile(r"\$\$.*?\$\$|\$.*?\$|\\\[.*?\\\]|\\\(.*?\\\)|\\[a-zA-Z]+|_+", re.DOTALL)
_PROSE = re.compile(r"[^\W\d]{2}|[一-鿿]")


@lru_cache(maxsize=1 << 14)
def _script(char: str) -> str | None:
    name = unicodedata.name(char, "")
    return _SCRIPTS.get(name.partition(" ")[0]) if char.isalpha() else None


def scripts(text: str) -> Counter[str]:
    """Letters by script, other than Latin; Greek is mathematics and not counted."""
    found = (_script(char) for char in _BEYOND_ASCII.findall(text))
    return Counter(script for script in found if script)


def has_prose(text: str) -> bool:
    """Whether there is a word outside of mathematics: an expression alone asks nothing."""
    return _PROSE.search(_NOT_PROSE.sub(" ", text)) is not None
