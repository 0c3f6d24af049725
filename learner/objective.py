"""The loss of a micro-batch, all terms together: a pure function from log-probs to a scalar.

Dimension N: the response tokens of the micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from common.algorithm import AlgorithmSection
from learner.batch import MicroBatch
from learner.correction import correct
from learner.loss import Clip, gap_sums, k3, log_ratio, token_loss, usable_tokens


class Outcome(NamedTuple):
    """`loss` has its graph; the rest is detached and goes into a `Tally`."""

    loss: Tensor
    sums: dict[str, Tensor]
    gap_A3: Tensor
    largest_gap: Tensor


def micro_batch_loss(
    logprob_N: Tensor, entropy_N: Tensor, batch: MicroBatch, algorithm: AlgorithmSection, ages: int
) -> Outcome:
    """The part of one micro-batch in the loss of the optimizer batch:

    Σ s·(f·ℓ + β·KL − η·H) over its unmasked tokens, with the scale s of `aggregation`, the factor
    f of `correction`, the clipped loss ℓ, the k3 estimate of KL(policy ‖ reference) and the
    entropy H.

    The clip is against the policy at the start of the batch if it was scored (decoupled), else
    against the behaviour policy (direct). Where it was not scored the policy of this moment takes
    its place in corrections and figures: the same before the first step of a batch.
    """
    mask_N, nonfinite = usable_tokens(batch.counted_N, batch.behaviour_N)
    start_N = logprob_N.detach() if batch.start_N is None else batch.start_N
    old_N = start_N if algorithm.decoupled else batch.behaviour_N
    clip = Clip(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip)
    clipped = token_loss(logprob_N, old_N, batch.advantage_N, mask_N, clip)
    correction = correct(
        start_N, batch.behaviour_N, mask_N, batch.response_N, batch.responses, algorithm
    )
    loss_N = clipped.loss_N * correction.factor_N
    masked_entropy_N = torch.where(mask_N, entropy_N, 0.0)
    if algorithm.entropy_coefficient:
        loss_N = loss_N - algorithm.entropy_coefficient * masked_entropy_N
    kl_N = torch.zeros_like(logprob_N)
    if batch.reference_N is not None:
        kl_N = k3(log_ratio(batch.reference_N, logprob_N, mask_N))
        loss_N = loss_N + algorithm.kl_coefficient * kl_N
    loss = (loss_N * batch.scale_N).sum()
    sums = {
        "loss": loss.detach(),
        "nonfinite": nonfinite,
        "entropy": masked_entropy_N.detach().sum(),
        "probability": torch.where(mask_N, logprob_N.detach().exp(), 0.0).sum(),
        "kl_reference": kl_N.detach().sum(),
        **clipped.sums,
        **correction.sums,
    }
    return Outcome(loss, sums, *gap_sums(start_N, batch.behaviour_N, mask_N, batch.age_N, ages))
