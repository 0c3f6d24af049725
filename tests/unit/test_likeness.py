"""When two problems are the same, and what a prompt is written in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.languages import has_prose, scripts
from common.likeness import Likeness, collapse, fold_notation, word_runs

QUESTION = "How many positive integers n less than one hundred have exactly three divisors?"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("$n^2+n+C$ is a square.", "\\(n^2 + n + C\\) is a square"),
        ("base $10$, and ending with 1?", "base 10 and ending with 1"),
        ("\\dfrac{1}{2}\\left(x\\right)", "\\frac {1}{2} (x)"),
        ("Find X", "find x"),
    ],
)
def test_notation_is_folded(one: str, other: str) -> None:
    assert fold_notation(one) == fold_notation(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("x+1", "x-1"), ("x<1", "x>1"), ("x^2", "x_2"), ("\\leftarrow", "arrow"), ("a/b", "ab")],
)
def test_operators_are_not_folded(one: str, other: str) -> None:
    assert fold_notation(one) != fold_notation(other)


@given(
    words=st.lists(st.text("abc", min_size=1), min_size=1), gap=st.sampled_from([" ", "\n", "　"])
)
def test_white_space_never_counts(words: list[str], gap: str) -> None:
    assert collapse(gap.join(words)) == " ".join(words)
    assert word_runs(gap.join(words)) == word_runs(" ".join(words))


def test_the_most_similar_problem_is_found_and_how_similar_it_is() -> None:
    known = Likeness(["Something else that shares not one run of words", QUESTION, QUESTION])
    same = known.most_similar(QUESTION.upper() + " [asy] draw(a--b); [/asy]")
    assert same == (1, 1.0)
    near = known.most_similar(QUESTION.replace("three", "four"))
    assert near is not None
    assert (near.number, near.similarity) == (1, 7 / 11)
    assert known.most_similar("A problem about nothing in particular") is None


def test_han_characters_are_words_of_their_own() -> None:
    assert len(word_runs("求能被209整除的数")) == 4
    match = Likeness(["求能被209整除的最小正整数"]).most_similar("求能被 209 整除的最小正整数。")
    assert match == (0, 1.0)


def test_scripts_are_counted_by_letters_and_symbols_of_mathematics_are_none() -> None:
    assert scripts("∠ABC = π, 求 能被, привет, かな") == {"han": 3, "cyrillic": 6, "kana": 2}


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        ("$\\frac{2020}{6063}$", False),
        ("$\\cos18^{\\circ}+2\\cos36^{\\circ}$\n=_______。", False),
        ("\\[ \\int_{-10}^{10} |x| \\, \\mathrm{d}x \\]", False),
        ("Find $x$.", True),
        ("求 $x$", True),
    ],
)
def test_an_expression_alone_is_no_prose(text: str, prose: bool) -> None:
    assert has_prose(text) is prose
