"""Problem files: JSONL and parquet, in the schemas that data sets of this field come in.

A row has a prompt (`prompt`, `question` or `problem`: text, or a list of chat messages that ends
with the user's) and a gold (`answer`, or `ground_truth` inside `reward_model`, as verl has it).
It may name its `source` (or `data_source`), its `checker` and whether a box counts (`boxed`).
Golds are handed on as found; `common/golds.py` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import DataError

PROMPT_KEYS = ("prompt", "question", "problem")
COLUMNS = (*PROMPT_KEYS, "answer", "reward_model", "source", "data_source", "checker", "boxed")
ROLES = ("system", "user", "assistant")
GSM8K_MARK = "####"
"""In GSM8K's own files the gold stands after this mark, behind the solution."""
PARQUET_ROWS = 4096
"""Rows of a parquet file in memory at a time."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


Conversation = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of a file. `gold` is the raw value; None where the row has none."""

    where: str
    prompt: Conversation
    gold: Any
    source: str
    checker: str | None = None
    boxed: bool | None = None

    @property
    def text(self) -> str:
        """What the conversation says, without its roles."""
        return "\n\n".join(message.content for message in self.prompt)


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of a file, one after the other; parquet by its suffix, else JSONL.

    Raises:
        DataError: the file cannot be read, or a row is no problem; the message names the file
            and the row (a line of JSONL, or a row of parquet counted from 1).
    """
    rows = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    for number, row in rows:
        yield _problem(row, f"{path}, row {number}", path.stem)


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"data file {path} cannot be opened ({error.strerror})") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # a UnicodeDecodeError is one
                raise DataError(f"{path}, row {number} is no JSON object: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number} is no JSON object")
            yield number, row


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise DataError(f"data file {path} cannot be opened (no such file)")
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in COLUMNS]
            number = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None


def _problem(row: Mapping[str, Any], where: str, stem: str) -> Problem:
    checker, boxed = row.get("checker"), row.get("boxed")
    if not isinstance(checker, str | None) or not isinstance(boxed, bool | None):
        raise DataError(f"{where}: `checker` must be a name and `boxed` true or false")
    source = str(row.get("source") or row.get("data_source") or stem)
    problem = Problem(where, _conversation(row, where), _gold(row, where), source, checker, boxed)
    if not _is_text(f"{problem.text}{problem.gold}{source}"):
        raise DataError(f"{where} holds a lone surrogate, which is no text; mend or remove the row")
    return problem


def _is_text(text: str) -> bool:
    """Whether there is a UTF-8 form; JSON can spell characters that have none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _conversation(row: Mapping[str, Any], where: str) -> Conversation:
    prompt = next((row[key] for key in PROMPT_KEYS if row.get(key)), None)
    if isinstance(prompt, str):
        return (Message("user", prompt),)
    messages = prompt if isinstance(prompt, list) else []
    turns = tuple(
        Message(message["role"], message["content"])
        for message in messages
        if isinstance(message, dict)
        and message.get("role") in ROLES
        and isinstance(message.get("content"), str)
    )
    if not turns or len(turns) != len(messages) or turns[-1].role != "user" or not turns[-1][1]:
        raise DataError(
            f"{where} has no `prompt` text (or `question`, or `problem`), and no list of messages "
            "{role, content} that ends with the user's; add one or remove the row"
        )
    return turns


def _gold(row: Mapping[str, Any], where: str) -> Any:
    gold = row.get("answer")
    if gold in (None, "") and isinstance(row.get("reward_model"), dict):
        gold = row["reward_model"].get("ground_truth")
    if isinstance(gold, str) and GSM8K_MARK in gold:
        gold = gold.rpartition(GSM8K_MARK)[2].strip()
    if isinstance(gold, (dict, list)):
        raise DataError(
            f"{where} has an `answer` that is neither a text nor a number; write what a checker "
            "is to read of it as a text of JSON"
        )
    return None if gold == "" else gold
