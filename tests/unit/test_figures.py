"""What is reported of a batch, before and after the filter, and whether long groups come short."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from common.messages import Judged, Verdict, Version
from learner.figures import batch_figures
from learner.groups import Chosen, Judgements, OpenGroup, group_tokens
from learner.length_bias import LengthBias
from tests.unit.records import a_judgement

LOGGED = (
    "groups", "samples", "attempts", "accuracy", "accuracy_raw", "reward", "reward_raw",
    "reward_unshaped", "reward_unshaped_raw", "penalty", "length_mean", "length_p10", "length_p50",
    "length_p90", "length_p99", "length_max", "length_mean_raw", "length_p10_raw",
    "length_p50_raw", "length_p90_raw", "length_p99_raw", "length_max_raw", "at_cap_share",
    "truncated_share", "acceptance", "all_correct_share", "all_wrong_share",
    "all_no_answer_share", "no_answer_share", "staleness_mean", "staleness_max", "versions_mean",
    "versions_max", "multi_version_samples", "by_generator", "groups_judged", "verdicts_failed",
    "lost_generating",
)  # fmt: skip


def judged(
    outcome: str, length: int, oldest: int = 0, newest: int = 0, penalty: float = 0.0
) -> Judged:
    item = a_judgement(outcome, length, Version(1, oldest))
    return dataclasses.replace(
        item, newest=Version(1, newest), penalty=penalty, reward=item.reward + penalty,
        truncated=penalty == -1.0,
    )  # fmt: skip


def a_group(ordinal: int, reason: str, *samples: Judged) -> Verdict:
    fate: Any = "accepted" if reason == "mixed" else "filtered"
    return Verdict(str(ordinal), ordinal, 0, False, fate, reason, list(samples), "v")


MIXED = a_group(0, "mixed", judged("correct", 10, 3, 3), judged("wrong", 30, 2, 4, penalty=-1.0))
ANOTHER = a_group(1, "mixed", judged("correct", 20, 4, 4), judged("wrong", 40, 4, 4))
RIGHT = a_group(2, "all_correct", judged("correct", 5), judged("correct", 15))
WRONG = a_group(3, "all_wrong", judged("wrong", 100), judged("no_answer", 200))
SILENT = a_group(4, "no_answer", judged("no_answer", 50), judged("no_answer", 60))


def figures() -> dict[str, Any]:
    tally = Judgements(failed=2)
    for verdict in (MIXED, ANOTHER, RIGHT, WRONG, SILENT):
        tally.add(verdict)
    return batch_figures({"loss": 0.5}, [Chosen(0, 1, MIXED), Chosen(1, 0, ANOTHER)], tally, 4)


def test_every_figure_of_the_list_is_there_beside_those_of_the_engine() -> None:
    assert figures().keys() == {*LOGGED, "loss"}


def test_accuracy_and_reward_are_told_before_and_after_the_filter_shaped_and_unshaped() -> None:
    row = figures()
    assert (row["accuracy"], row["accuracy_raw"]) == (0.5, 0.4)
    assert (row["reward"], row["reward_unshaped"], row["penalty"]) == (-0.25, 0.0, -0.25)
    assert row["reward_raw"] == pytest.approx(-0.3)
    assert row["reward_unshaped_raw"] == pytest.approx(-0.2)


def test_the_filters_shares_are_of_groups_and_those_without_an_answer_are_among_the_wrong() -> None:
    row = figures()
    assert row["acceptance"] == 0.4
    assert (row["all_correct_share"], row["all_wrong_share"]) == (0.2, 0.4)
    assert row["all_no_answer_share"] == 0.2
    assert row["no_answer_share"] == 0.3  # of samples
    assert (row["groups_judged"], row["verdicts_failed"]) == (5, 2)


def test_staleness_and_versions_are_those_of_the_samples_trained() -> None:
    row = figures()
    assert (row["staleness_mean"], row["staleness_max"]) == (0.75, 2)
    assert (row["versions_mean"], row["versions_max"]) == (1.5, 3)
    assert (row["multi_version_samples"], row["attempts"]) == (1, 1)
    assert row["by_generator"] == {"g": 4}


def test_lengths_of_generated_and_trained_samples_lie_side_by_side() -> None:
    row = figures()
    assert (row["length_mean"], row["length_p50"], row["length_max"]) == (25.0, 25.0, 40)
    assert (row["length_mean_raw"], row["length_max_raw"]) == (53.0, 200)
    everyone = [10, 30, 20, 40, 5, 15, 100, 200, 50, 60]
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert row[f"length_{name}_raw"] == pytest.approx(np.quantile(everyone, share))
    assert (row["at_cap_share"], row["truncated_share"]) == (0.25, 0.1)


def test_where_nothing_was_judged_a_figure_is_none_and_no_zero() -> None:
    row = batch_figures({}, [Chosen(0, 0, MIXED)], Judgements(), 4)
    assert row["accuracy"] == 0.5
    assert row["accuracy_raw"] is None
    assert row["length_p99_raw"] is None
    assert row["acceptance"] is None


# --- a bias of length -----------------------------------------------------------------------------


def made(passed: list[int], lost: list[int] | None = None) -> Judgements:
    tally = Judgements(groups=len(passed), passed=passed)
    for tokens in lost or []:
        tally.lose(OpenGroup(0, 0.0, tokens={"g": tokens, "dead": 1}))
    return tally


def test_a_ratio_of_1_says_that_long_groups_are_trained_as_often_as_they_are_made() -> None:
    bias, dice = LengthBias(window=10_000), random.Random(1)
    for _ in range(50):
        tokens = [int(dice.lognormvariate(4, 1)) for _ in range(40)]
        bias.add(tokens, made(tokens))
    assert bias.ratio == pytest.approx(1.0)


def test_groups_lost_while_they_are_generated_show_a_bias_by_the_tokens_they_had() -> None:
    bias = LengthBias(window=10_000)
    for _ in range(50):
        bias.add([10] * 19 + [300], made([10] * 19 + [300], lost=[250, 280]))
    assert bias.ratio is not None
    assert bias.ratio == pytest.approx((1 / 20) / (3 / 22))


def test_a_group_that_has_its_verdict_was_not_lost_while_it_was_generated() -> None:
    tally = Judgements()
    tally.lose(OpenGroup(0, 0.0, tokens={"g": 9}, verdict=MIXED))
    assert tally.lost == []
    assert group_tokens(MIXED) == 40


def test_the_ratio_is_of_late_and_none_while_too_few_are_known() -> None:
    bias = LengthBias(window=40)
    bias.add([1] * 5, made([1] * 5))
    assert bias.ratio is None
    for _ in range(8):
        bias.add([10] * 10, made([10] * 9 + [99]))
    assert bias.ratio == 0.0
    for _ in range(8):
        bias.add([10] * 9 + [99], made([10] * 9 + [99]))
    assert bias.ratio == pytest.approx(1.0)
