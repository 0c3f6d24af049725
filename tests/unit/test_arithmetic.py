"""The arithmetic task: problems, worked solutions, noise and rows."""

import json
import random
from pathlib import Path

import pytest

from common.arithmetic import (
    HELD_OUT_SHARE,
    Noise,
    Problem,
    claimed_answer,
    noisy_solution,
    problems,
    solution,
    write_rows,
)

CAP = 90
QUIET = Noise(wrong_step_rate=0.0, ramble_rate=0.0, ramble_chars=CAP)


def some(count: int = 200, *, held_out: bool = False) -> list[Problem]:
    return problems(count, 3, 3, 6, held_out=held_out)


def noisy(noise: Noise, seed: int = 0) -> list[tuple[Problem, str, bool]]:
    rng = random.Random(seed)
    return [(problem, *noisy_solution(problem, rng, noise)) for problem in some()]


def test_a_problem_and_its_solution_read_as_documented() -> None:
    problem = Problem((3, 8, 5))
    assert problem.prompt == "3+8+5=?\n"
    assert solution(problem) == "3+8=11\n+5=16\nAnswer: 16"


def test_every_worked_solution_claims_the_right_answer() -> None:
    for problem in some():
        assert claimed_answer(solution(problem)) == problem.answer == sum(problem.terms)


def test_problems_are_distinct_of_the_asked_lengths_and_equal_for_equal_seeds() -> None:
    found = some(2000)
    assert len(set(found)) == 2000
    assert {len(problem.terms) for problem in found} == {3, 4, 5, 6}
    assert found == some(2000)
    assert found != problems(2000, 4, 3, 6, held_out=False)


def test_no_seed_can_put_a_held_out_problem_into_training() -> None:
    held = {p.text for seed in range(3) for p in problems(256, seed, 3, 6, held_out=True)}
    for seed in range(3):
        assert held.isdisjoint(p.text for p in problems(3000, seed, 3, 6, held_out=False))


def test_about_one_problem_in_the_stated_number_is_held_out() -> None:
    drawn = [Problem((a, b, c)) for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)]
    share = sum(problem.held_out for problem in drawn) / len(drawn)
    assert 0.6 / HELD_OUT_SHARE < share < 1.4 / HELD_OUT_SHARE


def test_asking_for_more_problems_than_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="distinct problems"):
        problems(100, 0, 2, 2, held_out=False)


@pytest.mark.parametrize("terms", [(1, 4), (5, 4)])
def test_a_senseless_range_of_terms_is_an_error(terms: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="terms"):
        problems(1, 0, *terms, held_out=False)


def test_without_noise_a_noisy_solution_is_the_solution() -> None:
    for problem, text, ends in noisy(QUIET):
        assert (text, ends) == (solution(problem), True)


def test_wrong_steps_spoil_some_answers_and_keep_the_form() -> None:
    written = noisy(Noise(wrong_step_rate=0.2, ramble_rate=0.0, ramble_chars=CAP))
    right = [claimed_answer(text) == problem.answer for problem, text, _ in written]
    assert 0.2 < sum(right) / len(right) < 0.7
    for problem, text, ends in written:
        *steps, last = text.split("\n")
        assert ends
        assert claimed_answer(last) is not None
        assert len(steps) < len(problem.terms)
        assert steps[-1].endswith(f"={claimed_answer(last)}")


def test_a_skipped_first_step_still_leaves_a_line_that_stands_alone() -> None:
    for _, text, _ in noisy(Noise(wrong_step_rate=1.0, ramble_rate=0.0, ramble_chars=CAP)):
        assert text[0].isdigit()


def test_ramblers_are_long_and_some_never_end() -> None:
    written = noisy(Noise(wrong_step_rate=0.0, ramble_rate=1.0, ramble_chars=CAP))
    endless = [text for _, text, ends in written if not ends]
    assert 0.3 < len(endless) / len(written) < 0.7
    assert {len(text) for text in endless} == {CAP}
    assert all(claimed_answer(text) is None for text in endless)
    for problem, text, ends in written:
        assert len(text) > len(solution(problem))
        if ends:
            assert text.startswith(solution(problem))
            assert claimed_answer(text) == problem.answer


def test_noise_is_equal_for_equal_seeds() -> None:
    noise = Noise(wrong_step_rate=0.2, ramble_rate=0.3, ramble_chars=CAP)
    assert noisy(noise) == noisy(noise)
    assert noisy(noise) != noisy(noise, seed=1)


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        ("3+8=11\nAnswer: 11", 11),
        ("Answer: 3\nWait.\nAnswer: 4", 4),
        ("Answer: 12\n", 12),
        ("the Answer: 12", None),
        ("Answer: 12 or so", None),
        ("Answer:12", None),
        ("", None),
    ],
)
def test_only_the_last_line_of_the_exact_form_is_a_claim(text: str, claim: int | None) -> None:
    assert claimed_answer(text) == claim


def test_rows_are_written_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    assert write_rows(path, [Problem((3, 8)), Problem((9, 9, 9))]) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"prompt": "3+8=?\n", "answer": "11", "source": "arithmetic"}
    assert rows[1]["answer"] == "27"
