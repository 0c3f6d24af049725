"""How vLLM is set up: environment and engine arguments."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from common.config import Config
from generator.plugin import BACKEND, QUEUE_SLEEP


def set_environment(config: Config) -> None:
    """What vLLM and its processes read from the environment; before vllm is imported."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(config.generator.threads),
        # Binding would put all the engines of one machine on the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    os.environ.update(fixed)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.generator.tensor_parallel > 1:
        os.environ.setdefault(QUEUE_SLEEP, "0.0005")


def engine_args(config: Config, model_dir: Path) -> Any:
    """vLLM's arguments for an engine of this configuration."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    generator = config.generator
    own = _cpu_args(config) if current_platform.is_cpu() else _gpu_args(config)
    return AsyncEngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=config.model.dtype,
        seed=config.run.seed,
        max_model_len=config.model.max_length,
        max_num_seqs=generator.max_samples + 1,  # the probe need not wait for a sample to end
        tensor_parallel_size=generator.tensor_parallel,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        hf_overrides=_model_overrides(config),
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="generator.weights.WeightReport",
        disable_log_stats=True,
        **own,
    )


def _model_overrides(config: Config) -> dict[str, Any]:
    """Keys of the model's config.json that the engine reads otherwise, as the learner does."""
    positions = config.model.max_positions
    return {} if positions is None else {"max_position_embeddings": positions}


def _cpu_args(config: Config) -> dict[str, Any]:
    args: dict[str, Any] = {
        "kv_cache_memory_bytes": math.ceil(config.generator.kv_cache_gib * 2**30),
        # A prompt prefilled in parts rewinds its sample's random generator, which on a CPU
        # ends the whole engine ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
    }
    if config.generator.tensor_parallel == 1:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        # The class, since vLLM turns the name "uni" into its multi-process executor, which
        # starves whoever shares the machine.
        args["distributed_executor_backend"] = UniProcExecutor
    return args


def _gpu_args(config: Config) -> dict[str, Any]:
    return {"gpu_memory_utilization": config.generator.gpu_memory_utilization}
