"""Factors on the clipped loss, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from common.algorithm import AlgorithmSection
from learner.correction import Correction, correct, geometric_means

WEIGHTS = [0.4, 1.0, 1.5, 6.0, 3.0, 1.0]
MASK = [True, True, True, True, False, True]
RESPONSE = [0, 0, 1, 1, 1, 2]
DECOUPLED: dict[str, Any] = {"groups_per_batch": 4, "updates_per_batch": 2}


def corrected(**keys: Any) -> Correction:
    """Three responses; the masked token has a weight that must not be looked at."""
    start_N = torch.tensor(WEIGHTS).log().requires_grad_()
    behaviour_N = torch.zeros(6)
    behaviour_N[4] = math.nan
    return correct(
        start_N, behaviour_N, torch.tensor(MASK), torch.tensor(RESPONSE), 3,
        AlgorithmSection(**keys),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "factors"),
    [
        (DECOUPLED, [0.4, 1, 1.5, 2, 0, 1]),
        ({**DECOUPLED, "importance_cap": 5.0}, [0.4, 1, 1.5, 5, 0, 1]),
        ({**DECOUPLED, "correction": "none"}, [1, 1, 1, 1, 0, 1]),
        ({**DECOUPLED, "correction": "mask"}, [0, 1, 1.5, 0, 0, 1]),
        ({**DECOUPLED, "correction": "mask", "mask_low": 0.1}, [0.4, 1, 1.5, 0, 0, 1]),
        ({**DECOUPLED, "correction": "sequence_mask"}, [0, 0, 0, 0, 0, 1]),
        ({**DECOUPLED, "correction": "sequence_mask", "mask_low": 0.6}, [1, 1, 0, 0, 0, 1]),
        ({}, [1, 1, 1, 1, 0, 1]),
        ({"correction": "mask"}, [0, 1, 1, 0, 0, 1]),
        ({"correction": "sequence_mask", "mask_high": 3.1}, [0, 0, 1, 1, 0, 1]),
    ],
)
def test_each_correction_has_the_factors_worked_out_by_hand(
    keys: dict[str, Any], factors: list[float]
) -> None:
    result = corrected(**keys)
    assert result.factor_N.tolist() == pytest.approx(factors)
    assert not result.factor_N.requires_grad
    dropped = sum(mask and not factor for mask, factor in zip(MASK, factors, strict=True))
    assert result.sums["dropped"].item() == dropped


@pytest.mark.parametrize("keys", [{}, DECOUPLED, {"correction": "sequence_mask"}])
def test_the_figures_of_every_correction_are_counted_whichever_is_in_use(
    keys: dict[str, Any],
) -> None:
    sums = {name: value.item() for name, value in corrected(**keys).sums.items()}
    truncated = [0.4, 1.0, 1.5, 2.0, 1.0]
    assert sums["importance"] == pytest.approx(sum(truncated))
    assert sums["importance_squared"] == pytest.approx(sum(w * w for w in truncated))
    assert sums["truncated"] == 1
    assert sums["outside"] == 2  # 0.4 and 6.0
    assert sums["outside_responses"] == 2  # sqrt(0.4) and 3.0; the last one is 1.0
    assert sums["responses"] == 3


def test_the_geometric_mean_looks_at_the_unmasked_tokens_of_its_response_only() -> None:
    delta_N = torch.tensor([0.4, 1.0, 6.0, 0.0]).log().nan_to_num(neginf=0.0)
    mask_N = torch.tensor([True, True, True, False])
    mean_S, some_S = geometric_means(delta_N, mask_N, torch.tensor([0, 0, 2, 1]), 3)
    assert mean_S.tolist() == pytest.approx([math.sqrt(0.4), 1.0, 6.0])
    assert some_S.tolist() == [True, False, True]


def test_no_tokens_at_all_are_corrected_without_an_error() -> None:
    nothing = torch.zeros(0)
    result = correct(nothing, nothing, nothing.bool(), nothing.long(), 1, AlgorithmSection())
    assert len(result.factor_N) == 0
    assert all(value.item() == 0 for value in result.sums.values())
