"""Chunked log-probs and entropy, against whole logits; ZeRO-3 is tested with the engine."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from common.errors import ConfigError
from learner.policy import Policy, chunked_logprobs
from learner.rows import Layout, lay_out

N, D, V = 11, 8, 23
TEMPERATURE = 0.7


def inputs(bias: bool) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).requires_grad_()
    weight = torch.randn(V, D, generator=generator).requires_grad_()
    offset = torch.randn(V, generator=generator).requires_grad_() if bias else None
    return hidden, weight, offset, torch.randint(V, (N,), generator=generator)


def whole(hidden: Any, weight: Any, bias: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias).float() / TEMPERATURE
    logp = logits.log_softmax(-1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, N, 100])
def test_chunks_give_the_log_probs_entropy_and_gradients_of_whole_logits(
    chunk: int, bias: bool
) -> None:
    mine, plain = inputs(bias), inputs(bias)
    factor_N = torch.linspace(-1, 2, N)
    found = chunked_logprobs(*mine, TEMPERATURE, chunk)
    wanted = whole(*plain)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    for logprob, entropy in (found, wanted):
        (logprob * factor_N).sum().add((entropy * factor_N.flip(0)).sum()).backward()
    for left, right in zip(mine[:3], plain[:3], strict=True):
        if left is not None:
            torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_its_own_gradient(output: int) -> None:
    mine, plain = inputs(True), inputs(True)
    chunked_logprobs(*mine, TEMPERATURE, 4)[output].sum().backward()
    whole(*plain)[output].sum().backward()
    for left, right in zip(mine[:3], plain[:3], strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-5)


def test_no_response_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, _, labels = inputs(False)
    logprob, entropy = chunked_logprobs(hidden[:0], weight, None, labels[:0], TEMPERATURE, 4)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.shape == entropy.shape == (0,)
    assert weight.grad.abs().sum() == 0


def test_bf16_sums_over_the_vocabulary_and_over_chunks_in_fp32() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = (torch.randn(256, 16, generator=generator) / 4).bfloat16().requires_grad_()
    weight = torch.randn(4000, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(4000, (256,), generator=generator)
    logprob, _ = chunked_logprobs(hidden, weight, None, labels, 1.0, 1)
    logprob.mean().backward()
    assert logprob.dtype == torch.float32
    exact_hidden, exact_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    logits = torch.nn.functional.linear(exact_hidden, exact_weight)
    exact = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    exact.mean().backward()
    assert (logprob - exact).abs().max() < 0.02  # rounding of the logits themselves to bf16
    error = (weight.grad.float() - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert error < 0.005


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_one_chunk_of_logits_in_either_pass() -> None:
    hidden = torch.randn(400, 4).requires_grad_()
    weight = torch.randn(500, 4).requires_grad_()
    labels = torch.randint(500, (400,))
    with Largest() as largest:
        logprob, entropy = chunked_logprobs(hidden, weight, None, labels, 1.0, 10)
        (logprob.sum() + entropy.sum()).backward()
    assert largest.elements == 10 * 500


def tiny(tied: bool, kind: str = "qwen2") -> Any:
    torch.manual_seed(0)
    settings, build = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    config = settings(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    return build(config)


PAIRS = [
    (np.arange(a, dtype=np.int32), np.arange(20, 20 + b, dtype=np.int32))
    for a, b in ((3, 9), (6, 1), (1, 4), (2, 2))
]


def alone(model: Any) -> torch.Tensor:
    """Log-probs of the responses of `PAIRS`, one sequence at a time."""
    parts = []
    for prompt, response in PAIRS:
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        parts.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_rows_of_either_layout_give_what_each_sequence_gives_alone(
    kind: str, layout: Layout, attention: str
) -> None:
    model = tiny(tied=False, kind=kind)
    model.set_attn_implementation(attention)
    logprob, _ = Policy(model)(*lay_out(PAIRS, layout), TEMPERATURE, 5)
    torch.testing.assert_close(logprob, alone(model), rtol=1e-5, atol=1e-5)


def test_packed_sequences_would_see_each_other_without_their_positions() -> None:
    model = tiny(tied=True)
    rows = lay_out(PAIRS, "packed")._replace(position_ids_BT=None)
    logprob, _ = Policy(model)(*rows, TEMPERATURE, 5)
    assert (logprob - alone(model)).abs().max() > 0.01


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_all_parameters_are_those_of_whole_logits(tied: bool) -> None:
    mine, plain = tiny(tied), tiny(tied)
    prompt, response = np.arange(3, dtype=np.int32), np.arange(10, 17, dtype=np.int32)
    Policy(mine)(*lay_out([(prompt, response)]), TEMPERATURE, 2)[0].sum().backward()
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    logits = plain(input_ids=ids[None]).logits[0, 2:-1] / TEMPERATURE
    logits.log_softmax(-1).gather(1, ids[3:, None]).sum().backward()
    for (name, left), right in zip(mine.named_parameters(), plain.parameters(), strict=True):
        assert (left.grad - right.grad).norm() <= 1e-5 * right.grad.norm() + 1e-6, name


def test_a_model_that_transforms_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=20,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        Policy(Gemma2ForCausalLM(config))
