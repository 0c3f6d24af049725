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
    "ratio",
    "importance",
    "importance_squared",
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
        """Add the sums of one micro-batch; names that are no metric of a batch are ignored."""
        zero = torch.zeros((), device=self.vector.device)
        named = torch.stack([sums.get(name, zero).double() for name in SUMS])
        self.vector += torch.cat([named, gap_A3.flatten()])
        self.largest = torch.maximum(self.largest, largest.double())

    def add(self, other: Tally) -> None:
        self.vector += other.vector
        self.largest = torch.maximum(self.largest, other.largest)

    def sum_of(self, name: str) -> float:
        return float(self.vector[SUMS.index(name)])

    def means(self) -> dict[str, float]:
        """Per-token means of a batch; 0 where nothing was trained.

        `importance_ess` is the effective sample size as a share of the tokens: 1 when all
        importance weights are equal.
        """
        sums = dict(zip(SUMS, self.vector[: len(SUMS)].tolist(), strict=True))
        tokens = max(1.0, sums["tokens"])
        squares = sums["importance_squared"] or 1.0
        return {
            "entropy": sums["entropy"] / tokens,
            "probability": sums["probability"] / tokens,
            "clip_upper": sums["clip_upper"] / tokens,
            "clip_lower": sums["clip_lower"] / tokens,
            "ratio_mean": sums["ratio"] / tokens,
            "importance_mean": sums["importance"] / tokens,
            "importance_ess": sums["importance"] ** 2 / squares / tokens,
            "tokens_trained": sums["tokens"],
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
