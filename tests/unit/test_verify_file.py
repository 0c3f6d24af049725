"""The comparison of a checker with a labelled file."""

from __future__ import annotations

import json

import pytest

from common.errors import DataError
from verifier.registry import UnknownChecker
from verifier.verify_file import verify_file


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_a_report_counts_agreement_on_correct_or_not_and_lists_the_rest(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        [
            {"id": "a", "response": "Answer: 34", "gold": "34", "expected": "correct"},
            {"id": "b", "response": "34", "gold": 34, "expected": "wrong"},
            {"id": "c", "response": "Answer: 34", "gold": "34", "correct": False},
            {"id": "d", "response": "Answer: 35", "gold": "34", "correct": True},
            {"id": "e", "response": "Answer: x", "gold": "x", "correct": False},
        ],
    )
    report = verify_file(path)
    assert (report.n, report.agree, report.no_answer, report.error) == (5, 2, 1, 1)
    assert (report.false_positive, report.false_negative) == (1, 1)
    assert [item.id for item in report.disagreements] == ["c", "d", "e"]
    assert report.disagreements[1].reason == "35 is not 34"
    assert json.loads(json.dumps(report.to_dict()))["agree"] == report.agree
    assert "agrees on 2 of 5" in report.to_text()


def test_boxes_and_arithmetic_count_as_the_caller_says(tmp_path):
    rows = [{"response": r"\boxed{68/2}", "gold": "34", "expected": "correct"}]
    path = write(tmp_path / "rows.jsonl", rows)
    assert verify_file(path).agree == 0
    assert verify_file(path, exact_arithmetic=True).agree == 1
    assert verify_file(path, exact_arithmetic=True, boxed=False).no_answer == 1


@pytest.mark.parametrize(
    "row", ["{", "[]", '{"response": "x", "gold": "1"}', '{"response": 3, "gold": "1"}']
)
def test_a_row_that_is_no_labelled_response_is_named(tmp_path, row):
    good = '{"response": "x", "gold": "1", "correct": true}'
    (tmp_path / "rows.jsonl").write_text(f"{good}\n\n{row}\n")
    with pytest.raises(DataError, match="row 3"):
        verify_file(tmp_path / "rows.jsonl")


def test_a_missing_file_and_an_unknown_checker_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        verify_file(tmp_path / "none.jsonl")
    rows = [{"response": "x", "gold": "1", "correct": True}]
    with pytest.raises(UnknownChecker):
        verify_file(write(tmp_path / "rows.jsonl", rows), "maths")


def test_a_second_checker_shows_where_the_two_differ(tmp_path):
    rows = [
        {"response": "Answer: **34**", "gold": "34", "expected": "correct"},
        {"response": "Answer: 34", "gold": "34", "expected": "correct"},
    ]
    report = verify_file(write(tmp_path / "rows.jsonl", rows), against="math_dapo_compat")
    assert [(item.row, item.expected, item.outcome) for item in report.differences] == [
        (1, "correct", "wrong")
    ]
    assert "math and math_dapo_compat differ on 1" in report.to_text()
