"""The token-level loss and its sums, against scalar arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from learner.loss import (
    Clip,
    TokenLoss,
    gap_sums,
    k3,
    log_ratio,
    token_loss,
    usable_tokens,
)

CLIP = Clip(low=0.2, high=0.28, dual=10.0)
NAN, INF = math.nan, math.inf


def loss_of(
    ratios: Sequence[float], advantages: Sequence[float], clip: Clip = CLIP
) -> tuple[TokenLoss, Tensor]:
    """The loss of tokens with these ratios, and the leaf with their log-probs."""
    logprob_N = torch.tensor(ratios).log().requires_grad_()
    old_N, mask_N = torch.zeros(len(ratios)), torch.ones(len(ratios), dtype=torch.bool)
    return token_loss(logprob_N, old_N, torch.tensor(advantages), mask_N, clip), logprob_N


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.27, 2.0, -2.54),
        (1.5, 2.0, -2.56),  # clipped at 1.28: raised too far already
        (0.5, 2.0, -1.0),  # the minimum keeps the ratio: it may still rise
        (0.81, -2.0, 1.62),
        (0.5, -2.0, 1.6),  # clipped at 0.8: lowered too far already
        (1.5, -2.0, 3.0),
        (12.0, -2.0, 20.0),  # dual clip: at most 10 · |A|
        (12.0, 2.0, -2.56),
    ],
)
def test_one_token_has_the_loss_of_the_formula(ratio: float, advantage: float, loss: float) -> None:
    result, _ = loss_of([ratio], [advantage])
    assert result.loss_N.sum().item() == pytest.approx(loss, rel=1e-6)


def test_without_dual_clip_the_loss_of_a_risen_bad_token_is_not_bounded() -> None:
    result, _ = loss_of([12.0], [-2.0], CLIP._replace(dual=None))
    assert result.loss_N.sum().item() == pytest.approx(24.0, rel=1e-6)


def test_clipped_tokens_have_no_gradient_and_the_others_minus_ratio_times_advantage() -> None:
    ratios, advantages = [1.0, 1.5, 0.5, 0.5, 12.0, 1.1], [2.0, 2.0, 2.0, -2.0, -2.0, -3.0]
    result, logprob_N = loss_of(ratios, advantages)
    result.loss_N.sum().backward()
    expected = torch.tensor([-2.0, 0.0, -1.0, 0.0, 0.0, 3.3])
    torch.testing.assert_close(logprob_N.grad, expected, rtol=1e-5, atol=1e-6)


def test_the_log_ratio_is_clamped_at_twenty() -> None:
    mask = torch.ones(2, dtype=torch.bool)
    delta = log_ratio(torch.tensor([50.0, -50.0]), torch.zeros(2), mask)
    assert delta.tolist() == [20.0, -20.0]
    result, _ = loss_of([1.0], [1.0])
    huge = token_loss(torch.tensor([900.0]), torch.zeros(1), torch.tensor([-1.0]), mask[:1], CLIP)
    assert math.isfinite(huge.loss_N.sum().item()) and math.isfinite(result.loss_N.sum().item())


def test_a_masked_token_is_missing_from_numerator_and_denominator() -> None:
    logprob_N = torch.tensor([0.1, NAN, 0.2, -0.3]).requires_grad_()
    old_N = torch.tensor([0.0, 0.0, NAN, 0.0])
    advantage_N = torch.tensor([1.0, 5.0, 5.0, -1.0])
    mask_N = torch.tensor([True, False, False, True])
    result = token_loss(logprob_N, old_N, advantage_N, mask_N, CLIP)
    keep = torch.tensor([0, 3])
    alone = token_loss(
        logprob_N[keep], old_N[keep], advantage_N[keep], torch.ones(2, dtype=torch.bool), CLIP
    )
    assert result.loss_N.sum().item() == alone.loss_N.sum().item()
    assert {k: v.item() for k, v in result.sums.items()} == pytest.approx(
        {k: v.item() for k, v in alone.sums.items()}
    )
    assert result.sums["tokens"].item() == 2
    result.loss_N.sum().backward()
    assert logprob_N.grad is not None
    assert logprob_N.grad[1:3].tolist() == [0.0, 0.0]
    assert logprob_N.grad.isfinite().all()


def test_an_all_masked_micro_batch_has_loss_zero_and_gradient_zero() -> None:
    logprob_N = torch.tensor([0.1, 0.2]).requires_grad_()
    mask_N = torch.zeros(2, dtype=torch.bool)
    result = token_loss(logprob_N, torch.tensor([NAN, -INF]), torch.ones(2), mask_N, CLIP)
    result.loss_N.sum().backward()
    assert result.loss_N.sum().item() == 0 and result.sums["tokens"].item() == 0
    assert logprob_N.grad is not None and logprob_N.grad.tolist() == [0.0, 0.0]


def test_behaviour_log_probs_that_are_not_finite_are_masked_and_counted() -> None:
    counted = torch.tensor([True, True, True, True, False])
    mask, nonfinite = usable_tokens(counted, torch.tensor([-1.0, NAN, -INF, -2.0, NAN]))
    assert mask.tolist() == [True, False, False, True, False]
    assert nonfinite.item() == 2


def test_each_clip_counts_only_where_it_acts() -> None:
    ratios = [1.3, 1.3, 0.7, 0.7, 1.27, 0.81, 12.0, 12.0, 9.9]
    result, _ = loss_of(ratios, [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    assert result.sums["clip_upper"].item() == 2
    assert result.sums["clip_lower"].item() == 1
    assert result.sums["clip_dual"].item() == 1
    without, _ = loss_of(ratios, [-1.0] * len(ratios), CLIP._replace(dual=None))
    assert without.sums["clip_dual"].item() == 0


def test_sums_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old, advantage = torch.randn(3, 40, generator=generator).unbind()
    mask = torch.rand(40, generator=generator) < 0.8
    whole = token_loss(new, old, advantage, mask, CLIP)
    parts = [
        token_loss(new[part], old[part], advantage[part], mask[part], CLIP)
        for part in (slice(0, 3), slice(3, 3), slice(3, 40))
    ]
    torch.testing.assert_close(torch.cat([part.loss_N for part in parts]), whole.loss_N)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(part.sums[name] for part in parts), value)


def test_sums_of_ratio_and_kl_are_those_of_the_formula() -> None:
    result, _ = loss_of([1.5, 0.5], [1.0, 1.0])
    kl = (1.5 - 1 - math.log(1.5)) + (0.5 - 1 - math.log(0.5))
    assert result.sums["k3"].item() == pytest.approx(kl, rel=1e-5)
    assert result.sums["ratio"].item() == pytest.approx(2.0, rel=1e-6)


def test_k3_averages_to_the_kl_divergence_and_is_never_negative() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.2, 0.3])
    estimates = k3(q.log() - p.log())
    assert (estimates >= 0).all()
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * estimates).sum(), exact)


def test_the_gap_is_reported_by_age_and_its_maximum_looks_at_age_zero_only() -> None:
    start_N = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0])
    behaviour_N = torch.tensor([-1.5, -0.8, -4.0, NAN, -1.1])
    mask_N = torch.tensor([True, True, True, False, True])
    age_N = torch.tensor([0, 0, 2, 0, 2])
    table, largest = gap_sums(start_N, behaviour_N, mask_N, age_N, ages=3)
    assert table[:, 0].tolist() == pytest.approx([0.7, 0.0, 3.1], rel=1e-5)
    assert table[:, 2].tolist() == [2, 0, 2]
    k3 = (math.exp(0.5) - 1.5) + (math.exp(-0.2) - 0.8)
    assert table[0, 1].item() == pytest.approx(k3, rel=1e-5)
    assert largest.item() == pytest.approx(0.5)


def test_the_gap_of_no_tokens_is_zero() -> None:
    nothing = torch.zeros(0)
    table, largest = gap_sums(nothing, nothing, nothing.bool(), nothing.long(), ages=2)
    assert table.sum().item() == 0 and largest.item() == 0
