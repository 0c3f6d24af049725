"""Signs of life, and the pace of those that live."""

from __future__ import annotations

from learner.generators import Pace, hear, pace, silent
from learner.groups import OpenGroup


def test_only_a_figure_that_changes_is_a_sign_of_life() -> None:
    waiting = {"1": OpenGroup(0, since=0.0), "2": OpenGroup(0, since=0.0)}
    reports = {"g": {"progress": {"1": 5, "9": 1}}, "dead": {"progress": {"1": 3, "2": 3}}}
    hear(waiting, reports, now=10.0)
    assert silent(waiting, 10.0, limit_s=8.0) == []
    reports["g"] = {"progress": {"1": 6}}
    hear(waiting, reports, now=20.0)
    assert silent(waiting, 20.0, limit_s=8.0) == ["2"]
    hear(waiting, reports, now=40.0)
    assert silent(waiting, 40.0, limit_s=8.0) == ["1", "2"]


def test_a_group_that_makes_tokens_is_never_silent_however_long_it_takes() -> None:
    waiting = {"1": OpenGroup(0, since=0.0)}
    for second in range(1, 1000):
        hear(waiting, {"g": {"progress": {"1": second}}}, now=float(second))
        assert silent(waiting, float(second), limit_s=2.0) == []


def test_the_pace_is_that_of_the_living() -> None:
    reports = {
        "a": {"running": 8, "tokens_per_second": 100.0},
        "b": {"running": 4, "tokens_per_second": 50.5},
        "dead": {"running": 64, "tokens_per_second": 999.0},
    }
    assert pace(reports, ["a", "b", "has just joined"]) == Pace(12, 150.5)
    assert pace({}, ["a"]) == Pace()
