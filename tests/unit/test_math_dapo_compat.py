"""The compatible mode repeats the published scorer's verdicts, its mistakes included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.math_dapo_compat import check, normalise
from verifier.verify_file import verify_file

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "data" / "verifier_cases_dev.jsonl"
LABELLED = ROOT.parent / "shared" / "data" / "verifier_labelled_dev.jsonl"


def test_it_agrees_with_the_published_scorer_on_the_surface_forms():
    report = verify_file(CASES, "math_dapo_compat")
    assert (report.n, report.agree, report.false_positive, report.error) == (190, 130, 11, 0)


def test_it_agrees_with_the_published_scorer_on_the_labelled_responses():
    if not LABELLED.exists():
        pytest.skip(f"the labelled responses are not part of the project: {LABELLED} is missing")
    report = verify_file(LABELLED, "math_dapo_compat")
    assert (report.n, report.agree, report.false_positive) == (400, 369, 0)


@pytest.mark.parametrize(
    ("response", "gold", "outcome"),
    [
        ("Answer: 34", "34", "correct"),
        ("answer : 34", "34", "correct"),
        ("so myanswer:\n\n 34\nfoo", "34", "correct"),
        ("Answer: x = 34", "34", "correct"),
        ("Answer: $34$ or $35$", "34", "correct"),  # only the first pair of dollars is kept
        ("Answer: 3, 4", "34", "correct"),  # commas go, whatever they separate
        ("Answer: points34ways", "34", "correct"),
        ("Answer: 1,234", "1234", "correct"),
        ("Answer: \\frac12", "\\frac{1}{2}", "correct"),
        ("Answer: \\sqrt2", "\\sqrt{2}", "correct"),
        ("Answer: \\text{34 cm}", "34", "correct"),
        ("Answer: **34**", "34", "wrong"),
        ("Answer: 034", "34", "wrong"),
        ("Answer: 34 Answer: 35", "34", "wrong"),
        ("Answer: 34" + "x" * 300, "34", "no_answer"),
        ("so \\boxed{34}.", "34", "correct"),
        ("so \\boxed{{34}}.", "{34}", "correct"),
        ("so \\boxed{ 34 }.", "34", "wrong"),
        ("so \\boxed{34}." + "x" * 100, "34", "no_answer"),
        ("Answer: 35\n\\boxed{34}", "34", "wrong"),
        ("34", "34", "no_answer"),
        ("", "34", "no_answer"),
    ],
)
def test_claims_are_found_and_compared_as_described(response, gold, outcome):
    assert check(response, gold).outcome == outcome


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("a 34 square units", "34"),
        ("\\$34.", "34."),
        ("34^\\circ", "34"),
        ("34,\\text{ and }35", "3435"),
        ("\\textbf{34}", "34"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("12,34", "1234"),
        ("x,34", "x,34"),
    ],
)
def test_the_normal_form_is_made_in_the_described_order(text, normal):
    assert normalise(text) == normal


@given(st.text(max_size=400), st.text(max_size=20))
def test_it_never_raises(response, gold):
    for text in (response, f"Answer: {response}", f"\\boxed{{{response}"):
        assert check(text, gold).outcome in ("correct", "wrong", "no_answer")


def test_the_options_of_the_strict_checker_have_no_effect():
    row = json.loads(CASES.read_text(encoding="utf-8").splitlines()[0])
    plain = check(row["response"], row["gold"])
    assert plain == check(
        row["response"], row["gold"], boxed=False, exact_arithmetic=True, truncated=True
    )
