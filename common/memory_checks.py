"""Start-up checks of memory and devices: what a role needs against what this machine has.

Estimates are compared with this machine only where the model is on it; elsewhere they are told.
"""

from __future__ import annotations

from common.errors import ConfigError
from common.memory import (
    ENGINE_RESERVE,
    GIB,
    TrainingLoad,
    engine_weights,
    kv_token_bytes,
    learner_memory,
)
from common.model_facts import Architecture
from common.subject import Note, Subject

_UNKNOWN = "not estimated: the shape of the model is not known"
_TIGHT = 0.9
"""Share of the memory above which an estimate is too near to be relied on."""


def training_load(subject: Subject) -> TrainingLoad:
    """What a rank does with its largest micro-batch; a long sequence alone may be larger."""
    model, learner = subject.config.model, subject.config.learner
    return TrainingLoad(
        dtype_bytes=subject.dtype_bytes,
        zero_stage=learner.zero_stage,
        ranks=learner.ranks,
        tokens=max(learner.micro_batch_tokens, model.max_length),
        length=model.max_length,
        logit_chunk=learner.logit_chunk,
        checkpointing=model.gradient_checkpointing,
        eager_attention=model.attention == "eager",
        reference=subject.config.algorithm.kl_coefficient > 0,
    )


def learner_memory_check(subject: Subject) -> str:
    """Memory of each rank of the learner, by what it is for."""
    shape = subject.architecture
    if shape is None:
        return _UNKNOWN
    parts = learner_memory(shape, training_load(subject))
    need = sum(parts.values())
    found = f"{amount(need)} a rank: " + ", ".join(
        f"{amount(size)} {name}" for name, size in parts.items() if size
    )
    if not subject.here:
        return found
    room, where = _learner_room(subject)
    remedy = (
        "lower learner.micro_batch_tokens or model.max_length, set model.gradient_checkpointing, "
        "or raise learner.zero_stage with more learner.ranks"
    )
    if need > room:
        raise ConfigError(f"a rank of the learner needs {found}; {where} {amount(room)}; {remedy}")
    if need > _TIGHT * room:
        return Note(f"{found}; {where} {amount(room)}, which is tight: {remedy}")
    return f"{found}; {where} {amount(room)}"


def _learner_room(subject: Subject) -> tuple[int, str]:
    """Bytes that one rank may use on this machine, and the words for them."""
    machine, config = subject.machine, subject.config
    if not machine.gpus:
        return machine.host // config.learner.ranks, "its share of this machine is"
    smallest = min(machine.gpus)
    if subject.shares_gpus and config.generator.engine == "vllm":
        taken = config.generator.gpu_memory_utilization
        return int(smallest * (1 - taken)), "beside the engine this GPU has"
    return smallest, "a GPU here has"


def engine_memory(subject: Subject) -> str:
    """Weights and KV cache of an engine: how many samples of full length fit."""
    shape, config = subject.architecture, subject.config
    if config.generator.engine == "simulated":
        return "a simulated engine needs next to nothing"
    if shape is None:
        return _UNKNOWN
    on_cpu = subject.here and not subject.machine.gpus
    parts, length = config.generator.tensor_parallel, config.model.max_length
    weights = engine_weights(shape, subject.dtype_bytes, parts)
    token = kv_token_bytes(shape, subject.dtype_bytes, parts)
    found = f"{amount(weights)} of weights a device, {amount(token * length)} of KV cache " + (
        f"for a sample of {length} tokens"
    )
    if on_cpu:
        cache = int(config.generator.kv_cache_gib * GIB)
        _require_a_sample(cache, token * length, "generator.kv_cache_gib")
        return _samples(subject, found, cache // (token * length))
    if not subject.here:
        return found
    return _on_gpu(subject, shape, found)


def _on_gpu(subject: Subject, shape: Architecture, found: str) -> str:
    generator = subject.config.generator
    parts, length = generator.tensor_parallel, subject.config.model.max_length
    weights = engine_weights(shape, subject.dtype_bytes, parts)
    sample = kv_token_bytes(shape, subject.dtype_bytes, parts) * length
    share = int(min(subject.machine.gpus) * generator.gpu_memory_utilization)
    cache = share - weights - ENGINE_RESERVE
    _require_a_sample(cache, sample, "generator.gpu_memory_utilization")
    return _samples(subject, found, cache // sample)


def _require_a_sample(cache: int, sample: int, key: str) -> None:
    if cache < sample:
        raise ConfigError(
            f"{key} leaves {amount(max(0, cache))} for the KV cache, and one sample of "
            f"model.max_length takes {amount(sample)}: the engine would not start; raise it, lower "
            "model.max_length, or raise generator.tensor_parallel"
        )


def _samples(subject: Subject, found: str, full: int) -> str:
    places = subject.config.generator.max_samples
    text = f"{found}; {full} such samples fit at a time"
    if full < places:
        return Note(
            f"{text}, and generator.max_samples = {places}: when most are long, some wait and are "
            "computed again"
        )
    return text


def devices(subject: Subject) -> str:
    """Who shares a GPU on this machine, and whether weights can be sent there."""
    config, gpus = subject.config, subject.machine.gpus
    found = f"ranks and engines want {subject.devices}"
    if not subject.here:
        return found
    if not gpus:
        return f"{found}; no GPU here, all run on the CPU"
    found = f"{found}, GPUs here: {len(gpus)}"
    if subject.alone and config.learner.ranks > len(gpus):
        raise ConfigError(
            f"learner.ranks = {config.learner.ranks} is above the number of GPUs, {len(gpus)}: "
            "lower it, or start the learner with torchrun on several machines and set redis.url"
        )
    if subject.shares_gpus:
        if config.publish.backend != "gloo":
            raise ConfigError(
                f"publish.backend = {config.publish.backend}: {found}; NCCL refuses two ranks on "
                "one GPU; set publish.backend = gloo"
            )
        return f"{found}; shared, weights go over gloo through host memory"
    return found


def amount(size: int) -> str:
    """Bytes as GiB with one decimal, small ones as MiB or KiB."""
    if size >= 0.1 * GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
