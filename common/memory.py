"""Estimates of memory, in bytes, from shapes alone.

Learner: T tokens of the largest micro-batch on a rank, N ranks, P parameters. Shapes are those of
`common.model_facts.Architecture`: D, I, L, H, V, and Q and K for the widths of queries and keys.
What the sums leave out (the context of CUDA, fragmentation, the working set of one kernel) is a
few GiB, or about a tenth.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.model_facts import Architecture

GIB = 2**30
_FP32 = 4
_LIVE_PARAMETERS = 10**9
"""Parameters that ZeRO-3 keeps gathered at one time: DeepSpeed's stage3_max_live_parameters."""
ENGINE_RESERVE = 3 * GIB
"""What an engine on a GPU needs besides weights and KV cache, per device: the context of CUDA,
captured graphs, the activations of one step. A round figure, not a formula."""


@dataclass(frozen=True)
class TrainingLoad:
    """What a rank of the learner does, as far as its memory depends on it."""

    dtype_bytes: int
    zero_stage: int
    ranks: int
    tokens: int
    """Padded tokens of the largest micro-batch, T."""
    length: int
    """Tokens of the longest sequence."""
    logit_chunk: int
    checkpointing: bool
    eager_attention: bool = False
    reference: bool = False
    """The start policy is held too, for a KL term."""


def learner_memory(model: Architecture, load: TrainingLoad) -> dict[str, int]:
    """Bytes of one rank by what they are for.

    States as DeepSpeed 0.19 keeps them with gradients summed in fp32 and torch's AdamW (see
    `learner.runtime.deepspeed_settings`; ZeRO: arXiv 1910.02054): weights 2P or 4P; gradients 4P,
    at stage 1 whole and beside those of the backward pass in bf16; an fp32 copy of the weights
    and two moments, 12P. Stage 1 divides the last by N, stage 2 the gradients too, stage 3 all.
    """
    parameters, ranks = model.parameters, load.ranks
    whole_weights = parameters * load.dtype_bytes
    gathered = 0
    if load.zero_stage == 3:
        gathered = min(parameters, _LIVE_PARAMETERS) * load.dtype_bytes
    gradients = parameters * _FP32
    if load.zero_stage == 1:
        gradients += parameters * _beside_fp32(load.dtype_bytes)
    else:
        gradients = _share(gradients, ranks)
    weights = _share(whole_weights, ranks) if load.zero_stage == 3 else whole_weights
    return {
        "weights": weights,
        "start policy": weights if load.reference else 0,
        "gathered weights": gathered,
        "gradients": gradients,
        "optimizer": _share(3 * _FP32 * parameters, ranks),
        "activations": _activations(model, load),
        "logits": _logits(model, load),
    }


def _activations(model: Architecture, load: TrainingLoad) -> int:
    """What the backward pass needs of all layers, or of one and the inputs of all others."""
    layer = layer_bytes(model, load) * load.tokens
    if not load.checkpointing:
        return model.layers * layer
    return model.layers * model.hidden * load.dtype_bytes * load.tokens + layer


def layer_bytes(model: Architecture, load: TrainingLoad) -> int:
    """Bytes that one layer keeps for its backward pass, per token.

    In the model's dtype: two norms and the inputs of the projections (4D), queries and the result
    of attention (2Q), keys and values (2K), four products of the feed-forward layer (4I). In fp32:
    the inputs of two norms and their scales, and a sum of exponentials for each head. Eager
    attention keeps the scores of all pairs in fp32 instead, a copy of them in bf16, and the keys
    and values repeated for each query head.
    """
    width = load.dtype_bytes
    products = 4 * model.hidden + 2 * model.query_width + 2 * model.kv_width
    kept = width * (products + 4 * model.intermediate) + _FP32 * (2 * model.hidden + 2)
    if load.eager_attention:
        scores = model.heads * load.length * (_FP32 + _beside_fp32(width))
        return kept + scores + 2 * width * (model.query_width - model.kv_width)
    return kept + _FP32 * model.heads


def _logits(model: Architecture, load: TrainingLoad) -> int:
    """Logits of one chunk in the backward pass, and the head's gradient (`learner.policy`)."""
    chunk = load.logit_chunk * model.vocabulary * (2 * _FP32 + load.dtype_bytes)
    return chunk + model.vocabulary * model.hidden * (_FP32 + load.dtype_bytes)


def engine_weights(model: Architecture, dtype_bytes: int, tensor_parallel: int) -> int:
    """Bytes of the weights on each device of an engine."""
    return _share(model.parameters * dtype_bytes, tensor_parallel)


def kv_token_bytes(model: Architecture, dtype_bytes: int, tensor_parallel: int) -> int:
    """Bytes of KV cache of one token on each device of an engine.

    With more devices than key-value heads a head is held by several.
    """
    heads = _share(model.kv_heads, tensor_parallel)
    return 2 * model.layers * heads * model.head_dim * dtype_bytes


def _beside_fp32(dtype_bytes: int) -> int:
    """Bytes of a copy in the model's dtype; none where that is fp32 itself."""
    return dtype_bytes if dtype_bytes < _FP32 else 0


def _share(total: int, parts: int) -> int:
    return -(-total // parts)
