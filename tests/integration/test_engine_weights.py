"""A real vLLM engine takes weights from this process, which plays the learner's rank 0."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from common import transport
from common.buckets import plan_buckets
from common.config import Config, parse_config
from common.errors import RoundError
from common.messages import Prompt, Sample, Version
from generator.engine import Engine, GenerationError

pytestmark = pytest.mark.slow
in_module_loop = pytest.mark.asyncio(loop_scope="module")

HOST = "127.0.0.1"
VOCABULARY = 512
CONTEXT = 512
BUCKET_BYTES = 60_000
TIMEOUT_S = 4.0
TOLERANCE = 1e-4

OWNER = """
import asyncio, sys
from pathlib import Path
from common.config import load_config
from generator.engine import Engine

async def main() -> None:
    engine = await Engine.start(load_config(Path(sys.argv[1])), Path(sys.argv[2]))
    print("started", flush=True)
    await asyncio.sleep(600)
    await engine.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


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


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model(0).save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder


def make_tree(model_dir: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model_dir), "dtype": "float32", "max_length": CONTEXT},
        "data": {"train": ["unused.jsonl"]},
        "sampling": {"max_tokens": 400},
        "generator": {"kv_cache_gib": 0.25, "max_samples": 32, "enforce_eager": True},
    }


@pytest.fixture(scope="module")
def config(model_dir: Path) -> Config:
    return parse_config(make_tree(model_dir), "test")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: Config, model_dir: Path) -> AsyncIterator[Engine]:
    running = await Engine.start(config, model_dir, Version(1, 0), "g0")
    yield running
    await running.close()


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


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    yield Learner()


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


def test_killing_the_owner_ends_the_engine_processes(
    config: Config, model_dir: Path, tmp_path: Path
) -> None:
    from common.config import dump_toml

    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_toml(config))
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(recipe), str(model_dir)], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline().strip() == b"started"
    children = psutil.Process(owner.pid).children(recursive=True)
    engines = [p for p in children if "EngineCore" in " ".join(p.cmdline())]
    assert engines
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(engines, timeout=2.0)
    assert not alive


@in_module_loop
async def test_log_probs_of_samples_equal_those_of_transformers(
    engine: Engine, learner: Learner
) -> None:
    await assert_serves(engine, learner)


@in_module_loop
async def test_a_sample_depends_on_its_seed_and_index_alone(engine: Engine) -> None:
    first = await samples_of(engine, make_prompt(7, temperature=1.0))
    again = await samples_of(engine, make_prompt(7, temperature=1.0))
    assert [s.token_ids.tolist() for s in first] == [s.token_ids.tolist() for s in again]
    assert len({tuple(s.token_ids) for s in first}) == len(first)


@in_module_loop
async def test_a_stopped_sample_ends_with_the_stop_token_and_its_text_does_not(
    engine: Engine,
) -> None:
    found = set()
    for seed in range(40):
        for sample in await samples_of(engine, make_prompt(seed, 60, temperature=2.0), 16):
            found.add(sample.finish_reason)
            ended = sample.token_ids[-1] == 1
            assert ended == (sample.finish_reason == "stop")
            assert ended or len(sample.token_ids) == 60
            special = int(np.isin(sample.token_ids, [0, 1]).sum())
            assert sample.text.count("t") == len(sample.token_ids) - special
        if len(found) == 2:
            return
    pytest.fail(f"only samples that finished by {found}")


@in_module_loop
async def test_after_a_round_samples_and_probe_are_those_of_the_new_weights(
    engine: Engine, learner: Learner
) -> None:
    await learner.publish(engine, make_model(1))
    await engine.resume()
    assert engine.version == Version(1, learner.number)
    await assert_serves(engine, learner)


@in_module_loop
async def test_a_round_under_running_samples_gives_spans_of_two_versions(
    engine: Engine, learner: Learner
) -> None:
    old, before = learner.model, engine.version
    prompt = make_prompt(3, max_tokens=400)
    counts: list[int] = []
    tasks = [
        asyncio.create_task(engine.generate(prompt, i, str(before), counts.append))
        for i in range(16)
    ]
    while not counts:
        await asyncio.sleep(0.05)
    await learner.publish(engine, make_model(2))
    await engine.resume()
    mixed = 0
    for sample in await asyncio.gather(*tasks):
        assert sample.spans[0].start == 0
        assert sample.spans[-1].end == len(sample.token_ids)
        assert [span[:2] for span in sample.spans] in ([before], [before, engine.version])
        assert gap(old, prompt, sample, sample.spans[0].end) < TOLERANCE
        mixed += len(sample.spans) == 2
    assert mixed
    await assert_serves(engine, learner)


@in_module_loop
async def test_a_manifest_that_lacks_tensors_is_refused_by_name(
    engine: Engine, learner: Learner
) -> None:
    model = make_model(4)
    tensors = dict(list(model.named_parameters())[:-1])
    with pytest.raises(RoundError, match=r"lacks model\.norm\.weight; nothing was loaded"):
        await learner.publish(engine, model, tensors)
    await heal(engine, learner)


@in_module_loop
async def test_a_manifest_with_an_unknown_tensor_is_refused_by_name(
    engine: Engine, learner: Learner
) -> None:
    model = make_model(4)
    tensors = dict(model.named_parameters()) | {"model.extra": torch.zeros(3)}
    with pytest.raises(RoundError, match=r"unknown model\.extra"):
        await learner.publish(engine, model, tensors)
    await heal(engine, learner)


@in_module_loop
async def test_a_damaged_bucket_is_refused_and_a_full_round_heals(
    engine: Engine, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(group: transport.WeightGroup, buckets: list[torch.Tensor]) -> None:
        assert len(buckets) > 3
        marks = iter([0, 0, 1])
        true_digest = transport.digest
        with monkeypatch.context() as patch:
            patch.setattr(transport, "digest", lambda flat: true_digest(flat) + next(marks, 0))
            send_all(group, buckets)

    with pytest.raises(RoundError, match="bucket 2 .* damaged"):
        await learner.publish(engine, make_model(5), send=send)
    await heal(engine, learner)


@in_module_loop
@pytest.mark.parametrize("silent_s", [0.0, 2 * TIMEOUT_S], ids=["gone", "silent"])
async def test_a_learner_lost_in_mid_broadcast_is_an_error_within_the_deadline(
    engine: Engine, learner: Learner, silent_s: float
) -> None:
    def send(group: transport.WeightGroup, buckets: list[torch.Tensor]) -> None:
        def some() -> Iterator[torch.Tensor]:
            yield from buckets[:2]
            time.sleep(silent_s)
            group.close()
            raise RoundError("lost")

        transport.send_buckets(group, some(), lambda: True)

    with pytest.raises(RoundError, match="broadcast failed"):
        await learner.publish(engine, make_model(6), send=send)
    assert learner.seconds < TIMEOUT_S + 1.0
    await heal(engine, learner)


@in_module_loop
async def test_a_learner_that_never_comes_is_an_error_within_the_deadline(
    engine: Engine, learner: Learner
) -> None:
    with pytest.raises(RoundError, match="did not form"):
        await learner.publish(engine, make_model(6), absent=True)
    assert learner.seconds < TIMEOUT_S + 1.0
    await heal(engine, learner)


@in_module_loop
async def test_an_abandoned_round_is_an_error_that_says_so(
    engine: Engine, learner: Learner
) -> None:
    def send(group: transport.WeightGroup, buckets: list[torch.Tensor]) -> None:
        answers = iter([True, True])
        transport.send_buckets(group, buckets, lambda: next(answers, False))

    with pytest.raises(RoundError, match="abandoned by the learner before bucket 2"):
        await learner.publish(engine, make_model(7), send=send)
    await heal(engine, learner)


@in_module_loop
async def test_aborted_samples_are_failures_and_the_engine_is_free_again(engine: Engine) -> None:
    tasks = [
        asyncio.create_task(engine.generate(make_prompt(9, max_tokens=400), i, "salt"))
        for i in range(4)
    ]
    await asyncio.sleep(0.1)
    assert engine.busy == 4
    await engine.abort_all()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, GenerationError) for result in results)
    assert engine.busy == 0


@in_module_loop
async def test_samples_asked_for_in_a_round_wait_for_it_and_are_of_the_new_version(
    engine: Engine, learner: Learner
) -> None:
    prompt, before = make_prompt(11), engine.version
    await samples_of(engine, prompt)  # leaves a prefix of the old weights behind
    await engine.pause()
    tasks = [asyncio.create_task(engine.generate(prompt, i, str(before))) for i in range(4)]
    await learner.publish(engine, make_model(8))
    assert engine.busy == 4
    await engine.resume()
    for sample in await asyncio.gather(*tasks):
        assert [span[:2] for span in sample.spans] == [engine.version]
        assert gap(learner.model, prompt, sample) < TOLERANCE


@in_module_loop
async def test_a_probe_does_not_wait_for_running_samples(engine: Engine, learner: Learner) -> None:
    prompt = make_prompt(12, max_tokens=400)
    tasks = [asyncio.create_task(engine.generate(prompt, i, "salt")) for i in range(64)]
    await asyncio.sleep(0.2)
    probe = await engine.probe(prompt.token_ids)
    assert not any(task.done() for task in tasks[-16:])
    assert np.abs(probe - reference(learner.model, prompt.token_ids)).max() < TOLERANCE
    await engine.abort_all()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[-1], GenerationError)


@in_module_loop
async def test_a_prompt_longer_than_the_context_is_a_failure_of_that_sample_alone(
    engine: Engine, learner: Learner
) -> None:
    prompt = make_prompt(1)
    long = dataclasses.replace(prompt, token_ids=np.resize(prompt.token_ids, CONTEXT + 1))
    with pytest.raises(GenerationError, match=str(CONTEXT)):
        await engine.generate(long, 0, "salt")
    await assert_serves(engine, learner)
