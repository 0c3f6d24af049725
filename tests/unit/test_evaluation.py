"""An evaluation: what is sent, when it is done, and the figures by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.data import Row
from common.messages import Verdict, Version
from learner.evaluation import Evaluation
from tests.unit.records import a_judgement


def rows(count: int) -> list[Row]:
    return [
        Row(str(n), np.arange(1, 3, dtype=np.int32), str(n), "math", True) for n in range(count)
    ]


def verdict(index: int, *outcomes: str, fate: str = "accepted") -> Verdict:
    judged = [a_judgement(outcome, 10, Version(1, 2)) for outcome in outcomes]
    return Verdict(f"e-{index}", -1 - index, 0, True, fate, "", judged, "v")  # type: ignore[arg-type]


def test_problems_are_sent_once_in_order_as_there_is_room() -> None:
    evaluation = Evaluation("5", rows(5))
    sent = [list(evaluation.next(room)) for room in (2, 0, -3, 2, 9, 9)]
    assert sent == [[0, 1], [], [], [2, 3], [4], []]


def test_groups_are_named_by_label_and_problem() -> None:
    assert Evaluation("before", rows(2)).group(1) == "ebefore-1"


def test_it_is_done_when_every_problem_has_a_verdict_however_often_it_comes() -> None:
    evaluation = Evaluation("5", rows(2))
    evaluation.add(0, verdict(0, "correct"))
    evaluation.add(0, verdict(0, "correct"))
    assert not evaluation.done
    evaluation.add(1, verdict(1, "wrong"))
    assert evaluation.done


def test_the_result_has_the_means_over_problems_with_their_error() -> None:
    evaluation = Evaluation("5", rows(4))
    evaluation.add(0, verdict(0, "correct", "correct"))
    evaluation.add(1, verdict(1, "correct", "wrong"))
    evaluation.add(2, verdict(2, "no_answer", "wrong"))
    evaluation.add(3, verdict(3, fate="failed"))
    result = evaluation.result()
    assert result["accuracy"] == pytest.approx(0.5)
    assert result["pass_at_k"] == pytest.approx(2 / 3)
    # the means are 1, 0.5, 0; their sample standard deviation is 0.5
    assert result["standard_error"] == pytest.approx(0.5 / math.sqrt(3))
    assert result["problems"] == 3
    assert result["samples"] == 6
    assert result["failed"] == 1
    assert result["no_answer_share"] == pytest.approx(1 / 6)
    assert result["length_mean"] == 10
    assert result["versions"] == [2]


def test_an_evaluation_of_which_everything_failed_has_a_result_without_a_division_by_zero() -> None:
    evaluation = Evaluation("5", rows(1))
    evaluation.add(0, verdict(0, fate="failed"))
    result = evaluation.result()
    assert (result["accuracy"], result["problems"], result["failed"]) == (0, 0, 1)
