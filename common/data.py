"""Problems as the engine gets them: rows of data files, put into the template and tokenised.

What cannot be trained on is refused or left out before a run starts, and never silently:
`common/problem_files.py` reads the files, `common/order.py` says which ordinal is which row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.errors import DataError
from common.golds import read_gold
from common.log import get_logger
from common.problem_files import Problem, read_problems
from common.template import render
from verifier.math_answer import GoldError
from verifier.registry import UnknownChecker

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One problem, ready for the engine. `part` is the place of its file among those loaded."""

    text: str
    token_ids: npt.NDArray[np.int32]
    gold: str
    checker: str
    boxed: bool
    part: int = 0


def load_rows(
    paths: Iterable[str], tokenizer: Any, template: str, max_tokens: int, checker: str, boxed: bool,
    *, drop_long: bool = False,
) -> list[Row]:  # fmt: skip
    """Read, check and tokenise problem files.

    `checker` and `boxed` are for rows that do not say. A prompt of more than `max_tokens` is
    refused, or with `drop_long` left out; the log says how many were. None is ever cut.

    Raises:
        DataError: a file or a field is missing, a gold cannot be read, a prompt is too long, or a
            file has no row that can be used; the message names the file and the row.
    """
    rows: list[Row] = []
    for part, name in enumerate(paths):
        before, read, longest = len(rows), 0, 0
        for problem in read_problems(Path(name)):
            read += 1
            row = _row(problem, part, tokenizer, template, checker, boxed)
            length = len(row.token_ids)
            if length <= max_tokens:
                rows.append(row)
            elif drop_long:
                longest = max(longest, length)
            else:
                raise DataError(
                    f"{problem.where} has a prompt of {length} tokens; model.max_length leaves "
                    f"room for {max_tokens} before the response; raise model.max_length or remove "
                    "the row"
                )
        _tell_usable(name, read, len(rows) - before, longest, max_tokens)
    return rows


def _tell_usable(name: str, read: int, used: int, longest: int, max_tokens: int) -> None:
    if not read:
        raise DataError(f"no rows in {name}")
    if not used:
        raise DataError(
            f"no row of {name} is short enough: model.max_length leaves room for {max_tokens} "
            f"tokens of prompt, the longest has {longest}; raise model.max_length"
        )
    if used < read:
        log.warning("prompts that are too long are left out", file=name, left_out=read - used,
                    rows=read, longest=longest, room=max_tokens)  # fmt: skip


def _row(
    problem: Problem, part: int, tokenizer: Any, template: str, checker: str, boxed: bool
) -> Row:
    where, name = problem.where, problem.checker or checker
    if problem.gold is None:
        raise DataError(f"{where} has no gold: set `answer`, or remove the row")
    try:
        gold = read_gold(problem.gold, name)
        text = render(problem.prompt, tokenizer, template)
    except GoldError as error:
        raise DataError(
            f"{where} has a gold that cannot be read: {error}; mend it, or name a `checker` that "
            "can, such as math_verify; `dapo data prepare` finds all such rows"
        ) from None
    except (DataError, UnknownChecker) as error:
        raise DataError(f"{where}: {error}") from None
    ids = tokenizer.encode(text, add_special_tokens=template == "raw")
    if not ids:
        raise DataError(f"{where} has a prompt without a token; mend it or remove the row")
    boxes = boxed if problem.boxed is None else problem.boxed
    return Row(text, np.asarray(ids, dtype=np.int32), gold, name, boxes, part)


def require_distinct(rows: Iterable[Row], where: str) -> None:
    """Refuse evaluation data that holds a problem several times.

    Data sets such as AIME are handed around with each problem 32 times; sampled again, each would
    count as many problems, and the standard error would be far too small.

    Raises:
        DataError: two rows have the same prompt, white space aside; the message names `where`.
    """
    counts = Counter(" ".join(row.text.split()) for row in rows)
    repeats = sum(counts.values()) - len(counts)
    if repeats:
        often = max(counts.values())
        raise DataError(
            f"{where} repeats its problems: {sum(counts.values())} rows, {len(counts)} distinct "
            f"prompts, one of them {often} times; `dapo data prepare {where} --out NEW.jsonl` "
            "keeps each once, and the number of samples per problem is a setting of its own"
        )
