"""`dapo data prepare`: every row is written or left out for one reason, and the report says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from common.cli import app
from common.data import load_rows
from common.errors import ConfigError, DapoError, DataError
from common.prepare import Options, prepare
from common.prepare_report import Report
from common.template import DAPO_TEMPLATE
from verifier.outcome import Verdict

EVALUATIONS = ("aime24", "aime25", "amc23", "math500", "gsm8k_test")
QUESTION = "How many positive integers n less than one hundred have exactly three divisors?"


class Letters:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ask(prompt: str, answer: Any = "4", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "answer": answer, **more}


def run(*inputs: Path, out: Path, **options: Any) -> Report:
    return prepare(inputs, out, Options(**options), lambda what, rows: None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


# --- the real files -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dapo(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """DAPO-Math-17k, prepared against the evaluation files."""
    out = tmp_path_factory.mktemp("prepared") / "train.jsonl"
    against = tuple(shared_data / f"{name}.jsonl" for name in EVALUATIONS)
    return run(shared_data / "dapo_math_17k.parquet", out=out, against=against), out


def test_the_figures_of_dapo_math_17k_come_out(dapo: tuple[Report, Path]) -> None:
    report, _ = dapo
    assert (report.rows, report.distinct_texts, report.distinct_prompts) == (17917, 17290, 17188)
    assert (report.surplus_rows, report.repeated_prompts, len(report.conflicts)) == (729, 692, 12)
    assert (report.integer_golds, report.negative_golds, report.minus_one_golds) == (17917, 366, 73)
    assert [item.what for item in report.placeholders] == ["gold -1"] * 4
    assert [item.what for item in report.float_damaged] == [
        "gold 105263157894736848", "gold 105263157894736848", "gold 22099999999999998951424"
    ]  # fmt: skip
    assert (report.scripts, report.scripts_any) == ({"han": 3341}, {"han": 3432})
    assert (report.figures, len(report.own_instructions), report.dapo_instructions) == (561, 20, 0)
    assert report.characters is not None
    assert (report.characters.median, report.characters.p99) == (215, 843)
    assert report.characters.longest == 3190
    assert "$\\frac{2020}{6063}$" in [item.what for item in report.without_prose]


def test_of_dapo_math_17k_one_row_of_each_problem_with_a_known_gold_is_written(
    dapo: tuple[Report, Path],
) -> None:
    report, out = dapo
    assert report.left_out == {
        "duplicate": 717, "conflict": 16, "placeholder": 4, "float_damaged": 3
    }  # fmt: skip
    assert report.written == report.rows - 717 - 16 - 4 - 3
    rows = read(out)
    assert len(rows) == len({row["prompt"] for row in rows}) == report.written
    assert {"554", "230", "683", "913"} <= {row["answer"] for row in rows}


def test_problems_of_the_evaluation_files_are_found_in_dapo_math_17k(
    dapo: tuple[Report, Path],
) -> None:
    report, _ = dapo
    equal = {
        name: {o.against for o in report.overlaps if name in o.against and o.equal_golds}
        for name in EVALUATIONS
    }
    assert len(equal["amc23"]) >= 8
    assert len(equal["math500"]) >= 7
    for name in ("aime24", "aime25", "gsm8k_test"):
        assert not equal[name]
        assert not [item for item in report.overlaps if name in item.against]


@pytest.mark.parametrize(
    ("name", "rows", "unreadable"),
    [("gsm8k_train", 7473, 0), ("gsm8k_test", 1319, 0), ("aime24", 30, 0), ("aime25", 30, 0),
     ("amc23", 40, 0), ("math500", 500, 99)],
)  # fmt: skip
def test_the_other_real_files_are_already_distinct(
    shared_data: Path, out: Path, name: str, rows: int, unreadable: int
) -> None:
    report = run(shared_data / f"{name}.jsonl", out=out)
    assert (report.rows, report.surplus_rows, report.conflicts) == (rows, 0, [])
    assert len(report.unreadable) == unreadable
    assert report.written == len(load_rows([str(out)], Letters(), "raw", 10**6, "math", True))
    assert report.written == rows - unreadable


def test_golds_that_are_no_numbers_get_the_symbolic_checker_which_credits_them(
    shared_data: Path, out: Path
) -> None:
    report = run(shared_data / "math500.jsonl", out=out, symbolic=True)
    assert (report.written, report.unreadable, report.unconfirmed) == (500, [], [])
    assert sum(row.get("checker") == "math_verify" for row in read(out)) == 99


# --- rules --------------------------------------------------------------------------------------


def test_a_row_keeps_what_says_how_to_judge_it(source: Path, out: Path) -> None:
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}]
    write(source, ask("2+2?", 4, source="sums", boxed=False),
          {"prompt": system, "reward_model": {"ground_truth": "5"}, "data_source": "verl"},
          ask("6?", "1,006", checker="math_dapo_compat"))  # fmt: skip
    run(source, out=out)
    assert read(out) == [
        {"prompt": "2+2?", "answer": "4", "source": "sums", "boxed": False},
        {"prompt": system, "answer": "5", "source": "verl"},
        {"prompt": "6?", "answer": "1006", "source": "in", "checker": "math_dapo_compat"},
    ]


def test_a_checker_that_is_not_the_default_one_is_written_into_the_rows(
    source: Path, out: Path
) -> None:
    write(source, ask("a b"), ask("c d", "4,000"))
    run(source, out=out, checker="math_dapo_compat")
    assert [(row["checker"], row["answer"]) for row in read(out)] == [
        ("math_dapo_compat", "4"), ("math_dapo_compat", "4000")
    ]  # fmt: skip


def test_golds_of_slow_checkers_are_tried_out_and_those_that_fail_are_left_out(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = [Verdict("correct"), Verdict("error", reason="cannot be parsed"),
                Verdict("wrong", reason="not parsed")]  # fmt: skip
    monkeypatch.setattr("common.prepare.check_golds", lambda asked: verdicts[: len(asked)])
    write(source, ask("a b"), *(ask(f"{x} c", "\\pi", checker="math_verify") for x in "def"))
    report = run(source, out=out)
    assert [row["prompt"] for row in read(out)] == ["a b", "d c", "f c"]
    assert [item.where for item in report.unreadable] == [f"{source}, row 3"]
    assert [item.where for item in report.unconfirmed] == [f"{source}, row 4"]
    assert report.left_out == {"unreadable": 1}


def test_the_papers_instruction_is_taken_off_so_that_copies_with_it_are_repeats(
    source: Path, out: Path
) -> None:
    write(source, ask(DAPO_TEMPLATE.format(prompt="What is 2+2?")), ask("What is 2+2?"))
    report = run(source, out=out)
    assert (report.dapo_instructions, report.left_out) == (1, {"duplicate": 1})
    assert [row["prompt"] for row in read(out)] == ["What is 2+2?"]


def test_golds_conflict_by_value_and_not_by_spelling(source: Path, out: Path) -> None:
    write(source, ask("a b", "0.5"), ask("a  b", "\\frac{1}{2}"), ask("c d", 2**53),
          ask("c d", 2**53 + 1))  # fmt: skip
    report = run(source, out=out)
    assert [[row.what for row in conflict.rows] for conflict in report.conflicts] == [
        ["9007199254740992", "9007199254740993"]
    ]
    assert [row["answer"] for row in read(out)] == ["1/2"]
    write(source, ask("a b", "1/2"), ask("a b", "2"), ask("c d"))
    assert "  1/2 in in.jsonl, row 1, 2 in in.jsonl, row 2: none kept" in run(
        source, out=out
    ).to_text().split("\n")


def test_variants_of_notation_are_reported_and_on_request_repeats(source: Path, out: Path) -> None:
    write(source, ask("Find $x+1$.", "4"), ask("Find \\(x + 1\\)", "5"), ask("find x+1", "4"))
    report = run(source, out=out)
    assert (report.written, report.notation_variants) == (3, 2)
    assert [item.kept for item in report.notation_conflicts] == [["4", "5"]]
    with pytest.raises(DataError, match="no row of .* is left"):
        run(source, out=out, near=True)
    write(source, ask("Find $x+1$.", "-1"), ask("Find \\(x + 1\\)", "5"), ask("find x+1", "5"))
    assert run(source, out=out, near=True).left_out == {"placeholder": 1, "duplicate": 1}


def test_rows_that_are_like_an_evaluation_problem_are_left_out_on_request(
    source: Path, tmp_path: Path, out: Path
) -> None:
    evaluation = write(tmp_path / "eval.jsonl", ask("Something else"), ask(QUESTION, 4))
    write(source, ask(QUESTION.upper()), ask(QUESTION.replace("three", "four"), 2), ask("Other"))
    kept = run(source, out=out, against=(evaluation,))
    assert kept.written == 3
    assert [(o.similarity, o.equal_golds) for o in kept.overlaps] == [(1.0, True), (0.636, False)]
    assert kept.overlapping_problems == {str(evaluation): 1}
    report = run(source, out=out, against=(evaluation,), drop_overlap=True)
    assert (report.left_out, report.written) == ({"overlap": 2}, 1)
    assert run(source, out=out, against=(evaluation,), similarity=0.9).overlaps == kept.overlaps[:1]


def test_prompts_are_counted_in_tokens_and_left_out_if_too_long(source: Path, out: Path) -> None:
    write(source, ask("a" * 9), ask("b" * 11), ask("c" * 10))
    assert run(source, out=out, tokenizer=Letters()).written == 3
    report = run(source, out=out, tokenizer=Letters(), max_prompt_tokens=10)
    assert report.tokens is not None
    assert (report.tokens.median, report.tokens.longest) == (10, 11)
    assert [(item.where, item.what) for item in report.too_long] == [
        (f"{source}, row 2", "11 tokens")
    ]
    assert [row["prompt"] for row in read(out)] == ["a" * 9, "c" * 10]
    with pytest.raises(ConfigError, match="give --tokenizer"):
        run(source, out=out, max_prompt_tokens=10)


ROWS = st.lists(
    st.builds(
        ask,
        st.sampled_from(["a b", "a  b", "$a b$", "c", "Put it in \\boxed{}: d", QUESTION]),
        st.sampled_from(["-1", "4", 5, "x", None, "105263157894736848"]),
    ),
    min_size=1,
)


@settings(max_examples=50)
@given(rows=ROWS, flags=st.sets(st.sampled_from(
    ["near", "drop_overlap", "drop_instructions", "keep_conflicts", "keep_damaged"])))  # fmt: skip
def test_every_row_is_written_or_left_out_for_exactly_one_reason(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], flags: set[str]
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    source, out = write(folder / "in.jsonl", *rows), folder / "out.jsonl"
    against = (write(folder / "eval.jsonl", ask(QUESTION)),)
    try:
        report = run(source, out=out, against=against, **dict.fromkeys(flags, True))
    except DataError as error:
        assert "is left" in str(error)
        return
    assert report.rows == len(rows) == report.written + sum(report.left_out.values())
    prompts = [" ".join(row["prompt"].split()) for row in read(out)]
    assert len(set(prompts)) == len(prompts) == report.written


# --- the command --------------------------------------------------------------------------------


def command(*words: object) -> Result:
    return CliRunner().invoke(app, ["data", "prepare", *map(str, words)])


def test_the_command_writes_the_rows_and_a_report_beside_them(source: Path, out: Path) -> None:
    write(source, ask("a b"), ask("a b"), ask("c d"))
    done = command(source, "--out", out)
    assert (done.exit_code, len(read(out))) == (0, 2)
    report = json.loads(Path(f"{out}.report.json").read_text())
    assert report["left_out"] == {"duplicate": 1}
    assert "2 rows written" in done.stdout


def test_the_same_input_gives_the_same_bytes(source: Path, out: Path) -> None:
    write(source, ask("a b"), ask("a b", "5"), ask("求能被整除", "x"), ask("c", "1"))
    first = command(source, "--out", out, "--json"), out.read_bytes()
    again = command(source, "--out", out, "--json", "--force"), out.read_bytes()
    assert (first[0].stdout, first[1]) == (again[0].stdout, again[1])
    assert json.loads(first[0].stdout) == json.loads(Path(f"{out}.report.json").read_text())


def test_golds_that_cannot_be_read_are_listed_and_make_the_command_fail(
    source: Path, out: Path
) -> None:
    write(source, ask("a b"), ask("c d", "\\pi"), ask("e f", None))
    done = command(source, "--out", out)
    assert (done.exit_code, len(read(out))) == (1, 1)
    assert "in.jsonl, row 2: the gold answer" in done.stdout
    assert "in.jsonl, row 3: the gold answer is missing" in done.stdout
    assert "--drop-unreadable" in done.stderr
    assert command(source, "--out", out, "--force", "--drop-unreadable").exit_code == 0


def test_nothing_is_overwritten_unless_asked(source: Path, out: Path) -> None:
    write(source, ask("a b"))
    out.write_text("mine")
    for target in (out, source):
        with pytest.raises(DapoError, match="exists|is also an input"):
            raise command(source, "--out", target).exception or AssertionError
    assert out.read_text() == "mine"
    assert command(source, "--out", out, "--force").exit_code == 0
