"""Markup taken off a claim: Markdown, LaTeX wrappers and spacing.

`undress` keeps everything that bears on the value (signs, fractions, powers, roots, words)
and drops what only dresses it. It is a single pass over the tokens with an explicit stack:
linear, and safe against a million nested braces.
"""

from __future__ import annotations

import re
import string


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WRAPPERS = _words(
    """boxed fbox framebox text textbf textit textrm textsf texttt textnormal textup
    mathrm mathbf mathit mathsf mathtt mathnormal mathbb mathcal boldsymbol bm pmb mbox hbox
    emph underline ensuremath mathord operatorname bold"""
)
# Their argument is no part of the answer.
_VOID = _words("phantom hphantom vphantom hspace vspace label tag color begin end vskip hskip")
_SIZES = _words(
    """left right big Big bigl bigr Bigl Bigr bigg Bigg biggl biggr Biggl Biggr limits
    middle"""
)
_DECLARATIONS = _words(
    """displaystyle textstyle scriptstyle bf rm it sf tt large Large LARGE huge Huge bfseries
    itshape centering thinspace enspace enskip checkmark blacksquare qed therefore pounds euro
    textdollar"""
)
_SYMBOLS = {
    **dict.fromkeys(_SIZES, ""),
    **dict.fromkeys(_DECLARATIONS, " "),
    **dict.fromkeys(_words("times cdot ast cdotp"), "*"),
    **dict.fromkeys(_words("circ degree"), "°"),
    **dict.fromkeys(_words("le leq leqslant"), "≤"),
    **dict.fromkeys(_words("ge geq geqslant"), "≥"),
    **dict.fromkeys(_words("ne neq"), "≠"),
    **dict.fromkeys(_words("approx sim simeq cong thickapprox approxeq"), "≈"),
    **dict.fromkeys(_words("dots ldots cdots dotsc dotsb ldotp"), "…"),
    **dict.fromkeys(_words("to rightarrow Rightarrow implies Longrightarrow iff"), "→"),
    **dict.fromkeys(_words("dfrac tfrac cfrac frac"), "\\frac"),
    **dict.fromkeys(_words("dbinom tbinom binom"), "\\binom"),
    **dict.fromkeys(_words("quad qquad newline hfill"), "  "),
    **{"div": "/", "pm": "±", "mp": "∓", "lt": "<", "gt": ">", "equiv": "≡", "colon": ":"},
    **{"lbrace": "[", "rbrace": "]", "lvert": "|", "rvert": "|", "percent": "%", "neg": "¬"},
}
_ESCAPES = {
    **dict.fromkeys(",;:> ", " "),
    **dict.fromkeys("()[]\\$", "  "),
    **{"!": "", "-": "", "/": "", "%": "%", "&": "&", "#": "#", "_": "_", "|": "|"},
    **{"{": "[", "}": "]"},
}
_SPACING = frozenset(",;:> !")

_TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|[{}]|[^\\{}]+|\\", re.DOTALL)
_EMPHASIS = re.compile(r"\*+|`+|__+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_SUBSCRIPT_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+")
_VULGAR = {
    **{"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5)},
    **{"⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8)},
    **{"⅝": (5, 8), "⅞": (7, 8), "⅑": (1, 9), "⅒": (1, 10)},
}
_SIGNS = str.maketrans(
    {
        **{char: f"\\frac{{{n}}}{{{d}}}" for char, (n, d) in _VULGAR.items()},
        **dict.fromkeys("×⋅∙·∗", "*"),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("⇒⟹⟶➜➡", "→"),
        **dict.fromkeys("≃≅∼", "≈"),
        **dict.fromkeys("∴✓✔✅☑∎■□▪⬛🎉🎯", " "),
        **dict.fromkeys("$€£¥₹₩¢", "  "),
        "&": "  ",
        **{"º": "°", "˚": "°", "℃": "° C", "℉": "° F", "⩽": "≤", "⩾": "≥"},
    }
)
_SPACE_RUN = re.compile(r"\s{2,}|[\t\n]")
_DEGREE = re.compile(r"\s?\^\s?(?:\{\s?°\s?\}|°)")
_ORDINAL = re.compile(r"\^\s?\{?\s{0,4}(st|nd|rd|th)\b\s{0,4}\}?")
_BEFORE_POWER = re.compile(r" {1,4}(?=\^)")
# A tilde is a space of TeX, except where it says "about".
_TILDE = re.compile(r"(?<=[^0-9\s~])~|~(?![0-9\s~$\\])|(?<=[0-9])~(?=[0-9])")
_OPERAND_ENDS = frozenset(string.ascii_letters + string.digits + ")]}")
_OPERAND_STARTS = frozenset(string.ascii_letters + string.digits + "([{")


def undress(claim: str) -> str:
    """The claim without Markdown and LaTeX dress.

    One space may separate groups of digits; wherever markup or a wide space stood between
    two things, at least two spaces are left, so that they are never read as one number.
    """
    text = _SPACE_RUN.sub(lambda m: "  " if "\n" in m[0] else " ", claim)
    text = _drop_emphasis(text)
    if "~" in text:
        text = _TILDE.sub(" ", text)
    if not text.isascii():
        text = _SUPERSCRIPT_RUN.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _SUBSCRIPT_RUN.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    text = text.translate(_SIGNS)
    if any(char in text for char in "\\{}"):
        writer = _Writer()
        for token in _TOKEN.findall(text):
            writer.take(token)
        text = "".join(writer.out)
    text = _ORDINAL.sub(r" \1 ", _DEGREE.sub("°", text))
    return _BEFORE_POWER.sub("", text)


def _drop_emphasis(text: str) -> str:
    """Without emphasis marks; a run between two operands (9**9, 1__0) or spaces is kept."""

    def replace(match: re.Match[str]) -> str:
        before = text[match.start() - 1 : match.start()]
        after = text[match.end() : match.end() + 1]
        if match[0][0] == "`":
            return "  "
        bound = before in _OPERAND_ENDS and after in _OPERAND_STARTS
        free = before == after == " " and match[0] == "*"
        return match[0] if bound or free else "  "

    return _EMPHASIS.sub(replace, text).strip().strip("_").strip()


class _Writer:
    """Writes the undressed text, token by token.

    `frames` holds one entry per open brace: what it is and where its content begins in `out`.
    `pending` says what the next brace is: the argument of a wrapper, of a void command, of a
    command that keeps its braces (`keep` counts how many more), or nothing.
    """

    def __init__(self) -> None:
        self.out: list[str] = []
        self.frames: list[tuple[str, int, int]] = []
        self.pending = ""
        self.keep = 0
        self.swallow_space = False

    def take(self, token: str) -> None:
        if token == "{":
            self._open()
        elif token == "}":
            self._close()
        elif token[0] == "\\" and len(token) > 1:
            self._command(token[1:])
        else:
            self._plain(token)

    def _plain(self, token: str) -> None:
        if self.swallow_space:
            token = token.lstrip()
            self.swallow_space = False
        stripped = token.strip()
        if not stripped:
            if token and not (self.out and self.out[-1].endswith(" ")):
                self.out.append(token)
            return
        self.out.append(token)
        bare_argument = self.pending == "keep" and self.keep > 1 and len(stripped) == 1
        awaits = bare_argument or stripped[-1] in "^_"
        self.pending, self.keep = ("keep", 1) if awaits else ("", 0)

    def _command(self, name: str) -> None:
        if not name[0].isalpha():
            if name in _SPACING and self.out and self.out[-1].endswith(" ") and name != "!":
                self.swallow_space = True
                return
            self.out.append(_ESCAPES.get(name, "\\" + name))
            self.swallow_space = name in _SPACING
            self.pending = ""
            return
        name = name.rstrip("*")
        self.swallow_space = False
        if name in _WRAPPERS:
            self.pending = "wrap"
        elif name in _VOID:
            self.pending = "void"
        elif name == "textcolor":
            self.pending = "color"
        elif name in _SYMBOLS:
            symbol = _SYMBOLS[name]
            self.out.append(symbol)
            self.pending, self.keep = ("keep", 2) if symbol[:1] == "\\" else ("", 0)
        else:
            self.out.append("\\" + name)
            self.pending, self.keep = "keep", 1

    def _open(self) -> None:
        self.swallow_space = False
        kind = self.pending or "plain"
        if kind == "keep":
            self.out.append("{")
        elif kind == "wrap":
            self.out.append("  ")
        self.frames.append((kind, len(self.out), self.keep))
        self.pending, self.keep = "", 0

    def _close(self) -> None:
        self.swallow_space = False
        self.pending, self.keep = "", 0
        if not self.frames:
            return
        kind, start, keep = self.frames.pop()
        if kind == "keep":
            self.out.append("}")
            if keep > 1:
                self.pending, self.keep = "keep", keep - 1
        elif kind in ("void", "color"):
            del self.out[start:]
            self.pending = "wrap" if kind == "color" else ""
        elif kind == "wrap" and self._only(start) in (",", "."):
            self.out[start - 1 :] = [self.out[start].strip()]
        elif kind == "wrap":
            self.out.append("  ")
        elif self._only(start) == ",":
            self.swallow_space = True

    def _only(self, start: int) -> str:
        """The content since `start` if it is a single piece, without its spaces."""
        return self.out[start].strip() if len(self.out) == start + 1 else ""
