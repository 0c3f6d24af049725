"""`dapo export`: a checkpoint as a Hugging Face folder, whatever ranks and ZeRO stage wrote it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.config import Config, load_config
from common.errors import CheckpointError
from common.stop_tokens import stop_token_ids
from learner.checkpoint import Checkpoints

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*_tokens*.json", "chat_template*")


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copy the files of a Hugging Face folder that match."""
    for pattern in patterns:
        for path in source.glob(pattern):
            shutil.copy(path, folder / path.name)


def carry_settings(folder: Path, config: Config) -> None:
    """Write what a run changed of its model's settings into an exported folder.

    These are the positions (model.max_positions) and the stop tokens (sampling.stop_tokens):
    whoever loads the folder uses the policy as it was trained.
    """
    if config.model.max_positions is not None:
        _update(folder / "config.json", max_position_embeddings=config.model.max_positions)
    if config.sampling.stop_tokens:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        stops = stop_token_ids(folder, tokenizer, config.sampling.stop_tokens)
        _update(folder / "generation_config.json", eos_token_id=stops)


def open_to_readers(folder: Path) -> None:
    """Give every file of a model the mode of its config.json.

    safetensors makes its files for their owner alone; who serves the model may be another user.
    """
    mode = (folder / "config.json").stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)


def _update(path: Path, **keys: Any) -> None:
    tree = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tree | keys, indent=2) + "\n")


def export(run_dir: Path, folder: Path) -> int:
    """Write the newest valid checkpoint of a run to `folder`; returns its version.

    Raises:
        CheckpointError: no such run, no valid checkpoint in it, or the folder exists already.
    """
    if not (run_dir / "config.toml").exists():
        raise CheckpointError(f"run directory {run_dir} does not exist; see the folders in runs/")
    config = load_config(run_dir / "config.toml")
    checkpoints = Checkpoints(run_dir, config.checkpoint.keep_last)
    version = checkpoints.newest_valid()
    if version is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint yet; checkpoint.every sets when")
    if folder.exists():
        raise CheckpointError(f"{folder} exists; choose another folder or remove it")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from huggingface_hub import save_torch_state_dict

    state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoints.path(version)), tag="state")
    model, dtype = Path(config.model.path), getattr(torch, config.model.dtype)
    tensors = {
        name.removeprefix("model."): value.to(dtype).clone() for name, value in state.items()
    }
    if json.loads((model / "config.json").read_text()).get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)  # the embedding under another name
    folder.mkdir(parents=True)
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    copy_files(model, folder, ("config.json", "generation_config.json", *TOKENIZER_FILES))
    carry_settings(folder, config)
    open_to_readers(folder)
    return version
