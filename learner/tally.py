"""Sums of one optimizer batch that add up over micro-batches and ranks, and the metrics of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUMS = (
    "loss",
    "tokens",
    "nonfinite",
    "clip_upper",
    "clip_lower",
    "clip_dual",
    "ratio",
    "k3",
    "kl_reference",
    "importance",
    "importance_squared",
    "truncated",
    "outside",
    "outside_responses",
    "responses",
    "dropped",
    "entropy",
    "probability",
)


class Tally:
    """Named sums in fp64, the table of log-prob gaps by age, and the largest gap at age 0.

    Additive apart from `largest`, which is a maximum: `add` joins two tallies, and ranks are
    joined by a sum over `vector` and a maximum over `largest`.
    """

    def __init__(self, ages: int, device: torch.device) -> None:
        self.vector = torch.zeros(len(SUMS) + 3 * ages, dtype=torch.float64, device=device)
        self.largest = torch.zeros(1, dtype=torch.float64, device=device)

    def count(self, sums: dict[str, Tensor], gap_A3: Tensor, largest: Tensor) -> None:
        """Add the sums of one micro-batch, all of `SUMS`."""
        named = torch.stack([sums[name].double() for name in SUMS])
        self.vector += torch.cat([named, gap_A3.flatten()])
        self.largest = torch.maximum(self.largest, largest.double())

    def add(self, other: Tally, gaps: bool = True) -> None:
        """Join another one, with or without its log-prob gaps."""
        end = len(self.vector) if gaps else len(SUMS)
        self.vector[:end] += other.vector[:end]
        if gaps:
            self.largest = torch.maximum(self.largest, other.largest)

    def sum_of(self, name: str) -> float:
        return float(self.vector[SUMS.index(name)])

    def means(self) -> dict[str, float]:
        """Figures of a batch, shares and means per trained token unless said otherwise; 0 where
        nothing was trained.

        entropy, probability    of the policy, and of the tokens that were sampled
        clip_upper, clip_lower  ratio beyond 1 + high with A > 0, beyond 1 − low with A < 0
        clip_dual               loss bounded by the dual clip
        ratio_mean, kl_old      ratio, and k3 of KL(old ‖ policy)
        kl_reference            k3 of KL(policy ‖ reference); 0 if algorithm.kl_coefficient is 0
        importance_mean         truncated importance weight
        importance_ess          its effective sample size, as a share of the tokens
        importance_truncated    weights above the cap
        importance_outside      weights that the correction `mask` would drop or has dropped
        importance_outside_responses    the same of `sequence_mask`, as a share of the responses
        importance_dropped      tokens that the correction in use has dropped
        tokens_trained, responses_trained, tokens_nonfinite     counts
        """
        sums = dict(zip(SUMS, self.vector[: len(SUMS)].tolist(), strict=True))
        tokens, responses = max(1.0, sums["tokens"]), max(1.0, sums["responses"])
        squares = sums["importance_squared"] or 1.0
        return {
            "entropy": sums["entropy"] / tokens,
            "probability": sums["probability"] / tokens,
            "clip_upper": sums["clip_upper"] / tokens,
            "clip_lower": sums["clip_lower"] / tokens,
            "clip_dual": sums["clip_dual"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "kl_old": sums["k3"] / tokens,
            "kl_reference": sums["kl_reference"] / tokens,
            "importance_mean": sums["importance"] / tokens,
            "importance_ess": sums["importance"] ** 2 / squares / tokens,
            "importance_truncated": sums["truncated"] / tokens,
            "importance_outside": sums["outside"] / tokens,
            "importance_outside_responses": sums["outside_responses"] / responses,
            "importance_dropped": sums["dropped"] / tokens,
            "tokens_trained": sums["tokens"],
            "responses_trained": sums["responses"],
            "tokens_nonfinite": sums["nonfinite"],
        }

    def gaps(self) -> tuple[dict[str, float], dict[int, float]]:
        """Gap of the current version's tokens (mean and largest |Δ|, k3), and mean |Δ| by age.

        A batch without a token of the current version has no gap: NaN, not a perfect 0.
        """
        table = self.vector[len(SUMS) :].view(-1, 3).tolist()
        delta, k3, current = table[0]
        now = {
            "gap_mean": delta / current if current else math.nan,
            "gap_max": float(self.largest) if current else math.nan,
            "gap_k3": k3 / current if current else math.nan,
            "gap_tokens": current,
        }
        return now, {age: row[0] / row[2] for age, row in enumerate(table) if row[2]}
