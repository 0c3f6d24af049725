"""What a training engine stands on: process group, DeepSpeed's settings, model, random state."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported

import deepspeed
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import is_flash_attn_2_available
from transformers.utils import logging as transformers_logging

from common.config import Config

PERSIST_BELOW = 100_000
"""ZeRO-3 keeps parameters with fewer elements whole on every rank: gathering them costs more."""
REDUCE_ELEMENTS = 50_000_000
"""Elements of one gradient bucket."""
_NEVER = 2**31 - 1

# DeepSpeed still calls two collectives by their old names, once per gather.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
transformers_logging.disable_progress_bar()


def join_ranks() -> torch.device:
    """Join the process group that torchrun describes, or form one of a single process.

    Returns the device of this rank: its GPU, else the CPU. Collectives go over NCCL or gloo.
    """
    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            # A store inside the process needs no port, so no other process can take it.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cpu":
        # An extension for inference only, which takes minutes to compile on a fresh machine.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return device


def deepspeed_settings(config: Config, world: int) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Gradient accumulation is 1 and boundaries are set by hand, because micro-batches differ in
    number. Gradients are summed in fp32 also under bf16: a batch has many micro-batches.
    """
    learner = config.learner
    return {
        "train_batch_size": world,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": learner.grad_clip,
        "steps_per_print": _NEVER,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": learner.learning_rate,
                "betas": list(learner.betas),
                "weight_decay": learner.weight_decay,
                "torch_adam": True,  # DeepSpeed's own needs another compiled extension
            },
        },
        "zero_optimization": {
            "stage": learner.zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": REDUCE_ELEMENTS,
            "stage3_param_persistence_threshold": PERSIST_BELOW,
        },
    }


def load_model(config: Config, model_dir: Path, settings: dict[str, Any]) -> Any:
    """The causal language model of a Hugging Face folder, in the learner's dtype, dropout off.

    Dropout would make the ratio differ from 1 where the policy has not changed. Under ZeRO-3
    each rank builds its partitions only: `settings` are DeepSpeed's.
    """
    model_config = AutoConfig.from_pretrained(model_dir)
    for name, value in list(vars(model_config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(model_config, name, 0.0)
    # transformers builds partitions for as long as an object of this kind is alive.
    partitioned = HfDeepSpeedConfig(settings) if config.learner.zero_stage == 3 else None
    model = AutoModelForCausalLM.from_pretrained(
        model_dir,
        config=model_config,
        dtype=getattr(torch, config.model.dtype),
        attn_implementation=_attention(config),
    )
    del partitioned
    _restore_rotary(model)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _restore_rotary(model: Any) -> None:
    """Compute rotary frequencies again in fp32.

    Building in partitions makes every new tensor bf16, these buffers too: 0.5625 instead of
    0.5623, an error of the angle that grows with the position and that the engine does not have.
    """
    for module in model.modules():
        if "inv_freq" in module._buffers:
            for name, buffer in type(module)(module.config).named_buffers():
                setattr(module, name, buffer.to(getattr(module, name).device))


def _attention(config: Config) -> str:
    if config.model.attention != "auto":
        return config.model.attention
    fast = torch.cuda.is_available() and config.model.dtype == "bfloat16"
    return "flash_attention_2" if fast and is_flash_attn_2_available() else "sdpa"


def random_state() -> dict[str, Any]:
    """State of every generator, as tensors and plain numbers: readable without pickle."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
