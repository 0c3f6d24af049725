"""The figures over the problems of an evaluation, by hand, and the records on the disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from common.eval_table import as_text, hardest_as_text
from common.results import (
    Answer,
    ProblemResult,
    by_file,
    figures,
    hardest,
    read_results,
    to_line,
    write_results,
)


def a_result(
    correct: int = 1, wrong: tuple[int, ...] = (), no_answer: int = 0, errors: int = 0,
    row: int = 1, file: str = "h", length: int = 10, truncated: int = 0, failure: str = "",
    asked: float = 0.0, judged: float = 0.0, anonymous: bool = False,
) -> ProblemResult:  # fmt: skip
    """A problem by the votes for its right answer and for each wrong one."""
    answers = [Answer("g", correct, True)] if correct else []
    answers += [Answer("" if anonymous else f"w{n}", v, False) for n, v in enumerate(wrong)]
    samples = correct + sum(wrong) + no_answer + errors
    return ProblemResult(
        file, row, f"problem {row}", "g", samples, correct, no_answer, errors, truncated, answers,
        [length] * samples, ["1.2"] if samples else [], failure, asked, judged,
    )  # fmt: skip


FOUR = [
    a_result(correct=4, row=1, asked=100.0, judged=103.0),
    a_result(correct=1, wrong=(2, 1), row=2, truncated=2, asked=101.0, judged=108.0),
    a_result(correct=1, wrong=(1,), no_answer=2, row=3, length=30, asked=101.0, judged=105.0),
    a_result(correct=0, wrong=(4,), row=4, asked=102.0, judged=110.0),
]
FAILED = a_result(correct=0, row=5, failure="generation: no memory")


def test_the_figures_are_those_by_hand() -> None:
    found = figures(FOUR)
    means = [1.0, 0.25, 0.25, 0.0]
    variance = sum((mean - 0.375) ** 2 for mean in means) / 3
    assert found["accuracy"] == 0.375
    assert found["standard_error"] == pytest.approx(math.sqrt(variance / 4), abs=1e-6)
    assert found["pass_at"] == {"1": 0.375, "2": 0.5, "4": 0.75}
    assert found["pass_at_k"] == 0.75
    assert found["majority"] == pytest.approx((1 + 0 + 0.5 + 0) / 4)
    assert (found["problems"], found["failed"], found["samples"]) == (4, 0, 16)
    assert found["no_answer_share"] == 2 / 16
    assert found["truncated_share"] == 2 / 16
    assert found["length_mean"] == 15.0
    assert found["samples_per_second"] == 1.6
    assert found["versions"] == [2]
    low, high = found["accuracy_interval"]
    assert 0.0 < low < 0.375 < high < 1.0
    assert list(found["pass_at_intervals"]) == ["1", "2", "4"]
    assert found["pass_at_intervals"]["1"] == found["accuracy_interval"]
    assert json.loads(json.dumps(found)) == found


def test_a_problem_without_a_sample_is_counted_and_in_no_mean() -> None:
    found, without = figures([*FOUR, FAILED]), figures(FOUR)
    assert (found.pop("failed"), without.pop("failed")) == (1, 0)
    assert found == without


def test_a_sample_whose_check_failed_counts_neither_as_right_nor_as_wrong() -> None:
    [problem] = [a_result(correct=1, wrong=(1,), errors=2)]
    found = figures([problem])
    assert (found["accuracy"], found["errors"], found["samples"]) == (0.5, 2, 4)
    assert found["pass_at"] == {"1": 0.5, "2": 1.0, "4": 1.0}
    nothing = figures([a_result(correct=0, errors=4)])
    assert (nothing["problems"], nothing["failed"], nothing["accuracy"]) == (0, 1, None)


def test_nothing_measured_is_no_figure_and_no_division_by_zero() -> None:
    for problems in ([], [FAILED]):
        found = figures(problems)
        assert found["accuracy"] is found["standard_error"] is found["majority"] is None
        assert found["pass_at"] == {"1": None}
        assert found["length_mean"] is found["samples_per_second"] is None
        assert (found["problems"], found["failed"]) == (0, len(problems))
        json.dumps(found, allow_nan=False)


def test_one_problem_has_no_standard_error() -> None:
    assert figures(FOUR[:1])["standard_error"] is None


def test_answers_that_a_checker_does_not_name_cannot_vote() -> None:
    found = figures([*FOUR, a_result(correct=2, wrong=(2,), anonymous=True)])
    assert found["majority"] is found["majority_interval"] is None
    assert found["accuracy"] == 0.4


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_pass_at_k_rises_from_avg_at_k_and_no_majority_is_above_it(
    counts: list[tuple[int, int]],
) -> None:
    problems = [a_result(c, wrong=(4 - c,) if c < 4 else (), row=r) for r, (c, _) in
                enumerate(counts)]  # fmt: skip
    found = figures(problems)
    values = list(found["pass_at"].values())
    assert values == sorted(values)
    assert values[0] == found["accuracy"]
    assert found["majority"] <= found["pass_at_k"]
    for low, high in found["pass_at_intervals"].values():
        assert 0 <= low <= high <= 1


def test_each_file_is_figured_alone() -> None:
    files = by_file([a_result(correct=2, file="b"), a_result(correct=0, wrong=(2,), file="a")])
    assert {name: found["accuracy"] for name, found in files.items()} == {"b": 1.0, "a": 0.0}
    assert list(files) == ["b", "a"]


def test_the_hardest_problems_are_the_least_solved_and_among_them_the_longest() -> None:
    problems = [
        a_result(correct=4, row=1),
        a_result(correct=0, wrong=(4,), row=2, length=5),
        FAILED,
        a_result(correct=0, wrong=(4,), row=3, length=9),
        a_result(correct=1, wrong=(3,), row=4),
    ]
    assert [problem.row for problem in hardest(problems, 3)] == [3, 2, 4]


# --- on the disk --------------------------------------------------------------------------------


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "evaluations" / "before.jsonl"
    write_results(path, [*FOUR, FAILED])
    assert read_results(path) == [*FOUR, FAILED]
    write_results(path, FOUR[:1])
    assert read_results(path) == FOUR[:1]
    assert [file.name for file in path.parent.iterdir()] == ["before.jsonl"]


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    assert read_results(path) == []
    path.write_text(to_line(FOUR[0]) + to_line(FOUR[1])[:40])
    assert read_results(path) == FOUR[:1]
    path.write_text('{"row": 3}\n' + to_line(FOUR[0]))
    with pytest.raises(DataError, match=r"p\.jsonl, row 1 is no result"):
        read_results(path)


# --- for reading --------------------------------------------------------------------------------


def a_run(problems: list[ProblemResult], planned: dict[str, int], complete: bool = True) -> str:
    return as_text(
        {
            "model": "m",
            "engine": "vllm",
            "k": 4,
            "temperature": 1.0,
            "top_p": 0.7,
            "max_tokens": 80,
            "template": "raw",
            "dtype": "float32",
            "seed": 0,
            "complete": complete,
            "planned": planned,
            "files": by_file(problems),
        }  # fmt: skip
    )


def test_the_table_has_every_figure() -> None:
    text = a_run(FOUR, {"h": 4})
    for part in ("h: 4 problems × 4 samples", "avg@4      0.375 ± 0.217", "pass@1     0.375",
                 "pass@4     0.750", "maj@4      0.375", "truncated  12.5%", "no answer  12.5%",
                 "errors     0 samples", "length     15.0 tokens", "1.60 samples/s",
                 "policy version 2", "top_p 0.7"):  # fmt: skip
        assert part in text, text
    assert "PARTIAL" not in text


def test_a_partial_evaluation_says_so_for_every_file() -> None:
    text = a_run(FOUR[:2], {"h": 4, "other": 3}, complete=False)
    assert "PARTIAL" in text
    assert "h: 2 of 4 problems" in text
    assert "other: none of 3 problems was done" in text


def test_problems_in_no_figure_are_stated_with_what_they_could_cost() -> None:
    text = a_run([*FOUR, FAILED], {"h": 5})
    assert "problems in no figure: 1; were they wrong, avg@4 would be 0.300" in text


def test_a_simulated_engine_is_not_taken_for_a_model() -> None:
    result = {"model": "m", "engine": "simulated", "k": 1, "temperature": 1, "top_p": 1,
              "max_tokens": 8, "template": "raw", "dtype": "float32", "seed": 0, "complete": True,
              "planned": {}, "files": {}}  # fmt: skip
    assert "SIMULATED" in as_text(result)


def test_a_hard_problem_is_shown_with_its_gold_and_its_answers() -> None:
    text = hardest_as_text([a_result(correct=1, wrong=(5, 2, 1, 1), no_answer=3)])
    assert "h, row 1: 1 of 13 correct, 10.0 tokens" in text
    assert "problem 1" in text
    assert "gold g; answers: g × 1, w0 × 5, w1 × 2, w2 × 1, …, no answer × 3" in text
