"""The verdict on a run: a pure function of its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.diagnosis import (
    BUSY,
    IDLE,
    JUDGING,
    PUBLISHING,
    WAITING,
    Diagnosis,
    Figures,
    Verdict,
    diagnose,
    figures_of,
    mean_of,
    stall_limit,
)

HEALTHY = Figures(
    alive={"learner": 1, "verifier": 1, "generator": 2},
    learner={"training": 0.8, "waiting": 0.1, "publishing": 0.05, "saving": 0.05},
    generators={"generating": 0.85, "idle": 0.1, "paused": 0.05},
    verifiers={"busy": 0.3, "idle": 0.7},
    groups={"unclaimed": 2, "generating": 20, "judging": 2, "accepted": 6, "training": 16},
    acceptance=0.6, batches=12, since_progress_s=20.0, interval_s=30.0,
)  # fmt: skip
STARVED = replace(HEALTHY, learner={"waiting": 0.6, "training": 0.4})
IDLE_GENERATORS = {"generating": 0.3, "idle": 0.7}
JUDGED_LATE = {"unclaimed": 0, "generating": 2, "judging": 14, "accepted": 2}


def verdict(**changes: object) -> Diagnosis:
    return diagnose(replace(HEALTHY, **changes))  # type: ignore[arg-type]


# --- the six situations -------------------------------------------------------------------------


def test_a_run_without_a_loss_above_its_threshold_is_healthy() -> None:
    found = diagnose(HEALTHY)
    assert (found.verdict, found.knob) == ("healthy", "")
    assert "80%" in found.figure


def test_a_learner_that_waits_while_generators_work_wants_more_generators() -> None:
    found = diagnose(STARVED)
    assert found.verdict == "learner starved"
    assert "60%" in found.figure and "85%" in found.figure
    assert "generator.count" in found.knob


def test_busy_verifiers_with_a_backlog_are_what_the_learner_waits_for() -> None:
    found = diagnose(replace(STARVED, verifiers={"busy": 0.97}, groups=JUDGED_LATE))
    assert found.verdict == "verifier saturated"
    assert "97%" in found.figure and "88%" in found.figure
    assert "verifier.count" in found.knob


def test_rounds_that_take_long_are_slow_publishing() -> None:
    learner = {"publishing": 0.4, "training": 0.5, "waiting": 0.1}
    found = verdict(learner=learner, generators={"paused": 0.35, "generating": 0.65})
    assert found.verdict == "publishing slow"
    assert "40%" in found.figure and "35%" in found.figure
    assert "publish.bucket_mib" in found.knob


def test_generators_without_prompts_are_starved() -> None:
    found = verdict(generators=IDLE_GENERATORS)
    assert found.verdict == "generators starved"
    assert "70%" in found.figure and "admission.max_staleness" in found.knob


def test_a_run_without_progress_has_stalled_and_the_place_of_its_groups_says_where() -> None:
    found = verdict(since_progress_s=301.0, groups=JUDGED_LATE, waiting_for="starved: 2 of 16")
    assert found.verdict == "stalled"
    assert "301 s" in found.figure and "starved: 2 of 16" in found.figure
    assert "verifiers" in found.knob


# --- the finer points ---------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["learner", "verifier", "generator"])
def test_a_role_without_a_member_stalls_a_run_that_has_begun(role: str) -> None:
    found = verdict(alive={**HEALTHY.alive, role: 0})
    assert found.verdict == "stalled" and f"no {role}" in found.figure
    assert f"dapo {role}" in found.knob


def test_before_the_first_batch_a_run_is_starting_for_as_long_as_it_may() -> None:
    nobody = {"learner": 1, "verifier": 1, "generator": 0}
    assert verdict(batches=0, alive=nobody, since_progress_s=10.0).verdict == "starting"
    assert verdict(batches=0, alive=nobody, since_progress_s=301.0).verdict == "stalled"
    assert verdict(batches=0, since_progress_s=None).verdict == "starting"


def test_long_batches_are_no_stall() -> None:
    assert stall_limit(300.0, 60.0) == 300.0
    assert stall_limit(300.0, 3600.0) == 10800.0
    assert stall_limit(300.0, None) == 300.0
    assert verdict(since_progress_s=5000.0, interval_s=3600.0).verdict == "healthy"


def test_a_learner_that_reports_no_more_has_stalled() -> None:
    found = verdict(silent_s=400.0)
    assert found.verdict == "stalled" and "not reported for 400 s" in found.figure


def test_a_run_that_is_over_is_ended_whatever_its_figures_say() -> None:
    assert verdict(ended="complete", alive={}, since_progress_s=9e9).verdict == "ended"


def test_a_low_accept_rate_is_the_fault_of_the_problems() -> None:
    found = diagnose(replace(STARVED, acceptance=0.05))
    assert found.verdict == "learner starved" and "data.train" in found.knob


def test_a_learner_and_generators_that_wait_for_each_other_want_a_larger_bound() -> None:
    found = diagnose(replace(STARVED, generators={"idle": 0.4, "generating": 0.6}))
    assert found.verdict == "learner starved" and "admission.max_staleness" in found.knob


def test_busy_verifiers_without_a_backlog_are_not_what_is_waited_for() -> None:
    assert diagnose(replace(STARVED, verifiers={"busy": 0.97})).verdict == "learner starved"


def test_a_loss_counts_from_its_threshold_on() -> None:
    assert verdict(learner={"waiting": WAITING}).verdict == "learner starved"
    assert verdict(learner={"waiting": WAITING - 0.01}).verdict == "healthy"
    assert verdict(learner={"publishing": PUBLISHING}).verdict == "publishing slow"
    assert verdict(learner={"publishing": PUBLISHING - 0.01}).verdict == "healthy"
    assert verdict(generators={"idle": IDLE}).verdict == "generators starved"
    assert verdict(generators={"idle": IDLE - 0.01}).verdict == "healthy"
    edge = replace(STARVED, verifiers={"busy": BUSY}, groups={"judging": 1, "generating": 1})
    assert JUDGING == 0.5 and diagnose(edge).verdict == "verifier saturated"


shares = st.floats(0, 1, allow_nan=False)
figures = st.builds(
    Figures,
    alive=st.fixed_dictionaries(
        {role: st.integers(0, 3) for role in ("learner", "verifier", "generator")}
    ),
    learner=st.dictionaries(st.sampled_from(["waiting", "training", "publishing"]), shares),
    generators=st.dictionaries(st.sampled_from(["generating", "idle", "paused"]), shares),
    verifiers=st.dictionaries(st.sampled_from(["busy", "idle"]), shares),
    groups=st.dictionaries(
        st.sampled_from(["unclaimed", "generating", "judging", "accepted"]), st.integers(0, 99)
    ),
    acceptance=st.none() | shares,
    batches=st.integers(0, 3),
    since_progress_s=st.none() | st.floats(0, 1e6),
    silent_s=st.floats(0, 1e6),
    interval_s=st.none() | st.floats(0, 1e5),
)


@given(figures)
def test_there_is_always_one_verdict_with_a_figure_and_a_knob_where_something_is_off(
    given_figures: Figures,
) -> None:
    found = diagnose(given_figures)
    assert found.verdict in get_args(Verdict) and found.figure
    assert bool(found.knob) == (found.verdict not in ("healthy", "starting", "ended"))


@given(figures, shares)
def test_more_waiting_never_makes_a_starved_learner_healthy(
    given_figures: Figures, more: float
) -> None:
    now = given_figures.learner.get("waiting", 0.0)
    if diagnose(given_figures).verdict in ("learner starved", "verifier saturated"):
        worse = replace(given_figures, learner={**given_figures.learner, "waiting": now + more})
        assert diagnose(worse).verdict in ("learner starved", "verifier saturated")


# --- the figures --------------------------------------------------------------------------------


def test_figures_of_an_empty_server_are_those_of_a_run_that_starts() -> None:
    assert diagnose(figures_of({"time": 1.0}, None)).verdict == "starting"


def test_only_the_living_count_for_the_shares_of_a_role() -> None:
    status = {
        "time": 100.0,
        "members": {"g-1": {"role": "generator"}, "g-2": {"role": "generator"}},
        "reports": {
            "g-1": {"shares": {"idle": 0.2}},
            "g-2": {"shares": {"idle": 0.4}},
            "g-dead": {"role": "generator", "shares": {"idle": 1.0}},
        },
    }
    found = figures_of(status, None)
    assert found.generators["idle"] == pytest.approx(0.3)
    assert found.alive == {"learner": 0, "verifier": 0, "generator": 2}


def test_the_age_of_a_report_is_added_to_the_silence_that_it_told_of() -> None:
    reports = {"learner": {"time": 90.0, "since_progress_s": 5.0, "version": 3}}
    found = figures_of({"time": 100.0, "reports": reports}, {"step": 2, "acceptance": 0.25})
    assert (found.silent_s, found.since_progress_s, found.batches) == (10.0, 15.0, 3)
    assert found.acceptance == 0.25


def test_a_mean_of_shares_takes_a_missing_one_as_nothing() -> None:
    assert mean_of([]) == {}
    assert mean_of([{"a": 1.0}, {"b": 0.5}]) == {"a": 0.5, "b": 0.25}
