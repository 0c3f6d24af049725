"""`dapo export`: a checkpoint as a Hugging Face folder, whatever ranks and ZeRO stage wrote it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from common.config import load_config
from common.errors import CheckpointError
from learner.checkpoint import Checkpoints

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*_tokens*.json", "chat_template*")


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copy the files of a Hugging Face folder that match."""
    for pattern in patterns:
        for path in source.glob(pattern):
            shutil.copy(path, folder / path.name)


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
    return version
