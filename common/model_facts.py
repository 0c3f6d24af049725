"""What a model's config.json says of its size, without loading the model.

Dimensions of an architecture: D hidden, I of the feed-forward layer, L layers, H query heads and
K key-value heads of d each, V rows of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError

# Rotary scalings that leave max_position_embeddings at the scaled length, as vLLM 0.32 and
# transformers read them; the others multiply it by their factor.
_ALREADY_SCALED = ("default", "yarn", "llama3", "longrope", "su")


@dataclass(frozen=True)
class Architecture:
    """Shapes of a dense decoder with rotary positions, RMS norms and a gated feed-forward layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Number of parameters; tied embeddings count once."""
        projected = self.query_width + 2 * self.kv_width
        attention = self.hidden * (projected + self.query_width)
        attention += projected * self.qkv_bias + self.hidden * self.output_bias
        mlp = 3 * self.hidden * self.intermediate
        mlp += (2 * self.intermediate + self.hidden) * self.mlp_bias
        norms = 2 * self.hidden + 2 * self.head_dim * self.head_norms
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + mlp + norms) + self.hidden


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is loaded; None is what its config.json does not say.

    `source` names where the facts are from; `here` tells whether the folder is on this machine.
    """

    source: str
    here: bool
    kind: str
    positions: int | None
    architecture: Architecture | None

    @classmethod
    def read(cls, tree: Mapping[str, Any], source: str, here: bool) -> ModelFacts:
        """From the keys of a config.json; kinds of model that are not known have no architecture.

        Raises:
            ConfigError: a key that a known kind needs is missing or no number.
        """
        kind = str(tree.get("model_type", "unknown"))
        try:
            architecture = _architecture(kind, tree)
            positions = _positions(tree)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{source}: {error} is missing or no number; mend the config.json of model.path"
            ) from None
        return cls(source, here, kind, positions, architecture)


def _positions(tree: Mapping[str, Any]) -> int | None:
    """Longest sequence that the positions were made for, rotary scaling included."""
    longest = tree.get("max_position_embeddings")
    if longest is None:
        return None
    scaling = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    factor = 1.0 if rope in _ALREADY_SCALED else float(scaling.get("factor") or 1.0)
    return int(int(longest) * factor)


def _architecture(kind: str, tree: Mapping[str, Any]) -> Architecture | None:
    attention_bias = bool(tree.get("attention_bias", False))
    # (bias of q, k and v; bias of the output projection; norms of each head)
    habits = {
        "llama": (attention_bias, attention_bias, False),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (attention_bias, attention_bias, True),
    }
    if kind not in habits:
        return None
    qkv_bias, output_bias, head_norms = habits[kind]
    hidden, heads = int(tree["hidden_size"]), int(tree["num_attention_heads"])
    return Architecture(
        hidden=hidden,
        intermediate=int(tree["intermediate_size"]),
        layers=int(tree["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(tree.get("num_key_value_heads") or heads),
        head_dim=int(tree.get("head_dim") or hidden // heads),
        vocabulary=int(tree["vocab_size"]),
        tied=bool(tree.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=kind == "llama" and bool(tree.get("mlp_bias", False)),
        head_norms=head_norms,
    )


_QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768}
_PUBLIC: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN
    | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    | {"num_attention_heads": 14, "num_key_value_heads": 2}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    | {"num_attention_heads": 12, "num_key_value_heads": 2}
    | {"vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-Math-7B": _QWEN
    | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    | {"num_attention_heads": 28, "num_key_value_heads": 4}
    | {"vocab_size": 152064, "max_position_embeddings": 4096},
    "Qwen/Qwen2.5-32B": _QWEN
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
    | {"num_attention_heads": 40, "num_key_value_heads": 8}
    | {"vocab_size": 152064, "max_position_embeddings": 131072},
}
"""Keys of the config.json at https://huggingface.co/NAME of the models that shipped recipes name,
so that these recipes can be checked before the weights are fetched."""


def public_name(path: Path) -> str | None:
    """The Hugging Face name of a known model whose folder has its name."""
    return next((name for name in _PUBLIC if name.rpartition("/")[2] == path.name), None)


def model_facts(path: Path) -> ModelFacts | None:
    """Facts of the model in a folder, or of the public model that the folder is named after.

    None if the folder is not here and its name is not known.

    Raises:
        ConfigError: its config.json cannot be read.
    """
    file = path / "config.json"
    if file.exists():
        try:
            tree = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; fetch the model again") from None
        if not isinstance(tree, dict):
            raise ConfigError(f"{file} is no JSON object; fetch the model again")
        return ModelFacts.read(tree, str(file), here=True)
    name = public_name(path)
    return ModelFacts.read(_PUBLIC[name], name, here=False) if name else None
