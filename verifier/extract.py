"""Where the answer of a response is.

A line that begins with "Answer:" claims the rest of it, or the next non-empty line or display
block; the last claim that has content wins. Without such a line the last balanced `\\boxed{}`
counts, where the row allows it. A number that is only mentioned is no claim. Lines are read
from the end, and nothing is scanned more than a fixed number of times, so the time is linear.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from verifier.outcome import Where
from verifier.surface import undress
from verifier.text import visible

_LINE_CLAIM = re.compile(
    r"""
    [\s>\#*_`•·▪◦●○■◆★✦✅🔹→|+\-]{0,40}          # quote, heading, list and emphasis marks
    (?:\(?[0-9]{1,3}[.)]\s{0,4}[*_`\#\s]{0,10})?  # a numbered list
    (?:\\\(|\\\[|\$){0,2}\s{0,4}
    (?:\\(?:text|textbf|textit|mathbf|mathrm|boldsymbol|underline|emph)\s?\{\s{0,4})?
    [*_`]{0,6}
    (?:final[\s*_`]{0,6}answer|answer|(?:最终|最后|最終|最後)?\s{0,2}的?\s{0,2}答案)
    [\s*_`}]{0,20}:
    """,
    re.IGNORECASE | re.VERBOSE,
)
_INNER_CLAIM = re.compile(
    r"(?:\b(?:so|the|my|our|thus|hence|therefore)[\s,*]{1,3}){0,3}"
    r"(?:\bfinal[\s*_`]{0,6})?(?:\banswer|(?:最终|最后)?答案)[\s*_`}]{0,20}:",
    re.IGNORECASE,
)
_HINT = re.compile(r"answer|答案", re.IGNORECASE)

# "Answer: $Answer (without quotes) where …", "Answer: <your answer>", "Answer: \\boxed{answer}"
_VARIABLE = re.compile(
    r"\s{0,4}\$\s?\\?(?:your_?|final_?)?answer\b(?!\s{0,4}(?:is\b|=|:))", re.IGNORECASE
)
_PLACEHOLDER = re.compile(
    r"[^\w]{0,20}(?:boxed[^\w]{0,3})?"
    r"(?:(?:insert|put|your|the|final|correct|write)[\W_]{1,4}){0,4}"
    r"(?:answer|number|value|integer|result)\b"
    r"(?!\s{0,4}(?:is\b|are\b|equals\b|=|:))",
    re.IGNORECASE,
)
_TEMPLATE = re.compile(
    r"[\s$\\(\[*`]{0,8}(?:boxed\s?\{)?\s{0,4}[<\[{][a-z _-]{0,40}"
    r"(?:answer|number|value|integer|result|solution|insert)[a-z _-]{0,40}[>\]}]\W{0,12}",
    re.IGNORECASE,
)
_DIGIT = re.compile(r"[0-9]")
# Remarks about an answer already given ("Answer: verified."): they claim nothing.
_REMARK = re.compile(
    r"\W{0,8}(?:verified|checked|confirmed|done|correct|as\sabove|see\sabove|same\sas\sabove"
    r"|as\s(?:stated|given|shown|found|computed)(?:\sabove)?)\W{0,8}",
    re.IGNORECASE,
)
_CONTENT = re.compile(r"[^\W_]|[∞∅]")

_BLOCK_LINES = 40
# A claim that says nothing in so many characters says nothing.
_CONTENT_WINDOW = 2000

# Boxes that are looked at: those before the last with content can only be its alternatives.
_MAX_BOXES = 20
_BOX_START = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_BOX_TOKEN = re.compile(rf"({_BOX_START.pattern})|(\{{)|(\}})|\\.", re.DOTALL)
# What between two boxes makes them alternatives of one claim: "or", "and", a comma, "y =".
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;/&|~()\[\]\\]|\bor\b|\band\b|\bthen\b|\beither\b|\bmaybe\b|\bpossibly\b|\bperhaps\b"
    r"|\balternatively\b|\balso\b|\bto\b|\bvs\b|text|quad|qquad|[{}]|或者?|和|、|\b[A-Za-z]\s{0,3}=)*"
)
_CONNECTIVE = re.compile(r"\bor\b|\band\b|,|或|和|、")
_AFTER_BOX = re.compile(
    r"[\s$\\)\]]{0,8}(?:or|and|或|和)[\s$\\(\[]{1,8}[+-]?\s{0,2}[0-9]", re.IGNORECASE
)
_BEFORE_BOX = re.compile(r"[0-9][\s$\\)\]]{0,6}(?:or|或)[\s$\\(\[]{0,6}$", re.IGNORECASE)
# What right after a box changes its value.
_FACTOR_AFTER_BOX = re.compile(
    r"\s{0,3}[$)\]\\]{0,3}\s{0,3}\\?%"
    r"|[\s$\\)\]]{0,8}(?:percent|hundred|thousand|million|billion|trillion|dozen)\b"
    r"|\s{0,3}(?:\\pi|\\sqrt|\\frac|\\times|\\cdot|/\s?[0-9\\({]|\^(?!\s{0,2}\{?\s{0,2}(?:\\circ|°)))"
    r"|[A-Za-z](?![A-Za-z])|_[0-9{]",
    re.IGNORECASE,
)
_MINUS_BEFORE_BOX = re.compile(r"(?:[=$({\[]|\\\(|\\\[)\s{0,3}-\s?$")


@dataclass(frozen=True, slots=True)
class Claim:
    """What claims to be the answer: one text, or several for several claims in one place."""

    texts: tuple[str, ...]
    where: Where

    @property
    def text(self) -> str:
        return " ".join(self.texts).strip()


def locate(response: str, *, boxed: bool = True, truncated: bool = False) -> Claim | None:
    """The winning claim of a response, or None when nothing claims to be the answer.

    With `truncated` (the engine's finish reason was "length") a claim counts only if it was
    written completely: its line ended, or its math or box was closed.
    """
    text = visible(response)
    if text is None:
        return None
    claim, text = _line_claim(text, truncated)
    if claim is None and boxed:
        claim = _box_claim(text)
    return claim


def has_content(text: str) -> bool:
    """Whether a claimed text says something: not only markup, a template, or a remark."""
    text = text.strip()[:_CONTENT_WINDOW]
    if not text:
        return False
    if _VARIABLE.match(text) or (_PLACEHOLDER.match(text) and not _DIGIT.search(text)):
        return False
    if _TEMPLATE.fullmatch(text) or _REMARK.fullmatch(text):
        return False
    return _CONTENT.search(undress(text)) is not None


def _line_claim(text: str, truncated: bool) -> tuple[Claim | None, str]:
    """The claim of an "Answer:" line, and the text without a last claim that was cut off."""
    if not _HINT.search(text):
        return None, text
    lines = text.split("\n")
    end = len(lines)
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index].lstrip()
        if not _HINT.search(line, 0, 160):
            continue
        marker = _LINE_CLAIM.match(line)
        if not marker:
            continue
        claimed, last = _claimed(line[marker.end() :], lines, index + 1, end)
        end = index
        if last == len(lines) - 1 and not _complete(claimed, truncated):
            text = "\n".join(lines[:index])
            continue
        texts = _INNER_CLAIM.split(claimed) if _HINT.search(claimed) else [claimed]
        pieces = tuple(piece for piece in texts if has_content(piece))
        if pieces:
            return Claim(pieces, "line"), text
    return None, text


def _claimed(rest: str, lines: list[str], start: int, end: int) -> tuple[str, int]:
    """What a marker claims, given the rest of its line, and the index of the last line of it.

    `lines[start:end]` are the lines up to the next marker.
    """
    index = start - 1
    if not _says_something(rest):
        for index in range(start, end):
            if _says_something(lines[index]):
                break
        else:
            return rest, start - 1
        rest = lines[index]
        if lines[start - 1].lstrip().startswith(">"):
            rest = rest.lstrip("> ")
    balance = _Balance().add(rest)
    block = [rest]
    stop = min(end, index + 1 + _BLOCK_LINES)
    for later in range(index + 1, stop):
        if not balance.open:
            break
        block.append(lines[later])
        balance.add(lines[later])
    if balance.open:  # up to the end of the response it was cut off, else it is sloppy
        return rest, stop - 1 if stop == len(lines) else index
    return "\n".join(block), index + len(block) - 1


def _says_something(line: str) -> bool:
    """Whether a line has content, or opens something that may have it on the next lines."""
    line = line.strip()
    if not line:
        return False
    if _Balance().add(line).open:
        return True
    return _CONTENT.search(undress(line[:_CONTENT_WINDOW])) is not None


class _Balance:
    """Counts what a claim opens and does not close: braces, LaTeX math, `$$`."""

    def __init__(self) -> None:
        self.braces = self.math = self.display = self.dollars = 0

    def add(self, line: str) -> _Balance:
        if "\\\\" in line:
            line = line.replace("\\\\", "  ")
        count = line.count
        braces = count("{") - count("\\{") - count("}") + count("\\}")
        self.braces = max(0, self.braces + braces)
        self.math = max(0, self.math + count("\\(") - count("\\)"))
        self.display = max(0, self.display + count("\\[") - count("\\]"))
        self.dollars ^= count("$$") % 2
        return self

    @property
    def open(self) -> bool:
        return bool(self.braces or self.math or self.display or self.dollars)


def _complete(claimed: str, truncated: bool) -> bool:
    """Whether a claim that reaches the end of the response was written to its end.

    Without a finish reason an open brace or delimiter still shows that it was not.
    """
    if _Balance().add(claimed).open:
        return False
    if not truncated:
        return True
    closed = claimed.rstrip(" *_`").endswith(("$", "\\)", "\\]", "}"))
    return closed and claimed.count("$") % 2 == 0


def _box_claim(text: str) -> Claim | None:
    boxes = _balanced_boxes(text)[-_MAX_BOXES:]
    while boxes and not has_content(text[boxes[-1][1] : boxes[-1][2]]):
        boxes.pop()
    if not boxes:
        return None
    opened, start, end = boxes[-1]
    content = text[start:end]
    before, after = text[max(0, opened - 40) : opened], text[end + 1 : end + 60]
    if _MINUS_BEFORE_BOX.search(before):
        content = f"-{content.lstrip()}"
    factor = _FACTOR_AFTER_BOX.match(after)
    if factor:
        content = f"{content} {factor[0]}"
    texts = [content]
    for (_, first, last), (following, _, _) in zip(boxes[-2::-1], boxes[:0:-1], strict=False):
        gap = text[last + 1 : following]
        if len(texts) > 2 or not _alternatives(gap):
            break
        if has_content(text[first:last]):
            texts.insert(0, text[first:last])
    alternative = _AFTER_BOX.match(after) or _BEFORE_BOX.search(before)
    if alternative:
        texts.append(alternative[0])
    return Claim(tuple(texts), "box")


def _alternatives(gap: str) -> bool:
    """Whether what stands between two boxes makes them parts of one claim."""
    if len(gap) > 80 or ("\n" in gap and not _CONNECTIVE.search(gap)):
        return False
    return _BETWEEN_BOXES.fullmatch(gap) is not None


def _balanced_boxes(text: str) -> list[tuple[int, int, int]]:
    """The outermost balanced boxes as (start of command, start and end of content), in order."""
    first = _BOX_START.search(text)
    if not first:
        return []
    stack: list[re.Match[str] | None] = []
    boxes: list[tuple[int, int, int]] = []
    for match in _BOX_TOKEN.finditer(text, first.start()):
        kind = match.lastindex
        if kind == 1:
            stack.append(match)
        elif kind == 2:
            stack.append(None)
        elif kind == 3 and stack:
            box = stack.pop()
            if box:
                while boxes and boxes[-1][0] > box.start():
                    boxes.pop()
                boxes.append((box.start(), box.end(), match.start()))
    return boxes
