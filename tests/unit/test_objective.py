"""All terms of the loss of a micro-batch together, against scalar arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from common.algorithm import AlgorithmSection
from common.messages import Span
from learner.batch import MicroBatch, MiniBatch, Trajectory, collate, idle_micro_batch
from learner.objective import micro_batch_loss
from learner.tally import SUMS

BEHAVIOUR = [-1.0, math.nan, -2.0]
LOGPROB = [-1.1, -3.0, -1.9]
ENTROPY = [0.5, 0.6, 0.7]
REFERENCE = [-1.3, -9.0, -1.5]
ADVANTAGE, SCALE = 2.0, 0.25


def batch(start: list[float] | None = None, reference: list[float] | None = None) -> MicroBatch:
    ids = np.zeros(3, np.int32)
    item = Trajectory(0, 0, ids[:1], ids, np.array(BEHAVIOUR, np.float32), ADVANTAGE,
                      [Span(0, 0, 0, 3)])  # fmt: skip
    scored = [None if x is None else [np.array(x, np.float32)] for x in (start, reference)]
    return collate(MiniBatch([item], [SCALE], *scored), [0], version=1)


def loss_of(micro: MicroBatch, **keys: Any) -> tuple[float, dict[str, float], torch.Tensor]:
    logprob_N = torch.tensor(LOGPROB).requires_grad_()
    outcome = micro_batch_loss(logprob_N, torch.tensor(ENTROPY), micro, AlgorithmSection(**keys), 2)
    assert set(SUMS) <= set(outcome.sums)
    outcome.loss.backward()
    assert logprob_N.grad is not None and logprob_N.grad.isfinite().all()
    assert logprob_N.grad[1] == 0  # its behaviour log-prob is not finite
    return outcome.loss.item(), {k: v.item() for k, v in outcome.sums.items()}, logprob_N.grad


def test_with_the_direct_ratio_the_clip_is_against_the_behaviour_policy() -> None:
    loss, sums, grad_N = loss_of(batch())
    ratios = [math.exp(-0.1), math.exp(0.1)]
    assert loss == pytest.approx(-SCALE * ADVANTAGE * sum(ratios))
    assert grad_N[0].item() == pytest.approx(-SCALE * ADVANTAGE * ratios[0])
    assert sums["tokens"] == 2 and sums["nonfinite"] == 1
    assert sums["entropy"] == pytest.approx(0.5 + 0.7)
    assert sums["probability"] == pytest.approx(math.exp(-1.1) + math.exp(-1.9))
    assert sums["importance"] == pytest.approx(sum(ratios))  # of the policy of this moment


def test_decoupled_the_clip_is_against_the_start_and_the_weight_against_the_behaviour() -> None:
    loss, sums, _ = loss_of(
        batch(start=[-1.1 - math.log(1.2), 0.0, -1.9 - math.log(1.5)]),
        groups_per_batch=4, updates_per_batch=2,
    )  # fmt: skip
    weights = [math.exp(-0.1) / 1.2, math.exp(0.1) / 1.5]
    assert loss == pytest.approx(-SCALE * ADVANTAGE * (1.2 * weights[0] + 1.28 * weights[1]))
    assert sums["importance"] == pytest.approx(sum(weights))
    assert sums["clip_upper"] == 1


def test_kl_and_entropy_are_added_per_token_in_the_same_aggregation() -> None:
    plain, _, _ = loss_of(batch())
    loss, sums, grad_N = loss_of(
        batch(reference=REFERENCE), kl_coefficient=0.1, entropy_coefficient=0.01
    )
    deltas = [-1.3 + 1.1, -1.5 + 1.9]
    kl = sum(math.exp(d) - 1 - d for d in deltas)
    assert sums["kl_reference"] == pytest.approx(kl, rel=1e-5)
    assert loss == pytest.approx(plain + SCALE * (0.1 * kl - 0.01 * (0.5 + 0.7)))
    slope = 1 - math.exp(deltas[0])  # of k3 in the policy's log-prob
    expected = SCALE * (-ADVANTAGE * math.exp(-0.1) + 0.1 * slope)
    assert grad_N[0].item() == pytest.approx(expected, rel=1e-5)


def test_a_correction_leaves_kl_and_entropy_alone() -> None:
    keys = {"correction": "mask", "mask_low": 1.0, "mask_high": 1.0, "entropy_coefficient": 0.5}
    loss, sums, _ = loss_of(batch(), **keys)
    assert sums["dropped"] == 2
    assert loss == pytest.approx(-SCALE * 0.5 * (0.5 + 0.7))


@pytest.mark.parametrize("keys", [{}, {"kl_coefficient": 0.1, "entropy_coefficient": 0.1}])
def test_an_idle_micro_batch_has_loss_and_gradient_zero(keys: dict[str, Any]) -> None:
    logprob_N = torch.tensor([-0.5]).requires_grad_()
    outcome = micro_batch_loss(
        logprob_N, torch.tensor([0.3]), idle_micro_batch(), AlgorithmSection(**keys), 1
    )
    outcome.loss.backward()
    assert outcome.loss.item() == 0 and logprob_N.grad is not None
    assert logprob_N.grad.tolist() == [0.0]
    assert all(value.item() == 0 for value in outcome.sums.values())
