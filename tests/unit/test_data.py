"""Problems: what is refused before a run, the templates, and which ordinal is which problem."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import (
    RECYCLE,
    Row,
    Sequence,
    base_ordinal,
    generation,
    load_rows,
    recycled,
    render,
)
from common.errors import DataError


class Letters:
    """A tokenizer of one token a character; `#` is none, as unknown text may be none."""

    chat_template: str | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text if c != "#"]


class Chatting(Letters):
    chat_template = "some"

    def apply_chat_template(self, turns: Any, tokenize: bool, add_generation_prompt: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"<{turns[0]['role']}>{turns[0]['content']}<assistant>"


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def write(path: Path, *rows: object) -> None:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))


def load(*paths: Path, checker: str = "math", limit: int = 100) -> list[Row]:
    return load_rows(map(str, paths), Letters(), "raw", limit, checker, True)


def test_rows_carry_text_tokens_gold_and_how_to_check_them(problems: Path) -> None:
    write(problems, {"prompt": "2+2=?", "answer": 4}, "",
          {"prompt": "x", "answer": "1,000", "boxed": False,
           "checker": "math_dapo_compat"})  # fmt: skip
    first, second = load(problems)
    assert (first.text, first.gold, first.checker, first.boxed) == ("2+2=?", "4", "math", True)
    assert first.token_ids.dtype == np.int32
    assert first.token_ids.tolist() == [ord(c) for c in "2+2=?"]
    assert (second.gold, second.checker, second.boxed) == ("1000", "math_dapo_compat", False)


def test_several_files_are_read_one_after_the_other(problems: Path, tmp_path: Path) -> None:
    other = tmp_path / "more.jsonl"
    write(problems, {"prompt": "a", "answer": "1"})
    write(other, {"prompt": "b", "answer": "2"})
    assert [row.text for row in load(problems, other)] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a"}, "has no gold: set `answer`"),
        ({"prompt": "a", "answer": ""}, "has no gold"),
        ({"prompt": "a", "answer": None}, "has no gold"),
        ({"prompt": "a", "answer": "a rotten apple"}, "has a gold that cannot be read"),
        ({"prompt": "a", "answer": float("nan")}, "has a gold that cannot be read"),
        ({"answer": "1"}, "has no `prompt` text"),
        ({"prompt": "", "answer": "1"}, "has no `prompt` text"),
        ({"prompt": ["a"], "answer": "1"}, "has no `prompt` text"),
        ({"prompt": "a" * 101, "answer": "1"}, "has a prompt of 101 tokens; model.max_length"),
        ({"prompt": "##", "answer": "1"}, "has a prompt without a token"),
        ({"prompt": "a", "answer": "1", "boxed": "yes"}, "`boxed` true or false"),
        ({"prompt": "a", "answer": "1", "checker": 3}, "`checker` must be a name"),
        ("{nonsense", "is no JSON object"),
        ("[1]", "is no JSON object"),
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


def test_a_gold_that_only_another_checker_can_read_is_left_to_it(problems: Path) -> None:
    write(problems, {"prompt": "a", "answer": "\\frac{\\pi}{2}", "checker": "math_verify"})
    assert load(problems)[0].gold == "\\frac{\\pi}{2}"


def test_a_missing_file_and_an_empty_file_are_named(problems: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl cannot be opened \(No such file"):
        load(problems)
    write(problems)
    with pytest.raises(DataError, match=r"no rows in .*train\.jsonl"):
        load(problems)


def test_the_templates_wrap_a_prompt_without_touching_its_braces() -> None:
    prompt = "Let {x} be \\frac{1}{2}."
    assert render(prompt, Letters(), "raw") == prompt
    assert render(prompt, Chatting(), "chat") == f"<user>{prompt}<assistant>"
    dapo = render(prompt, Chatting(), "dapo")
    assert dapo.startswith("<user>Solve the following math problem step by step.")
    assert f"\n\n{prompt}\n\nRemember" in dapo


@pytest.mark.parametrize("template", ["dapo", "chat"])
def test_a_chat_template_that_the_tokenizer_lacks_is_a_data_error(template: str) -> None:
    with pytest.raises(DataError, match=r'use data\.template = "raw"'):
        render("a", Letters(), template)


def test_the_real_problem_files_load(shared_data: Path) -> None:
    rows = load(shared_data / "amc23.jsonl", shared_data / "gsm8k_test.jsonl", limit=10**6)
    assert len(rows) == 40 + 1319
    assert all(row.gold for row in rows)


# --- ordinals -----------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**31), epochs=st.integers(1, 7))
def test_every_epoch_is_a_permutation_of_all_rows(size: int, seed: int, epochs: int) -> None:
    sequence = Sequence(size, seed)
    drawn = [sequence.row(ordinal) for ordinal in range(size * epochs)]
    for epoch in range(epochs):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), ordinals=st.lists(st.integers(0, 200), max_size=40))
def test_the_row_of_an_ordinal_is_pure_whatever_was_asked_before(
    seed: int, ordinals: list[int]
) -> None:
    asked = Sequence(17, seed)
    assert [asked.row(o) for o in ordinals] == [Sequence(17, seed).row(o) for o in ordinals]


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    orders = Counter(
        tuple(Sequence(30, seed).row(30 * epoch + place) for place in range(30))
        for seed in (1, 2)
        for epoch in range(3)
    )
    assert len(orders) == 6


@given(ordinal=st.integers(0, RECYCLE - 1), times=st.integers(0, 5))
def test_a_prompt_that_comes_back_has_an_ordinal_of_its_own_and_the_same_row(
    ordinal: int, times: int
) -> None:
    again = ordinal
    for _ in range(times):
        again = recycled(again)
    assert base_ordinal(again) == ordinal
    assert generation(again) == times
    assert Sequence(11, 3).row(again) == Sequence(11, 3).row(ordinal)
