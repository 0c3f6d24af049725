"""Which tokens end a response, and which one the chat template ends a turn with.

The files of a model may disagree: base models of Qwen name `<|endoftext|>` in one and `<|im_end|>`
in another (QwenLM/Qwen3 #927), and a policy that ends its turn with a token which is none of the
engine's runs on until the cap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import ConfigError

_CONTENT = "What the assistant has to say"


def stop_token_ids(model_dir: Path, tokenizer: Any, more: Iterable[str] = ()) -> list[int]:
    """Every token that ends a response: of the tokenizer, of the generation config, and `more`.

    Raises:
        ConfigError: there is none, so that no response would ever end, or one of `more` is no
            token of this tokenizer.
    """
    stops = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    path = model_dir / "generation_config.json"
    if path.exists():
        listed = json.loads(path.read_text()).get("eos_token_id")
        stops.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for text in more:
        if text not in vocabulary:
            raise ConfigError(
                f"sampling.stop_tokens: {text!r} is no token of the tokenizer in {model_dir}; "
                "write it as the vocabulary has it, or leave it out"
            )
        stops.add(vocabulary[text])
    if not stops:
        raise ConfigError(
            f"{model_dir} names no end-of-sequence token, so that no response would ever end; "
            "set sampling.stop_tokens, or eos_token_id in its generation_config.json"
        )
    return sorted(stops)


def end_of_turn(tokenizer: Any) -> str | None:
    """The special token that the chat template puts behind what the assistant said, if any."""
    turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _CONTENT}]
    text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    rest = text.rpartition(_CONTENT)[2]
    found = [token for token in special_tokens(tokenizer) if token in rest]
    return min(found, key=lambda token: (rest.find(token), -len(token)), default=None)


def special_tokens(tokenizer: Any) -> set[str]:
    """Texts that the tokenizer takes as one token wherever they stand."""
    return {*tokenizer.added_tokens_encoder, *tokenizer.all_special_tokens}
