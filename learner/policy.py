"""The policy: a causal language model that returns log-probs and entropy of response tokens.

Logits over the vocabulary exist for `chunk` response positions at a time, in the forward and in
the backward pass; nothing of the size (tokens × vocabulary) is ever kept. The head is applied as
a linear function of its weight inside this module's forward: under ZeRO-3 the weight is then an
external parameter of this module, gathered once, so that ranks with different numbers of chunks
stay in step. A call of the head module per chunk deadlocks or crashes there.

Dimensions: B rows, T positions, N response tokens, C of them in a chunk, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ConfigError

# Models that change the logits after the head; ignoring it would train another distribution.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Policy(nn.Module):
    """Wraps a Hugging Face causal language model; parameters are named `model.<its name>`.

    Raises:
        ConfigError: the model transforms its logits in a way that is not supported.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name in _LOGIT_TRANSFORMS:
            if getattr(model.config, name, None) not in (None, 1, 1.0):
                raise ConfigError(
                    f"model.path: {type(model).__name__} uses {name}, which the learner does not "
                    "apply; choose another model"
                )
        self.model = model

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor | None,
        index_N: Tensor,
        labels_N: Tensor,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of `labels_N` and the entropy, each (N,) in fp32, at the given temperature.

        The first four arguments are a `Rows`. There is never an attention mask: padding is on the
        right, where causal attention does not look, and packed sequences are told apart by
        positions that start again, which takes a forward pass without a cache.
        """
        output = self.model.base_model(
            input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False
        )
        hidden_ND = output.last_hidden_state.flatten(0, 1).index_select(0, index_N)
        head = self.model.get_output_embeddings()
        return chunked_logprobs(
            hidden_ND, head.weight, getattr(head, "bias", None), labels_N, temperature, chunk
        )


def chunked_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    labels_N: Tensor,
    temperature: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of softmax((hidden · weightᵀ + bias) / temperature), fp32, (N,)."""
    result: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(
        hidden_ND, weight_VD, bias_V, labels_N, 1.0 / temperature, chunk
    )
    return result


class _ChunkedLogprobs(torch.autograd.Function):
    """With z = logits / temperature, p = softmax(z), ℓ = log p of the label and H the entropy:

    ∂ℓ/∂z_j = [j = label] − p_j and ∂H/∂z_j = −p_j (log p_j + H). Logits are computed again for
    each chunk of the backward pass from the hidden states and the log-sum-exp that were kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        scale: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_ND.shape[0]
        logprob_N = hidden_ND.new_empty(count, dtype=torch.float32)
        entropy_N, lse_N = torch.empty_like(logprob_N), torch.empty_like(logprob_N)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            z_CV = _scaled_logits(hidden_ND[part], weight_VD, bias_V, scale)
            lse_C = torch.logsumexp(z_CV, dim=-1)
            logp_CV = z_CV.sub_(lse_C.unsqueeze(1))
            logprob_N[part] = logp_CV.gather(1, labels_N[part].unsqueeze(1)).squeeze(1)
            entropy_N[part] = -torch.linalg.vecdot(logp_CV.exp(), logp_CV)
            lse_N[part] = lse_C
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N, lse_N, entropy_N)
        ctx.scale, ctx.chunk = scale, chunk
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprob_N, grad_entropy_N = grads
        hidden_ND, weight_VD, bias_V, labels_N, lse_N, entropy_N = ctx.saved_tensors
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        # Many chunks are summed: in bf16 the later ones would be rounded away.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for start in range(0, hidden_ND.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            z_CV = _scaled_logits(hidden_ND[part], weight_VD, bias_V, ctx.scale)
            logp_CV = z_CV.sub_(lse_N[part].unsqueeze(1))
            grad_z_CV = logp_CV.exp()
            if grad_entropy_N is not None:
                slope_CV = logp_CV.add_(entropy_N[part].unsqueeze(1))
                factor_CV = slope_CV.mul_(grad_entropy_N[part].unsqueeze(1))
            if grad_logprob_N is not None:
                given_C1 = grad_logprob_N[part].unsqueeze(1)
                factor_CV = given_C1 if grad_entropy_N is None else factor_CV.add_(given_C1)
            grad_z_CV.mul_(factor_CV).neg_()
            if grad_logprob_N is not None:
                grad_z_CV.scatter_add_(1, labels_N[part].unsqueeze(1), given_C1)
            grad_logits_CV = grad_z_CV.mul_(ctx.scale).to(weight_VD.dtype)
            grad_hidden_ND[part] = grad_logits_CV @ weight_VD
            grad_weight_VD += grad_logits_CV.T @ hidden_ND[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(0, dtype=torch.float32)
        grad_weight = grad_weight_VD.to(weight_VD.dtype)
        grad_bias = None if grad_bias_V is None else grad_bias_V.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, grad_bias, None, None, None


def _scaled_logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, scale: float
) -> Tensor:
    """A fresh fp32 tensor: softmax sums over a vocabulary lose too much in bf16."""
    return F.linear(hidden_CD, weight_VD, bias_V).float().mul_(scale)
