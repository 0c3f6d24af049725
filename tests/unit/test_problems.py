"""The problems of a run: the same at every start, or the start is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.config import Config
from common.errors import ConfigError, DataError
from learner.problems import Problems, load_problems
from learner.timeline import Timeline
from tests.conftest import MakeConfig


class Letters:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))


def write(path: Path, *prompts: str, answer: int = 4) -> str:
    path.write_text("".join(json.dumps({"prompt": p, "answer": answer}) + "\n" for p in prompts))
    return str(path)


def start(config: Config) -> Problems:
    """A learner's start, up to its first incarnation."""
    problems = load_problems(config, Letters())
    Timeline.open(config.run_dir).begin(0)
    return problems


@pytest.fixture
def two_files(tmp_path: Path) -> list[str]:
    return [write(tmp_path / "one.jsonl", "a", "b"), write(tmp_path / "two.jsonl", "c")]


def test_training_rows_that_are_too_long_are_left_out_and_held_out_ones_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    train = write(tmp_path / "train.jsonl", "a", "b" * 33)
    heldout = write(tmp_path / "heldout.jsonl", "c" * 33)
    problems = load_problems(make_config(data={"train": [train]}), Letters())
    assert [row.text for row in problems.train] == ["a"]
    with pytest.raises(DataError, match=r"heldout\.jsonl, row 1 has a prompt of 33 tokens"):
        load_problems(make_config(data={"train": [train], "heldout": heldout}), Letters())


def test_held_out_problems_that_are_repeated_are_refused(
    make_config: MakeConfig, tmp_path: Path, two_files: list[str]
) -> None:
    heldout = write(tmp_path / "heldout.jsonl", *["a", "b"] * 32)
    with pytest.raises(DataError, match=r"heldout\.jsonl repeats its problems: 64 rows, 2 dist"):
        load_problems(make_config(data={"train": two_files, "heldout": heldout}), Letters())


def test_the_same_data_are_accepted_at_every_start_also_under_another_path(
    make_config: MakeConfig, tmp_path: Path, two_files: list[str]
) -> None:
    data = {"train": two_files, "weights": [1, 2]}
    start(make_config(data=data))
    start(make_config(data=data))
    moved = Path(two_files[0]).rename(tmp_path / "moved.jsonl")
    start(make_config(data=data | {"train": [str(moved), two_files[1]]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: write(t / "one.jsonl", "a", "b", "c"), "had 2 usable rows and has 3"),
        (lambda t: write(t / "one.jsonl", "b", "a"), "other prompts or golds, or another order"),
        (lambda t: write(t / "two.jsonl", "c", answer=5), "two.jsonl has other prompts or golds"),
    ],
)
def test_data_that_change_under_a_run_are_refused(
    make_config: MakeConfig, tmp_path: Path, two_files: list[str], change: Any, words: str
) -> None:
    config = make_config(data={"train": two_files})
    start(config)
    change(tmp_path)
    with pytest.raises(ConfigError, match=r"have changed since the run began.*run\.name") as caught:
        load_problems(config, Letters())
    assert words in str(caught.value)


def test_a_seed_or_a_mixture_that_changes_under_a_run_is_refused(
    make_config: MakeConfig, two_files: list[str]
) -> None:
    start(make_config(data={"train": two_files}))
    for sections, words in (
        ({"data": {"train": two_files, "weights": [1, 2]}}, r"data\.weights was None and is"),
        ({"data": {"train": two_files}, "run": {"seed": 5}}, r"run\.seed was 0 and is 5"),
        ({"data": {"train": two_files[:1]}}, r"data\.train had 2 files and has 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_problems(make_config(**sections), Letters())


def test_until_a_learner_has_begun_the_data_may_change(
    make_config: MakeConfig, tmp_path: Path, two_files: list[str]
) -> None:
    config = make_config(data={"train": two_files})
    load_problems(config, Letters())
    write(tmp_path / "one.jsonl", "x")
    start(config)
    assert len(start(config).train) == 2
