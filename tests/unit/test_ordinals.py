"""Which ordinal goes out next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.ledger import Line
from common.messages import DEAD_LETTER, DEADLY
from common.order import base_ordinal, generation, recycled
from learner.ordinals import Ordinals


def sequence(taken: set[int], recycles: int = 2, after: int = 3) -> Ordinals:
    return Ordinals(recycles, after, taken.__contains__)


def lost(ordinal: int, fate: str = "stale") -> Line:
    return Line(ordinal, 0, fate, "no slot")  # type: ignore[arg-type]


def test_new_ordinals_count_up_from_0() -> None:
    ordinals = sequence(set())
    assert [ordinals.next() for _ in range(3)] == [0, 1, 2]


def test_a_lost_prompt_comes_back_later_and_not_at_the_head_of_the_queue() -> None:
    ordinals = sequence(set(), after=3)
    assert [ordinals.next() for _ in range(2)] == [0, 1]
    ordinals.give_back(lost(1))
    assert ordinals.coming_back == 1
    assert [ordinals.next() for _ in range(4)] == [2, 3, recycled(1), 4]


def test_only_what_was_lost_comes_back_and_only_as_often_as_its_budget_allows() -> None:
    ordinals = sequence(set(), recycles=1, after=0)
    for line in (lost(0, "trained"), lost(1, "filtered"), lost(recycled(2))):
        ordinals.give_back(line)
    assert ordinals.coming_back == 0
    ordinals.give_back(lost(3, "failed"))
    assert [ordinals.next() for _ in range(4)] == [0, 1, 2, recycled(3)]


def test_a_prompt_that_its_workers_died_of_does_not_come_back() -> None:
    ordinals = sequence(set(), after=0)
    ordinals.give_back(Line(0, 0, "failed", f"{DEAD_LETTER}{DEADLY}the last 3 generators"))
    assert ordinals.coming_back == 0


def test_after_a_restart_holes_go_first_then_what_was_lost_then_new_ones() -> None:
    taken = {0, 2, 5, recycled(5)}
    ordinals = sequence(taken, after=0)
    ordinals.restore(taken, [lost(2), lost(5)])
    assert [ordinals.next() for _ in range(6)] == [1, 3, 4, recycled(2), 6, 7]


@given(
    st.lists(st.sampled_from(["next", "lose", "restart"]), max_size=60),
    st.integers(0, 3), st.integers(0, 5), st.randoms(use_true_random=False),
)  # fmt: skip
def test_no_ordinal_goes_out_twice_none_is_left_out_and_budgets_hold(
    moves: list[str], recycles: int, after: int, rng: object
) -> None:
    out: list[int] = []
    fates: dict[int, Line] = {}
    ordinals = Ordinals(recycles, after, lambda o: o in out)
    for move in moves:
        still_open = [ordinal for ordinal in out if ordinal not in fates]
        if move == "next":
            out.append(ordinals.next())
        elif move == "lose" and still_open:
            line = lost(rng.choice(still_open))  # type: ignore[attr-defined]
            fates[line.ordinal] = line
            ordinals.give_back(line)
        elif move == "restart":
            ordinals = Ordinals(recycles, after, lambda o: o in out)
            ordinals.restore(out, fates.values())
    assert len(out) == len(set(out))
    first = sorted(ordinal for ordinal in out if not generation(ordinal))
    assert first == list(range(len(first)))
    assert all(generation(ordinal) <= recycles for ordinal in out)
    assert {base_ordinal(ordinal) for ordinal in out} == set(first)
