"""Group-relative advantages (DAPO, arXiv 2503.14476, equation 9; shared by GRPO)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from common.errors import NumericalError


def group_advantages(
    rewards_G: npt.ArrayLike,
    normalization: Literal["std", "none"] = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> npt.NDArray[np.float32]:
    """(R_i − mean(R)) / (std(R) + epsilon) over one group of G responses, shape (G,).

    `ddof` 1 is the sample standard deviation (verl, torch.std), 0 the population's. Without
    `normalization` the difference alone (Dr. GRPO, arXiv 2503.20783). A group without spread has
    no advantage: zeros, never a division by the epsilon alone. So has a group of one, whose raw
    reward is no advantage either.

    Raises:
        NumericalError: a reward is not finite.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise NumericalError(f"rewards {rewards.tolist()} are not all finite; fix the checker")
    # Equal rewards can leave a standard deviation of rounding errors, so the range is asked.
    if len(rewards) < 2 or np.ptp(rewards) == 0:
        return np.zeros(len(rewards), dtype=np.float32)
    spread = rewards.std(ddof=ddof) + epsilon if normalization == "std" else 1.0
    return ((rewards - rewards.mean()) / spread).astype(np.float32)
