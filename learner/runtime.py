"""What a training engine stands on: process group, DeepSpeed's settings, model, layout of rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

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
from learner.rows import Layout

PERSIST_BELOW = 100_000
"""ZeRO-3 keeps parameters with fewer elements whole on every rank: gathering them costs more."""
REDUCE_ELEMENTS = 50_000_000
"""Elements of one gradient bucket."""
COLLECTIVE_S = 1800.0
"""Deadline of any collective of the ranks: then it is an error, the ranks end, and the learner is
started again. Above what rank 0 may do alone: a round, a conversion, waiting for the server."""
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
    limit = timedelta(seconds=COLLECTIVE_S)
    if not dist.is_initialized():
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=limit)
        else:
            # A store inside the process needs no port, so no other process can take it.
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device.type == "cpu":
        # An extension for inference only, which takes minutes to compile on a fresh machine.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=limit
    )
    return device


def agree(numbers: Sequence[int], operation: Any, device: torch.device) -> list[int]:
    """Reduce small integers over all ranks."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=operation)
    return [int(number) for number in tensor.tolist()]


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
    if config.model.max_positions is not None:
        model_config.max_position_embeddings = config.model.max_positions
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


def row_layout(config: Config) -> Layout:
    """How sequences lie in a micro-batch: packed where flash-attention runs them apart."""
    if config.learner.layout != "auto":
        return config.learner.layout
    flash = torch.cuda.is_available() and _attention(config) == "flash_attention_2"
    return "packed" if flash else "padded"


def _attention(config: Config) -> str:
    if config.model.attention != "auto":
        return config.model.attention
    fast = torch.cuda.is_available() and config.model.dtype == "bfloat16"
    return "flash_attention_2" if fast and is_flash_attn_2_available() else "sdpa"
