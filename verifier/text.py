"""A response as plain text: Unicode folded, special tokens dropped, thoughts cut off.

Every step is linear in the length of the text. Only forms that mean the same are folded:
full-width forms, kinds of minus, kinds of space. Superscripts, subscripts, fractions and
enclosed digits keep their meaning, which is why NFKC is not used on whole texts.
"""

from __future__ import annotations

import re
import unicodedata

_MINUS = "‐‑‒–−⁃˗➖﹘﹣－"
_COLONS = "∶︰꞉ː：﹕"
_LINE_BREAKS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff\ufe0e\ufe0f"
_QUOTES = "“”„‟«»＂「」『』"
_APOSTROPHES = "‘’‚‛′＇"


def _fold_table() -> dict[int, str]:
    table: dict[int, str] = {}
    for low, high in ((0xFF01, 0xFF5E), (0xFE50, 0xFE6B), (0xFFE0, 0xFFE6), (0x1D7CE, 0x1D7FF)):
        for code in range(low, high + 1):
            plain = unicodedata.normalize("NFKC", chr(code))
            if len(plain) == 1 and plain != "、":
                table[code] = plain
    for code in (0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000):
        table[code] = " "
    for code in (*range(0x00, 0x09), *range(0x0E, 0x1C), 0x1F, 0x7F, *range(0x80, 0x85)):
        table[code] = " "
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A)):
        table[code] = ""
    for chars, plain in (
        (_MINUS, "-"),
        (_COLONS, ":"),
        (_LINE_BREAKS, "\n"),
        (_INVISIBLE, ""),
        (_APOSTROPHES, "'"),
        (_QUOTES, '"'),
    ):
        table.update(dict.fromkeys(map(ord, chars), plain))
    return table


_FOLD = _fold_table()
# An em dash is punctuation, except right before a digit where nothing stands before it.
_DASH_AS_MINUS = re.compile(r"(?<![\w)\]}])[—―](?=[0-9])")

_SPECIAL_TOKEN = re.compile(
    r"<(?=[|/a-z])(?:\|[^|<>\s]{1,60}\||/?s|/?answer|pad|eos|bos|unk|mask|sep|cls|eot"
    r"|(?:end|start|begin)_of_(?:turn|text|sentence))>"
    r"|\[(?:PAD|EOS|BOS|UNK|MASK|SEP|CLS|/?INST)\]",
    re.IGNORECASE,
)
# HTML that only dresses the text, as Markdown does; <sup> and <sub> would change a value.
_DRESS_TAG = re.compile(
    r"<(?=[/a-z])/?(?:b|strong|i|em|u|p|br|code|center|mark|div|span)\s{0,2}/?>", re.IGNORECASE
)
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)


def fold(text: str) -> str:
    """`text` with full-width forms, minus signs, spaces and line breaks in one form each."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_FOLD)
    return text if text.isascii() else _DASH_AS_MINUS.sub("-", text)


def visible(response: str) -> str | None:
    """What of a response may hold its answer; None if a thought was opened and never closed.

    A special token ends what stands before it, so it becomes a line break and never glues
    digits together. Tags of the `<answer>` format are dropped in the same way: alone they
    claim nothing here.
    """
    text = _SPECIAL_TOKEN.sub("\n", fold(response))
    thoughts = list(_THOUGHT.finditer(text))
    if thoughts:
        if not thoughts[-1].group(1):
            return None
        text = text[thoughts[-1].end() :]
    return _DRESS_TAG.sub(" ", text)
