"""What the tests of a real engine share: a tiny model, the learner's side of a round, a reference
in transformers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common import transport
from common.buckets import plan_buckets
from common.errors import RoundError
from common.messages import Prompt, Sample, Version
from generator.engine import Engine, GenerationError

HOST = "127.0.0.1"
VOCABULARY = 512
CONTEXT = 512
BUCKET_BYTES = 60_000
TIMEOUT_S = 4.0
TOLERANCE = 1e-4


def make_model(seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            initializer_range=0.2,  # far from uniform, so that wrong weights are seen
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            dtype="float32",
        )
    ).eval()


def write_model(folder: Path) -> None:
    """The model of seed 0 and a tokenizer of whole words."""
    make_model(0).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def make_tree(model_dir: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model_dir), "dtype": "float32", "max_length": CONTEXT},
        "data": {"train": ["unused.jsonl"]},
        "sampling": {"max_tokens": 400},
        "generator": {"kv_cache_gib": 0.25, "max_samples": 32, "enforce_eager": True},
    }


@dataclass
class Learner:
    """Rank 0 of the rounds, and the weights that the engine ought to have."""

    store: Any = field(default_factory=lambda: transport.serve_store(HOST))
    model: Qwen2ForCausalLM = field(default_factory=lambda: make_model(0))
    number: int = 0
    rounds: int = 0
    seconds: float = 0.0
    """How long the engine took over the last round."""

    async def publish(
        self,
        engine: Engine,
        model: Qwen2ForCausalLM,
        tensors: dict[str, torch.Tensor] | None = None,
        send: Callable[[transport.WeightGroup, list[torch.Tensor]], Any] | None = None,
        absent: bool = False,
    ) -> None:
        """One round from pause to update, without the resume; raises what the engine raises."""
        self.rounds += 1
        self.number += 1
        tensors = dict(model.named_parameters()) if tensors is None else tensors
        prefix = f"round-{self.rounds}"
        sender = threading.Thread(
            target=self._send, args=(prefix, list(tensors.values()), send or send_all), daemon=True
        )
        await engine.pause()
        if not absent:
            sender.start()
        started = time.monotonic()
        try:
            await engine.update(
                {
                    "host": HOST,
                    "port": self.store.port,
                    "prefix": prefix,
                    "rank_offset": 1,
                    "world": 2,
                    "backend": "gloo",
                    "timeout_s": TIMEOUT_S,
                },
                {
                    "manifest": [[name, list(t.shape)] for name, t in tensors.items()],
                    "dtype": "float32",
                    "bucket_bytes": BUCKET_BYTES,
                    "version": f"1.{self.number}",
                },
                Version(1, self.number),
            )
            self.model = model
        finally:
            self.seconds = time.monotonic() - started
            if not absent:
                await asyncio.to_thread(sender.join)

    def _send(self, prefix: str, tensors: list[torch.Tensor], send: Any) -> None:
        group = transport.WeightGroup.form("gloo", self.store, prefix, 0, 2, TIMEOUT_S, HOST)
        try:
            send(group, pack(tensors))
        except RoundError:
            pass  # the receiver's side is what the tests look at
        finally:
            group.close()


def pack(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [t.numel() * t.element_size() for t in tensors]
    return [
        torch.cat([tensors[i].detach().reshape(-1) for i in bucket])
        for bucket in plan_buckets(sizes, BUCKET_BYTES)
    ]


def send_all(group: transport.WeightGroup, buckets: list[torch.Tensor]) -> None:
    transport.send_buckets(group, buckets, lambda: True)


def make_prompt(seed: int, max_tokens: int = 40, temperature: float = 0.7) -> Prompt:
    token_ids = np.random.default_rng(seed).integers(2, VOCABULARY, 12).astype(np.int32)
    return Prompt(
        group=str(seed),
        ordinal=seed,
        attempt=1,
        evaluation=False,
        row=0,
        samples=4,
        least=Version(1, 0),
        token_ids=token_ids,
        seed=seed,
        temperature=temperature,
        top_p=1.0,
        max_tokens=max_tokens,
        gold="",
        checker="math",
        boxed=True,
        text="",
    )


@torch.no_grad()
def reference(
    model: Qwen2ForCausalLM, token_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of token_ids[1:] in transformers."""
    ids = torch.tensor(token_ids, dtype=torch.long)
    logits = model(ids[None]).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[1:, None])
    return chosen[:, 0].numpy()


def gap(model: Qwen2ForCausalLM, prompt: Prompt, sample: Sample, end: int | None = None) -> float:
    """Largest difference to transformers over the tokens [0, end) of a sample."""
    token_ids = np.concatenate([prompt.token_ids, sample.token_ids])
    expected = reference(model, token_ids, prompt.temperature)[len(prompt.token_ids) - 1 :]
    return float(np.abs(sample.logprobs - expected)[:end].max())


async def samples_of(engine: Engine, prompt: Prompt, count: int = 4) -> list[Sample]:
    salt = str(engine.version)
    return await asyncio.gather(*(engine.generate(prompt, i, salt) for i in range(count)))


async def assert_serves(engine: Engine, learner: Learner) -> None:
    """The engine samples from exactly the learner's weights and says so."""
    prompt = make_prompt(learner.rounds)
    for sample in await samples_of(engine, prompt):
        assert gap(learner.model, prompt, sample) < TOLERANCE
        assert [span[:2] for span in sample.spans] == [engine.version]
    probe = await engine.probe(prompt.token_ids)
    assert np.abs(probe - reference(learner.model, prompt.token_ids)).max() < TOLERANCE


async def heal(engine: Engine, learner: Learner) -> None:
    """After a failure nothing is generated; a full round makes the engine whole."""
    assert not engine.whole
    with pytest.raises(RoundError, match="half-updated"):
        await engine.resume()
    with pytest.raises(GenerationError, match="half-updated"):
        await engine.generate(make_prompt(1), 0, "salt")
    await learner.publish(engine, make_model(100 + learner.rounds))
    await engine.resume()
    await assert_serves(engine, learner)
