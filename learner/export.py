"""`dapo export`: a checkpoint as a Hugging Face folder, whatever ranks and ZeRO stage wrote it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common.config import load_config
from common.errors import CheckpointError
from learner.checkpoint import Checkpoints

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*_tokens*.json", "chat_template*")


def export(run_dir: Path, folder: Path) -> int:
    """Write the newest valid checkpoint of a run to `folder`; returns its version.

    Raises:
        CheckpointError: the run has no valid checkpoint, or the folder exists already.
    """
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
    dtype = getattr(torch, config.model.dtype)
    model = Path(config.model.path)
    tensors = {name.removeprefix("model."): value.to(dtype) for name, value in state.items()}
    folder.mkdir(parents=True)
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    for pattern in ("config.json", "generation_config.json", *TOKENIZER_FILES):
        for path in model.glob(pattern):
            shutil.copy(path, folder / path.name)
    return version
