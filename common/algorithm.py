"""The section [algorithm] of a recipe: DAPO by default, its variants by key.

It also says what its keys mean together: what contradicts, what has no effect, what `auto` is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.sections import Section

Aggregation = Literal["token", "group", "sequence", "constant"]
Ratio = Literal["decoupled", "direct"]
Correction = Literal["truncate", "mask", "sequence_mask", "none"]

TOKEN_BOUNDS = (0.5, 5.0)
"""Range of importance weights that IcePop keeps (its authors' values)."""
RESPONSE_BOUNDS = (0.99, 1.01)
"""Range of their geometric mean over a response: a mean log-ratio of one hundredth per token."""


class AlgorithmSection(Section):
    group_size: int = Field(16, ge=2)
    """Responses per prompt (G)."""
    groups_per_batch: int = Field(512, ge=1)
    """Accepted groups that fill one batch (B)."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per batch; mini-batches are made of whole groups."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(10.0, gt=1)
    """Upper bound c of the loss for negative advantages; leave out with `none`."""
    dynamic_sampling: bool = True
    """Train only on groups that are neither all correct nor all wrong."""
    overlong_filter: bool = False
    """Mask the loss of responses cut at the cap; they still count in mean and std of the group."""
    advantage_normalization: Literal["std", "none"] = "std"
    """Divide by the standard deviation of the group, or not (Dr. GRPO)."""
    advantage_ddof: Literal[0, 1] = 1
    advantage_epsilon: float = Field(1e-6, ge=0)
    loss_aggregation: Aggregation = "token"
    """Mean over all tokens of the optimizer batch; over the tokens of each group, then groups; of
    each response, then responses; constant: token sum / (responses × loss_constant)."""
    loss_constant: float | None = Field(None, gt=0)
    """Denominator per response of loss_aggregation = constant; default sampling.max_tokens."""
    ratio: Literal["auto", "decoupled", "direct"] = "auto"
    """What the clip is against. decoupled: the learner's policy at the start of the batch, scored
    once; direct: the log-probs recorded at sampling. auto: direct with one update per batch."""
    correction: Literal["auto", "truncate", "mask", "sequence_mask", "none"] = "auto"
    """Correction by w = learner's / recorded probability. truncate: min(w, importance_cap); mask:
    drop tokens with w out of bounds; sequence_mask: drop responses whose geometric mean of w is out
    of bounds. auto: truncate if the ratio is decoupled, else none."""
    importance_cap: float = Field(2.0, gt=0)
    """Cap of the truncated importance weight."""
    mask_low: float | None = Field(None, ge=0, le=1)
    """Lower bound of mask and sequence_mask; default 0.5 and 0.99."""
    mask_high: float | None = Field(None, ge=1)
    """Upper bound of mask and sequence_mask; default 5 and 1.01."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of KL(policy ‖ start policy) in the loss; above 0 each rank holds the start policy
    too, whole under ZeRO 1 and 2, its part of it under ZeRO 3."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""

    @property
    def decoupled(self) -> bool:
        if self.ratio == "auto":
            return self.updates_per_batch > 1
        return self.ratio == "decoupled"

    @property
    def applied_correction(self) -> Correction:
        if self.correction == "auto":
            return "truncate" if self.decoupled else "none"
        return self.correction

    @property
    def token_bounds(self) -> tuple[float, float]:
        """Bounds of `mask`, which are reported on also where it is not in use."""
        return self._bounds("mask", TOKEN_BOUNDS)

    @property
    def response_bounds(self) -> tuple[float, float]:
        """Bounds of `sequence_mask`, which are reported on also where it is not in use."""
        return self._bounds("sequence_mask", RESPONSE_BOUNDS)

    def _bounds(self, kind: Correction, default: tuple[float, float]) -> tuple[float, float]:
        if self.applied_correction != kind:
            return default
        low = default[0] if self.mask_low is None else self.mask_low
        high = default[1] if self.mask_high is None else self.mask_high
        return low, high

    def require_consistent(self) -> None:
        """Raises:
        ValueError: two keys contradict; the message names them and the remedy.
        """
        if self.groups_per_batch % self.updates_per_batch:
            raise ValueError(
                f"algorithm.groups_per_batch = {self.groups_per_batch} does not divide into "
                f"algorithm.updates_per_batch = {self.updates_per_batch} equal mini-batches; "
                "choose a multiple"
            )
        if self.ratio == "decoupled" and self.updates_per_batch == 1:
            raise ValueError(
                "algorithm.ratio = decoupled with algorithm.updates_per_batch = 1 makes every "
                "ratio 1 and the clip inert; choose direct, or more updates"
            )
        if self.correction == "truncate" and not self.decoupled:
            raise ValueError(
                "algorithm.correction = truncate would weigh twice: with the direct ratio "
                f"(algorithm.ratio = {self.ratio}, algorithm.updates_per_batch = "
                f"{self.updates_per_batch}) the ratio is the importance weight; choose mask, "
                "sequence_mask or none"
            )

    def ineffective(self) -> list[tuple[str, str]]:
        """(key, why) of every key that the others make ineffective."""
        rows: list[tuple[str, str]] = []
        if self.advantage_normalization == "none":
            why = "with algorithm.advantage_normalization = none"
            rows += [("advantage_ddof", why), ("advantage_epsilon", why)]
        if self.loss_aggregation != "constant":
            rows.append(("loss_constant", "unless algorithm.loss_aggregation = constant"))
        kind = self.applied_correction
        why = f"with algorithm.correction = {kind}"
        if self.correction == "auto":
            why = f"with algorithm.updates_per_batch = {self.updates_per_batch}: {why[5:]}"
        if kind != "truncate":
            rows.append(("importance_cap", why))
        if kind not in ("mask", "sequence_mask"):
            rows += [("mask_low", why), ("mask_high", why)]
        return rows
