"""Problems: JSONL rows, the prompt template, and which ordinal is which problem.

Ordinal to row is a pure function of seed and data: epoch after epoch, each shuffled anew. A
prompt whose group was lost or failed comes back under an ordinal of its own, `recycled(o)`,
from which its row follows by the same function.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import DataError
from verifier import registry
from verifier.math_answer import GoldError, normalise_gold

STRICT_GOLDS = ("math", "math_dapo_compat")
"""Checkers whose golds must be numbers that the strict checker can read."""

RECYCLE = 1 << 40
"""Ordinals below are the sequence of the data; each multiple above is one more return."""

DAPO_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    '{prompt}\n\nRemember to put your answer on its own line after "Answer:".'
)


@dataclass(frozen=True, slots=True)
class Row:
    """One problem, ready for the engine."""

    text: str
    token_ids: npt.NDArray[np.int32]
    gold: str
    checker: str
    boxed: bool


def load_rows(
    paths: Iterable[str], tokenizer: Any, template: str, max_tokens: int, checker: str, boxed: bool
) -> list[Row]:
    """Read, check and tokenise problem files.

    Raises:
        DataError: a file or a field is missing, a gold cannot be read, a prompt is too long; the
            message names the file and the row.
    """
    rows: list[Row] = []
    names = list(paths)
    for name in names:
        for where, item in _items(Path(name)):
            gold = item.get("answer")
            row_checker = item.get("checker", checker)
            if not isinstance(item.get("prompt"), str) or not item["prompt"]:
                raise DataError(f"{where} has no `prompt` text; add one or remove the row")
            if not isinstance(row_checker, str) or not isinstance(item.get("boxed", boxed), bool):
                raise DataError(f"{where}: `checker` must be a name and `boxed` true or false")
            if gold is None or gold == "":
                raise DataError(f"{where} has no gold: set `answer`, or remove the row")
            if registry.get(row_checker).name in STRICT_GOLDS:
                gold = _gold(gold, where)
            text = render(item["prompt"], tokenizer, template)
            ids = tokenizer.encode(text, add_special_tokens=template == "raw")
            if not ids:
                raise DataError(f"{where} has a prompt without a token; mend it or remove the row")
            if len(ids) > max_tokens:
                raise DataError(
                    f"{where} has a prompt of {len(ids)} tokens; model.max_length leaves room for "
                    f"{max_tokens} before the response; raise model.max_length or remove the row"
                )
            tokens = np.asarray(ids, dtype=np.int32)
            rows.append(Row(text, tokens, str(gold), row_checker, item.get("boxed", boxed)))
    if not rows:
        raise DataError(f"no rows in {', '.join(names)}")
    return rows


def _items(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise DataError(f"data file {path} cannot be opened ({error.strerror})") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, row {number}"
            try:
                item = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is no JSON object: {error}") from None
            if not isinstance(item, dict):
                raise DataError(f"{where} is no JSON object")
            yield where, item


def _gold(gold: Any, where: str) -> str:
    try:
        return normalise_gold(gold)
    except GoldError as error:
        raise DataError(
            f"{where} has a gold that cannot be read: {error}; mend it, or name a `checker` that "
            "can, such as math_verify"
        ) from None


def render(prompt: str, tokenizer: Any, template: str) -> str:
    """The text that the model continues."""
    if template == "raw":
        return prompt
    content = DAPO_TEMPLATE.format(prompt=prompt) if template == "dapo" else prompt
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"data.template = {template!r} needs a chat template, and the tokenizer has none; "
            'use data.template = "raw"'
        )
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return text


def recycled(ordinal: int) -> int:
    """The ordinal under which the prompt of a lost group comes back."""
    return ordinal + RECYCLE


def base_ordinal(ordinal: int) -> int:
    """The place in the sequence of the data."""
    return ordinal % RECYCLE


def generation(ordinal: int) -> int:
    """How often the prompt has come back."""
    return ordinal // RECYCLE


class Sequence:
    """The order of problems: `row(ordinal)` for a data set of `size` rows."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def row(self, ordinal: int) -> int:
        """Index of the row of an ordinal, in [0, size)."""
        epoch, place = divmod(base_ordinal(ordinal), self.size)
        if epoch not in self._epochs:
            if len(self._epochs) > 3:
                self._epochs.pop(min(self._epochs))
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            self._epochs[epoch] = order
        return int(self._epochs[epoch][place])
