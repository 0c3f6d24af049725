"""Problem files: the schemas that are read, and how a row that is none is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import DataError
from common.problem_files import Problem, read_problems

VERL = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "What is 2+2?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b"},
}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(path: Path, *rows: Any) -> list[Problem]:
    """Write rows in the format that the suffix says, and read them back."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_problems(path))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "gold", "source"),
    [
        (VERL, "4", "math_dapo"),
        ({"prompt": "What is 2+2?", "answer": "4", "source": "sums"}, "4", "sums"),
        ({"question": "What is 2+2?", "answer": "2 and 2 are <<2+2=4>>4.\n#### 4"}, "4", "f"),
        ({"problem": "What is 2+2?", "solution": "Count.", "answer": 4}, 4, "f"),
        ({"prompt": "What is 2+2?", "reward_model": {"ground_truth": "4"}}, "4", "f"),
    ],
)
def test_the_schemas_of_the_field_are_read_alike_from_jsonl_and_parquet(
    tmp_path: Path, suffix: str, row: dict[str, Any], gold: Any, source: str
) -> None:
    (problem,) = read(tmp_path / f"f.{suffix}", row)
    assert problem.text == "What is 2+2?"
    assert (problem.gold, problem.source) == (gold, source)
    assert (problem.checker, problem.boxed) == (None, None)
    assert problem.where == f"{tmp_path}/f.{suffix}, row 1"


def test_a_conversation_keeps_its_turns(tmp_path: Path) -> None:
    (problem,) = read(tmp_path / "f.jsonl", VERL | {"prompt": [SYSTEM, *VERL["prompt"]]})
    assert [message.role for message in problem.prompt] == ["system", "user"]
    assert problem.text == "Be brief.\n\nWhat is 2+2?"


def test_columns_that_only_some_rows_of_a_parquet_file_fill_may_be_null(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1", "checker": "math_verify"}, {"prompt": "b"}]
    named, other = read(tmp_path / "f.parquet", *rows)
    assert (named.checker, other.checker, other.gold) == ("math_verify", None, None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{nonsense", "is no JSON object"),
        ("[1]", "is no JSON object"),
        ('{"prompt": "\xff", "answer": "1"}', "is no JSON object"),
        ('{"answer": "1"}', "has no `prompt` text"),
        ('{"prompt": "p", "answer": {"terms": [1]}}', "neither a text nor a number"),
        ('{"prompt": "", "answer": "1"}', "has no `prompt` text"),
        ('{"prompt": ["a"], "answer": "1"}', "has no `prompt` text"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "has no `prompt` text"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', "ends with the user's"),
        ('{"prompt": "a", "answer": "1", "boxed": "yes"}', "`boxed` true or false"),
        ('{"prompt": "a", "answer": "1", "checker": 3}', "`checker` must be a name"),
        ('{"prompt": "\\ud800", "answer": "1"}', "holds a lone surrogate"),
    ],
)
def test_a_row_that_is_no_problem_is_named_with_its_file_and_line(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"prompt": "fine", "answer": "1"}\n\n' + line.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        list(read_problems(path))
    assert f"{path}, row 3" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["f.jsonl", "f.parquet"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name} cannot be opened \([Nn]o such file"):
        list(read_problems(tmp_path / name))


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "f.parquet").write_text('{"prompt": "a", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"f\.parquet cannot be read as parquet"):
        list(read_problems(tmp_path / "f.parquet"))
