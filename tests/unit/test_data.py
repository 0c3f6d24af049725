"""Rows for the engine: what is refused before a run, what is left out, and what is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from common.data import Row, load_rows, require_distinct
from common.errors import DataError


class Letters:
    """A tokenizer of one token a character; `#` is none, as unknown text may be none."""

    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text if c != "#"]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def write(path: Path, *rows: object) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))


def load(*paths: Path, checker: str = "math", limit: int = 100, **options: Any) -> list[Row]:
    return load_rows(map(str, paths), Letters(), "raw", limit, checker, True, **options)


def test_rows_carry_text_tokens_gold_and_how_to_check_them(problems: Path) -> None:
    write(problems, {"prompt": "2+2=?", "answer": 4}, "",
          {"prompt": "x", "answer": "1,000", "boxed": False,
           "checker": "math_dapo_compat"})  # fmt: skip
    first, second = load(problems)
    assert (first.text, first.gold, first.checker, first.boxed) == ("2+2=?", "4", "math", True)
    assert first.token_ids.dtype == np.int32
    assert first.token_ids.tolist() == [ord(c) for c in "2+2=?"]
    assert (second.gold, second.checker, second.boxed) == ("1000", "math_dapo_compat", False)


def test_several_files_are_read_one_after_the_other_and_rows_know_theirs(
    problems: Path, tmp_path: Path
) -> None:
    other = tmp_path / "more.jsonl"
    write(problems, {"prompt": "a", "answer": "1"})
    write(other, {"prompt": "b", "answer": "2"})
    assert [(row.text, row.part) for row in load(problems, other)] == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "has no gold: set `answer`"),
        ({"prompt": "a", "answer": ""}, "has no gold"),
        ({"prompt": "a", "answer": None}, "has no gold"),
        ({"prompt": "a", "answer": "a rotten apple"}, "has a gold that cannot be read"),
        ({"prompt": "a", "answer": float("nan")}, "has a gold that cannot be read"),
        ({"prompt": "a", "answer": "1", "checker": "none"}, "no checker is named 'none'"),
        ({"prompt": "a" * 101, "answer": "1"}, "has a prompt of 101 tokens; model.max_length"),
        ({"prompt": "##", "answer": "1"}, "has a prompt without a token"),
        ({"prompt": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}],
          "answer": "1"}, 'data.template = "raw" takes a plain text and not 2 messages'),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_trained_on_is_refused_with_file_and_row(
    problems: Path, row: object, words: str
) -> None:
    write(problems, {"prompt": "fine", "answer": "1"}, row)
    with pytest.raises(DataError) as caught:
        load(problems)
    assert f"{problems}, row 2" in str(caught.value)
    assert words in str(caught.value)


def test_prompts_that_are_too_long_are_left_out_whole_and_the_log_says_how_many(
    problems: Path,
) -> None:
    write(problems, *({"prompt": "a" * length, "answer": "1"} for length in (99, 101, 100, 130)))
    with capture_logs() as logs:
        rows = load(problems, drop_long=True)
    assert [len(row.token_ids) for row in rows] == [99, 100]
    assert [(log["left_out"], log["rows"], log["longest"], log["room"]) for log in logs] == [
        (2, 4, 130, 100)
    ]


def test_a_file_in_which_every_prompt_is_too_long_is_an_error(problems: Path) -> None:
    write(problems, {"prompt": "a" * 101, "answer": "1"})
    with pytest.raises(DataError, match=r"room for 100 tokens.*the longest has 101; raise model"):
        load(problems, drop_long=True)


def test_a_gold_that_only_another_checker_can_read_is_left_to_it(problems: Path) -> None:
    write(problems, {"prompt": "a", "answer": "\\frac{\\pi}{2}", "checker": "math_verify"})
    assert load(problems)[0].gold == "\\frac{\\pi}{2}"


def test_an_empty_file_is_named(problems: Path) -> None:
    write(problems)
    with pytest.raises(DataError, match=r"no rows in .*train\.jsonl"):
        load(problems)


def test_evaluation_data_that_repeat_their_problems_are_refused_with_the_remedy(
    problems: Path,
) -> None:
    write(problems, {"prompt": "a b", "answer": "1"}, {"prompt": "c", "answer": "1"},
          {"prompt": "a  b", "answer": "1"})  # fmt: skip
    rows = load(problems)
    require_distinct(rows[:2], "aime.jsonl")
    with pytest.raises(DataError, match=r"aime\.jsonl repeats.*3 rows, 2 distinct.* 2 times.*dapo"):
        require_distinct(rows, "aime.jsonl")


def test_the_real_problem_files_load(shared_data: Path) -> None:
    rows = load(shared_data / "amc23.jsonl", shared_data / "gsm8k_test.jsonl", limit=10**6)
    assert len(rows) == 40 + 1319
    assert all(row.gold for row in rows)
    require_distinct(rows, "both")
