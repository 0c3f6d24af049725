"""Golds: compared by value, and recognised where they are not genuine."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.distinct import settle
from common.golds import as_integer, comparable, float_damaged, read_gold
from verifier.math_answer import GoldError
from verifier.registry import UnknownChecker

DAMAGED = "105263157894736848"  # 105263157894736842, by way of a float64


@pytest.mark.parametrize("gold", [DAMAGED, "-" + DAMAGED, "22099999999999998951424"])
def test_integers_with_the_digits_of_a_rounded_float_are_found(gold: str) -> None:
    assert float_damaged(gold)


@pytest.mark.parametrize(
    "gold",
    ["105263157894736842", str(2**53 + 2), str(2**64), "20000000000000000000000", str(10**23),
     *map(str, map(math.factorial, (20, 21, 22, 23, 30, 50))), str(3**33), "3/4", "34", "9" * 400],
)  # fmt: skip
def test_large_integers_that_are_genuine_are_left_alone(gold: str) -> None:
    assert not float_damaged(gold)


@given(value=st.integers(10**20, 10**22))
def test_a_large_integer_passes_and_its_rounding_by_a_float_does_not(value: int) -> None:
    rounded = int(float(value))
    assert value == rounded or not float_damaged(str(value))
    few_bits = rounded // (rounded & -rounded) < 2**45
    assert few_bits or rounded % 1000 == 0 or float_damaged(str(rounded))


@given(value=st.integers(-(2**80), 2**80))
def test_integers_are_compared_as_integers_and_never_as_floats(value: int) -> None:
    assert as_integer(str(value)) == value
    assert comparable(str(value)) == comparable(value) != comparable(value + 1)


def test_equal_golds_of_any_notation_compare_equal() -> None:
    assert comparable("0.50") == comparable("\\frac{1}{2}") == comparable("1/2")
    assert comparable("3 \\sqrt{2}") == comparable("3\\sqrt{2}") != comparable("3\\sqrt{3}")


def test_a_gold_is_read_in_the_form_of_its_checker() -> None:
    assert read_gold("1,000", "math") == read_gold(1000, "math_dapo_compat") == "1000"
    assert read_gold(" 3\\sqrt{2} ", "math_verify") == "3\\sqrt{2}"
    for gold, checker in (("3\\sqrt{2}", "math"), ("", "math_verify"), (None, "math")):
        with pytest.raises(GoldError):
            read_gold(gold, checker)
    with pytest.raises(UnknownChecker):
        read_gold("1", "maths")


@pytest.mark.parametrize(
    ("golds", "kept", "fates"),
    [
        (["34"], ["34"], [None]),
        (["64", "6"], [], ["conflict", "conflict"]),
        (["-1", "554"], ["554"], ["placeholder", None]),
        (["554", "-1"], ["554"], [None, "placeholder"]),
        (["-1"], ["-1"], [None]),
        (["-2", "-1"], [], ["conflict", "conflict"]),
        (["-1", "3", "4"], [], ["placeholder", "conflict", "conflict"]),
        ([DAMAGED], [], ["float_damaged"]),
        ([DAMAGED, "105263157894736842"], ["105263157894736842"], ["float_damaged", None]),
        (["-1", DAMAGED], ["-1"], [None, "float_damaged"]),
        (["x", "y"], [], ["conflict", "conflict"]),
    ],
)
def test_of_golds_that_differ_one_is_kept_only_if_the_others_are_no_golds(
    golds: list[str], kept: list[str], fates: list[str | None]
) -> None:
    found = settle(golds)
    assert list(found.values()) == fates
    assert [gold for gold, fate in found.items() if fate is None] == kept


def test_what_is_dropped_by_default_can_be_kept() -> None:
    assert settle(["64", "6"], keep_conflicts=True) == {"64": None, "6": "conflict"}
    assert settle([DAMAGED], keep_damaged=True) == {DAMAGED: None}
