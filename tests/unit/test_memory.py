"""Sizes from shapes alone: against hand-made sums, public counts and what torch really keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from common.errors import ConfigError
from common.memory import (
    TrainingLoad,
    engine_weights,
    kv_token_bytes,
    layer_bytes,
    learner_memory,
)
from common.model_facts import Architecture, ModelFacts, model_facts, public_name

SMALL = Architecture(
    hidden=8, intermediate=16, layers=2, heads=2, kv_heads=1, head_dim=4, vocabulary=10, tied=True
)
# Embedding 10 * 8 = 80; a layer: q and o 2 * 8 * 8, k and v 2 * 8 * 4, feed-forward 3 * 8 * 16,
# norms 2 * 8, so 592; two of them and the last norm of 8.
SMALL_PARAMETERS = 80 + 2 * 592 + 8

LOAD = TrainingLoad(
    dtype_bytes=2, zero_stage=1, ranks=4, tokens=100, length=50, logit_chunk=30, checkpointing=False
)

TINY: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip


def load(**changes: Any) -> TrainingLoad:
    return dataclasses.replace(LOAD, **changes)


# --- counts -------------------------------------------------------------------------------------


def test_parameters_of_a_small_shape_are_those_counted_by_hand() -> None:
    assert SMALL.parameters == SMALL_PARAMETERS == 1272
    assert dataclasses.replace(SMALL, tied=False).parameters == 1272 + 80


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama", "head_dim": 16, "tie_word_embeddings": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "tie_word_embeddings": True},
        {"model_type": "qwen3", "head_dim": 16},
        {"model_type": "mistral", "head_dim": 8},
    ],
)
def test_parameters_from_a_config_json_are_those_of_the_model(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    tree = TINY | keys
    kind = tree["model_type"]
    config = AutoConfig.for_model(kind, **{k: v for k, v in tree.items() if k != "model_type"})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    facts = model_facts(tmp_path)
    assert facts is not None and facts.architecture is not None
    assert facts.here
    assert facts.architecture.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen2.5-Math-7B", 7_615_616_512),
        ("Qwen2.5-32B", 32_763_876_352),
    ],
)
def test_the_known_public_models_have_as_many_parameters_as_published(
    name: str, parameters: int
) -> None:
    facts = model_facts(Path("nowhere") / name)
    assert facts is not None and facts.architecture is not None
    assert facts.architecture.parameters == parameters
    assert not facts.here
    assert public_name(Path(name)) == f"Qwen/{name}"


# --- reading config.json ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "positions"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 128),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 64),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_positions_are_those_that_the_engine_will_derive(
    keys: dict[str, Any], positions: int | None
) -> None:
    facts = ModelFacts.read(TINY | {"model_type": "qwen2"} | keys, "here", here=True)
    assert facts.positions == positions


def test_a_kind_of_model_that_is_not_known_has_positions_and_no_shape() -> None:
    facts = ModelFacts.read(TINY | {"model_type": "mamba"}, "here", here=True)
    assert facts.architecture is None
    assert facts.positions == 64


def test_a_folder_of_no_known_name_that_is_not_here_has_no_facts() -> None:
    assert model_facts(Path("nowhere/at-all")) is None


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "llama", "hidden_size": 8}'])
def test_a_config_json_that_cannot_be_used_is_refused_by_its_path(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_facts(tmp_path)


# --- the learner --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "weights", "gathered", "gradients", "optimizer"),
    [
        # bf16, 4 ranks: 2P; 4P + 2P; 12P / 4
        ({}, 2 * 1272, 0, 6 * 1272, 3 * 1272),
        # 2P; 4P / 4; 12P / 4
        ({"zero_stage": 2}, 2 * 1272, 0, 1272, 3 * 1272),
        # 2P / 4, and all of the small model gathered; 4P / 4; 12P / 4
        ({"zero_stage": 3}, 1272 // 2, 2 * 1272, 1272, 3 * 1272),
        # fp32 on one rank: 4P; 4P; a copy and two moments
        ({"dtype_bytes": 4, "ranks": 1}, 4 * 1272, 0, 4 * 1272, 12 * 1272),
    ],
)
def test_states_of_a_rank_are_those_summed_by_hand(
    changes: dict[str, Any], weights: int, gathered: int, gradients: int, optimizer: int
) -> None:
    parts = learner_memory(SMALL, load(**changes))
    assert parts["weights"] == weights
    assert parts["gathered weights"] == gathered
    assert parts["gradients"] == gradients
    assert parts["optimizer"] == optimizer
    assert parts["start policy"] == 0


def test_a_kl_term_holds_the_start_policy_as_the_weights_are_held() -> None:
    parts = learner_memory(SMALL, load(reference=True, zero_stage=3))
    assert parts["start policy"] == parts["weights"] == 1272 // 2


def test_a_large_model_is_gathered_in_parts() -> None:
    large = dataclasses.replace(SMALL, layers=2_000_000)
    parts = learner_memory(large, load(zero_stage=3))
    assert parts["gathered weights"] == 2 * 10**9 < 2 * large.parameters


def test_activations_and_logits_are_those_summed_by_hand() -> None:
    # A layer in bf16, per token: 2 * (4 * 8 + 2 * 8 + 2 * 4 + 4 * 16) = 240; in fp32
    # 4 * (2 * 8 + 2) = 72 for the norms and 4 * 2 for the heads.
    assert layer_bytes(SMALL, LOAD) == 240 + 72 + 8
    parts = learner_memory(SMALL, LOAD)
    assert parts["activations"] == 2 * 320 * 100
    # 30 positions of 10 logits, twice in fp32 and once in bf16; the gradient of 80 weights.
    assert parts["logits"] == 30 * 10 * (4 + 4 + 2) + 80 * (4 + 2)


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer() -> None:
    parts = learner_memory(SMALL, load(checkpointing=True))
    assert parts["activations"] == 2 * 8 * 2 * 100 + 320 * 100


def kept_by_torch(layers: int, dtype: torch.dtype, attention: str, tokens: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights not counted."""
    model = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=64, intermediate_size=160, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=32,
            max_position_embeddings=tokens, attn_implementation=attention,
        )
    ).to(dtype)  # fmt: skip
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layer_keeps_what_torch_keeps_of_it(dtype: torch.dtype, attention: str) -> None:
    tokens = 96
    shape = Architecture(
        hidden=64, intermediate=160, layers=1, heads=4, kv_heads=2, head_dim=16, vocabulary=32,
        tied=False,
    )  # fmt: skip
    one, two = (kept_by_torch(layers, dtype, attention, tokens) for layers in (1, 2))
    formula = layer_bytes(
        shape,
        load(dtype_bytes=dtype.itemsize, length=tokens, eager_attention=attention == "eager"),
    )
    assert formula * tokens == pytest.approx(two - one, rel=0.03)


loads = st.builds(
    TrainingLoad,
    dtype_bytes=st.sampled_from([2, 4]),
    zero_stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 64),
    tokens=st.integers(1, 4096),
    length=st.integers(1, 4096),
    logit_chunk=st.integers(1, 1024),
    checkpointing=st.booleans(),
    eager_attention=st.booleans(),
    reference=st.booleans(),
)


@given(loads)
def test_more_ranks_and_checkpointing_never_need_more(given_load: TrainingLoad) -> None:
    need = sum(learner_memory(SMALL, given_load).values())
    more = dataclasses.replace(given_load, ranks=given_load.ranks * 2)
    assert sum(learner_memory(SMALL, more).values()) <= need
    once = dataclasses.replace(given_load, checkpointing=True)
    every = dataclasses.replace(given_load, checkpointing=False)
    # one layer more than all of them, at the least
    single = layer_bytes(SMALL, given_load) * given_load.tokens
    kept = learner_memory(SMALL, once)["activations"]
    assert kept <= learner_memory(SMALL, every)["activations"] + single


# --- the engine ---------------------------------------------------------------------------------


def test_weights_and_cache_of_an_engine_are_those_summed_by_hand() -> None:
    facts = model_facts(Path("Qwen2.5-32B"))
    assert facts is not None and facts.architecture is not None
    # two (K and V) x 64 layers x 8 heads of 128, in bf16: 256 KiB a token, a quarter on each of 4
    assert kv_token_bytes(facts.architecture, 2, 1) == 256 * 1024
    assert kv_token_bytes(facts.architecture, 2, 4) == 64 * 1024
    assert engine_weights(facts.architecture, 2, 4) == 32_763_876_352 // 2


def test_with_more_devices_than_heads_each_holds_one() -> None:
    assert kv_token_bytes(SMALL, 2, 2) == kv_token_bytes(SMALL, 2, 1)
