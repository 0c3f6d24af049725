"""Correction for what lies between the policy that sampled a token and the one that trains on it.

w = exp(log π_start − log π_behaviour) of each token covers stale versions, kept KV caches and the
numerical gap between engine and learner. A correction is a factor on the clipped loss of a token:

truncate        min(w, cap): truncated importance weights, which keep the expectation of the
                gradient up to the bias of the cap
mask            IcePop: 0 where w is outside [low, high], w inside
sequence_mask   0 on a whole response if the geometric mean of its w is outside, 1 inside
none            1

The denominators of the loss do not change: a token that is masked here counts as a token with loss
0. So the factors of the loss are known before any forward pass, and what is left does not weigh
more because something else was dropped. The terms for KL and entropy are not corrected.

Where the ratio is taken against the behaviour policy itself it is the importance weight already:
there `mask` has 1 inside, and `truncate` is refused.

Dimensions: N response tokens of one micro-batch, S responses of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithm import AlgorithmSection
from learner.loss import log_ratio


class Correction(NamedTuple):
    """`factor_N` is detached and 0 where masked; `sums` are scalars that add up."""

    factor_N: Tensor
    sums: dict[str, Tensor]


@torch.no_grad()
def correct(
    start_N: Tensor,
    behaviour_N: Tensor,
    mask_N: Tensor,
    response_N: Tensor,
    responses: int,
    algorithm: AlgorithmSection,
) -> Correction:
    """The factor of each token in the clipped loss, and the figures of all corrections.

    `response_N` numbers the responses from 0 to `responses` − 1; a response is whole.

    Sums, whatever the correction: importance and importance_squared of min(w, cap); truncated,
    the tokens above the cap; outside and outside_responses, what `mask` and `sequence_mask` would
    drop; responses, those with an unmasked token; dropped, the tokens that are dropped.
    """
    delta_N = log_ratio(start_N, behaviour_N, mask_N)
    weight_N = torch.where(mask_N, delta_N.exp(), 0.0)
    truncated_N = weight_N.clamp(max=algorithm.importance_cap)
    outside_N = mask_N & _outside(weight_N, algorithm.token_bounds)
    mean_S, some_S = geometric_means(delta_N, mask_N, response_N, responses)
    outside_S = some_S & _outside(mean_S, algorithm.response_bounds)
    ones_N = mask_N.to(weight_N.dtype)
    factor_N = {
        "none": ones_N,
        "truncate": truncated_N,
        "mask": (weight_N if algorithm.decoupled else ones_N) * ~outside_N,
        "sequence_mask": ones_N * ~outside_S[response_N],
    }[algorithm.applied_correction]
    sums = {
        "importance": truncated_N.sum(),
        "importance_squared": truncated_N.square().sum(),
        "truncated": (weight_N > algorithm.importance_cap).sum(),
        "outside": outside_N.sum(),
        "outside_responses": outside_S.sum(),
        "responses": some_S.sum(),
        "dropped": (mask_N & (factor_N == 0)).sum(),
    }
    return Correction(factor_N, sums)


def geometric_means(
    delta_N: Tensor, mask_N: Tensor, response_N: Tensor, responses: int
) -> tuple[Tensor, Tensor]:
    """exp of the mean of `delta_N` over the unmasked tokens of each response, and which have any.

    Both of shape (S,); `delta_N` is 0 where masked.
    """
    count_S = torch.zeros(responses, dtype=delta_N.dtype, device=delta_N.device)
    count_S.index_add_(0, response_N, mask_N.to(delta_N.dtype))
    total_S = torch.zeros_like(count_S).index_add_(0, response_N, delta_N)
    return (total_S / count_S.clamp(min=1)).exp(), count_S > 0


def _outside(value: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (value < bounds[0]) | (value > bounds[1])
