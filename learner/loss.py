"""The DAPO loss of each token and the sums behind the metrics of a batch, as pure functions.

Figures are returned as sums over tokens: those of micro-batches and ranks add up exactly, and the
caller divides once, by the token count of the whole optimizer batch. A token that is masked has
loss 0 and is in no sum. `aggregation` says how token losses become that of the batch.

Dimension N: the response tokens of one micro-batch. Log-probs are natural logarithms under the
sampling temperature. `behaviour` is the policy that sampled the token, `old` the one that the
ratio is clipped against, `start` the learner's own policy at the start of the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


class Clip(NamedTuple):
    """Clipping of the ratio to [1 − low, 1 + high]; `dual` is the bound c, or None."""

    low: float
    high: float
    dual: float | None


class TokenLoss(NamedTuple):
    """`loss_N` has its graph and is 0 where masked; `sums` are detached scalars."""

    loss_N: Tensor
    sums: dict[str, Tensor]


def usable_tokens(mask_N: Tensor, behaviour_N: Tensor) -> tuple[Tensor, Tensor]:
    """The mask without tokens whose behaviour log-prob is not finite, and how many those are."""
    finite_N = torch.isfinite(behaviour_N)
    return mask_N & finite_N, (mask_N & ~finite_N).sum()


def log_ratio(new_N: Tensor, old_N: Tensor, mask_N: Tensor) -> Tensor:
    """new − old clamped to ±20; 0 where masked, whatever is recorded there."""
    # The inner `where` keeps a NaN out of the subtraction: NaN · 0 is NaN in a backward pass.
    difference_N = new_N - torch.where(mask_N, old_N, 0.0)
    return torch.where(mask_N, difference_N, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k3(delta_N: Tensor) -> Tensor:
    """k3 estimate of KL(p ‖ q) on tokens drawn from p, with delta = log q − log p.

    exp(delta) − 1 − delta: unbiased and never negative (Schulman, "Approximating KL divergence",
    2020; as a loss in GRPO, arXiv 2402.03300, equation 4).
    """
    return delta_N.exp() - 1 - delta_N


def token_loss(
    logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, mask_N: Tensor, clip: Clip
) -> TokenLoss:
    """Decoupled clip with dual clip (arXiv 2503.14476, equation 8; dual clip arXiv 1912.09729).

    With r = exp(logprob − old): −min(r·A, clip(r, 1 − low, 1 + high)·A), and where A < 0 at most
    −c·A.

    Sums: tokens, clip_upper (r > 1 + high, A > 0), clip_lower (r < 1 − low, A < 0), clip_dual
    (r > c, A < 0), ratio, and k3 of KL(old ‖ new).
    """
    delta_N = log_ratio(logprob_N, old_N, mask_N)
    ratio_N = delta_N.exp()
    clipped_N = ratio_N.clamp(1 - clip.low, 1 + clip.high)
    objective_N = torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    dual_N = torch.zeros_like(mask_N)
    if clip.dual is not None:
        dual_N = mask_N & (advantage_N < 0) & (objective_N < clip.dual * advantage_N)
        objective_N = torch.where(dual_N, clip.dual * advantage_N, objective_N)
    loss_N = -torch.where(mask_N, objective_N, 0.0)
    with torch.no_grad():
        sums = {
            "tokens": mask_N.sum(),
            "clip_upper": (mask_N & (ratio_N > 1 + clip.high) & (advantage_N > 0)).sum(),
            "clip_lower": (mask_N & (ratio_N < 1 - clip.low) & (advantage_N < 0)).sum(),
            "clip_dual": dual_N.sum(),
            "ratio": torch.where(mask_N, ratio_N, 0.0).sum(),
            "k3": k3(delta_N).sum(),
        }
    return TokenLoss(loss_N, sums)


def gap_sums(
    start_N: Tensor, behaviour_N: Tensor, mask_N: Tensor, age_N: Tensor, ages: int
) -> tuple[Tensor, Tensor]:
    """The gap between the engine's and the learner's log-probs, by the age of the token.

    `age_N` counts versions between sampling and training, 0 … ages − 1. Returns a table of shape
    (ages, 3) with Σ |Δ|, Σ k3 and the token count of each age, and the largest |Δ| at age 0.
    The difference is not clamped here: an alarm must see its true size.
    """
    # Masked tokens may hold anything, NaN included, so they are replaced before the arithmetic.
    delta_N = torch.where(mask_N, start_N.detach() - torch.where(mask_N, behaviour_N, 0.0), 0.0)
    clamped_N = delta_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    columns_N3 = torch.stack(
        [delta_N.abs(), k3(clamped_N), mask_N.to(delta_N.dtype)], dim=1
    ).double()
    table_A3 = torch.zeros(ages, 3, dtype=torch.float64, device=delta_N.device)
    table_A3.index_add_(0, age_N.clamp(0, ages - 1), columns_N3)
    current_N = torch.where(age_N == 0, delta_N.abs(), 0.0)
    largest = current_N.max() if len(current_N) else current_N.sum()
    return table_A3, largest
