"""What a majority vote counts: answers of one value are spelled alike."""

from __future__ import annotations

import pytest

from verifier import registry
from verifier.outcome import Verdict


def answer(checker: str, response: str, gold: str) -> str:
    return registry.run(checker, response, gold, {}).answer


@pytest.mark.parametrize(
    ("response", "spelling"),
    [
        ("Answer: 034", "34"),
        ("Answer: $34.0$", "34"),
        ("so \\boxed{34}", "34"),
        ("Answer: x = 35", "35"),
        ("Answer: 1,234", "1234"),
        ("Answer: \\frac{2}{4}", "1/2"),
        ("Answer: 34%", "34%"),
        ("Answer:  either  34 or   35", "either 34 or 35"),
        ("34", ""),
    ],
)
def test_the_strict_checker_spells_what_it_reads(response: str, spelling: str) -> None:
    assert answer("math", response, "34") == spelling


@pytest.mark.parametrize(
    ("response", "spelling"),
    [
        ("Answer: $\\frac{1}{2}$", "1/2"),
        ("Answer: 0.5", "1/2"),
        ("Answer: $2\\sqrt{3}$", "2*sqrt(3)"),
        ("So \\boxed{2\\sqrt3}", "2*sqrt(3)"),
    ],
)
def test_the_symbolic_checker_spells_what_it_parses(response: str, spelling: str) -> None:
    assert answer("math_verify", response, "\\sqrt{5}" if "sqrt" in response else "3") == spelling


def test_a_checker_that_reads_no_value_leaves_the_text_on_one_line() -> None:
    assert Verdict("wrong", " a\n b  c").answer == "a b c"
    assert Verdict("wrong").answer == ""
    assert Verdict("wrong", "0.5", "line", "", "1/2").answer == "1/2"
