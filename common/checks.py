"""What `--dry-run` checks before anything is started, and says of each check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from common.config import Config
from common.errors import ConfigError, DapoError
from common.startup import base_dir, require_model


def dry_run_text(config: Config) -> str:
    """One line per check.

    Raises:
        ConfigError: at least one check failed; the message names each.
    """
    lines, faults = [], []
    for name, check in _CHECKS.items():
        try:
            lines.append(f"ok    {name}: {check(config)}")
        except DapoError as error:
            faults.append(str(error))
            lines.append(f"FAULT {name}: {error}")
    if faults:
        raise ConfigError("; ".join(faults) + "\n" + "\n".join(lines))
    return "\n".join(lines)


def _model(config: Config) -> str:
    folder = base_dir(config)
    if folder is not None and not (folder / "base.json").exists():
        return f"`dapo run` makes {folder} first"
    return str(require_model(config))


def _context(config: Config) -> str:
    """The run's length against what the model was made for."""
    path = Path(config.model.path) / "config.json"
    if not path.exists():
        return "checked once the model is there"
    longest = json.loads(path.read_text()).get("max_position_embeddings")
    if longest is not None and config.model.max_length > longest:
        raise ConfigError(
            f"model.max_length = {config.model.max_length} is above the model's "
            f"max_position_embeddings = {longest}; lower it, or raise the model's in {path}"
        )
    return f"{config.model.max_length} of {longest} positions"


def _data(config: Config) -> str:
    folder = base_dir(config)
    names = [*config.data.train, *([config.data.heldout] if config.data.heldout else [])]
    for name in names:
        if not Path(name).exists():
            if folder is not None and name.startswith(str(folder)):
                return f"`dapo run` makes {folder} first"
            raise ConfigError(f"data file {name} does not exist")
    return ", ".join(names)


def _batch(config: Config) -> str:
    algorithm = config.algorithm
    sequences = algorithm.groups_per_batch * algorithm.group_size
    steps = algorithm.updates_per_batch
    return f"{sequences} sequences a batch, {sequences // steps} an optimizer step, {steps} steps"


_CHECKS: dict[str, Callable[[Config], str]] = {
    "model": _model,
    "context": _context,
    "data": _data,
    "batch": _batch,
}
