"""Base models that recipes name in [base]: made once, cached by their settings."""

from __future__ import annotations

from collections.abc import Callable

from common.config import Config
from common.errors import ConfigError
from common.startup import base_dir


def make_base(config: Config, tell: Callable[[str], None]) -> None:
    """Make model and data files of [base] unless they are there already.

    Raises:
        ConfigError: the recipe has no section [base].
    """
    folder = base_dir(config)
    if config.base is None or folder is None:
        raise ConfigError("the recipe has no section [base]; it names a model folder of its own")
    if (folder / "base.json").exists():
        return
    try:
        if config.base.kind == "arithmetic":
            import torch

            from learner.warmup import build_arithmetic

            torch.set_num_threads(1)  # more gain nothing at this size, and spin where cores are few
            build_arithmetic(folder, config.base, tell)
        else:
            from learner.smollm2 import build_smollm2

            build_smollm2(folder, config.base, tell)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[base] cannot be made in {folder}: {error}") from error
