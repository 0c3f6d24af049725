"""The reference policy of the KL term: the start policy, frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from common.config import Config
from learner.policy import Policy
from learner.runtime import deepspeed, deepspeed_settings, load_model


def load_reference(config: Config, model_dir: Path, world: int, device: torch.device) -> Any:
    """A frozen policy out of a Hugging Face folder, in model.dtype, to be called like the trained
    one: on all ranks in step.

    It costs one more copy of the weights: whole on each rank's device under ZeRO 1 and 2, a
    partition of it under ZeRO-3, gathered layer by layer as in training.
    """
    settings = deepspeed_settings(config, world)
    policy = Policy(load_model(config, model_dir, settings)).requires_grad_(False)
    if config.learner.zero_stage < 3:
        return policy.to(device).eval()
    del settings["optimizer"]
    engine, *_ = deepspeed.initialize(model=policy, config=settings)
    engine.eval()  # which, unlike a module's, returns nothing
    return engine
