"""The engine that only pretends: its samples, its versions, its part in a weight round."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import transport
from common.config import Config
from common.errors import ConfigError, RoundError
from common.messages import Prompt, Version
from common.rounds import Reply
from generator.engine import GenerationError
from generator.simulated import SimulatedEngine, draft, vocabulary_size
from learner.publisher import probe_gap
from tests.conftest import MakeConfig
from tests.unit.records import a_prompt
from verifier.math_answer import check

HOST, TIMEOUT_S = "127.0.0.1", 5.0
WORDS = 50
PARTS = [torch.arange(6, dtype=torch.float32), torch.ones(3, 2)]
UPDATE = {
    "manifest": [["a", [6]], ["b", [3, 2]]], "dtype": "float32", "bucket_bytes": 24,
    "version": "1.1",
}  # fmt: skip


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    pace = {"simulated_tokens_per_second": 200.0, "simulated_length": 20.0}
    return make_config(generator={"engine": "simulated", "max_samples": 4, **pace})


@pytest.fixture
async def engine(config: Config) -> AsyncIterator[SimulatedEngine]:
    made = SimulatedEngine(config, WORDS, Version(1, 0), "g")
    yield made
    await made.close()


@pytest.fixture(scope="module")
def store() -> Any:
    return transport.serve_store(HOST)


def prompts(count: int, **changes: Any) -> list[Prompt]:
    return [replace(a_prompt(n), seed=n, **changes) for n in range(count)]


# --- samples ------------------------------------------------------------------------------------


@given(st.integers(0, 2**53), st.integers(0, 64), st.integers(1, 400), st.floats(1, 300))
def test_equal_seeds_give_equal_samples_within_the_cap(
    seed: int, index: int, cap: int, mean: float
) -> None:
    prompt = replace(a_prompt(), seed=seed, max_tokens=cap)
    drawn, again = (draft(prompt, index, WORDS, mean, 0.5) for _ in range(2))
    assert drawn.text == again.text and np.array_equal(drawn.token_ids, again.token_ids)
    assert 1 <= drawn.length == len(drawn.token_ids) <= cap
    assert drawn.token_ids.max() < WORDS
    assert (drawn.finish_reason == "length") == (drawn.text == "") == (drawn.length == cap)


@pytest.mark.parametrize("gold", ["0", "-3", "1.5", "1/2"])
def test_the_share_of_right_answers_is_the_one_asked_for_whatever_the_gold(gold: str) -> None:
    drawn = [draft(p, 0, WORDS, 20.0, 0.3) for p in prompts(1000, gold=gold, max_tokens=10_000)]
    judged = [check(item.text, gold).outcome for item in drawn]
    assert set(judged) <= {"correct", "wrong", "no_answer"}
    assert judged.count("correct") == pytest.approx(300, abs=60)


def test_the_mean_length_is_the_one_asked_for() -> None:
    drawn = [draft(p, 0, WORDS, 40.0, 0.3).length for p in prompts(2000, max_tokens=10_000)]
    assert np.mean(drawn) == pytest.approx(40.0, rel=0.05)


async def test_a_sample_has_the_log_probs_of_a_uniform_policy_and_one_version(
    engine: SimulatedEngine,
) -> None:
    told: list[int] = []
    sample = await engine.generate(a_prompt(), 2, "salt", told.append)
    assert sample.logprobs == pytest.approx(-math.log(WORDS))
    assert [span[:2] for span in sample.spans] == [(1, 0)]
    assert told == [] or told[-1] <= len(sample.token_ids)


async def test_running_samples_stay_over_a_pause_and_go_on_with_the_new_version(
    engine: SimulatedEngine, store: Any
) -> None:
    samples = [
        asyncio.create_task(engine.generate(p, 0, "salt")) for p in prompts(4, max_tokens=10_000)
    ]
    await asyncio.sleep(0.05)
    await engine.pause()
    await received(engine, store, "two", send_all)
    assert not any(task.done() for task in samples), "a token was made in a pause"
    await engine.resume()
    async with asyncio.timeout(10):
        done = await asyncio.gather(*samples)
    for sample in done:  # the spans cover the tokens, or the record would refuse them
        assert [span[:2] for span in sample.spans] == [(1, 0), (1, 1)]


async def test_no_more_samples_run_at_a_time_than_there_are_places(engine: SimulatedEngine) -> None:
    tasks = [asyncio.create_task(engine.generate(p, 0, "salt")) for p in prompts(7)]
    await asyncio.sleep(0.05)
    assert len(engine._running) == 4
    await engine.abort_all()
    failures = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(failure) for failure in failures] == [GenerationError] * 7


# --- weight rounds ------------------------------------------------------------------------------


def send_all(group: transport.WeightGroup) -> None:
    transport.send_buckets(group, [part.flatten() for part in PARTS], lambda: True)


def send_damaged(group: transport.WeightGroup) -> None:
    """The digest of other bytes than those that follow."""
    octets = PARTS[0].view(torch.uint8)
    mark = transport.digest(octets) ^ 1
    group.broadcast(torch.tensor([transport.NEXT, 0, octets.numel(), mark], dtype=torch.int64))
    group.broadcast(octets)


async def received(
    engine: SimulatedEngine, store: Any, prefix: str, send: Callable[[Any], None]
) -> None:
    """One update, with the learner's end in a thread."""

    def learner() -> None:
        group = transport.WeightGroup.form("gloo", store, prefix, 0, 2, TIMEOUT_S, HOST)
        send(group)
        group.close()

    thread = threading.Thread(target=learner, daemon=True)
    thread.start()
    init = {
        "host": HOST, "port": store.port, "prefix": prefix, "world": 2, "rank_offset": 1,
        "backend": "gloo", "timeout_s": TIMEOUT_S,
    }  # fmt: skip
    try:
        await engine.update(init, UPDATE, Version(1, 1))
    finally:
        await asyncio.to_thread(thread.join)


async def test_damaged_weights_fail_the_round_and_a_whole_round_heals(
    engine: SimulatedEngine, store: Any
) -> None:
    await engine.pause()
    with pytest.raises(RoundError, match="bucket 0 of 24 bytes arrived damaged"):
        await received(engine, store, "damaged", send_damaged)
    assert engine.version == Version(1, 0)
    with pytest.raises(RoundError, match="half-updated"):
        await engine.resume()
    with pytest.raises(RoundError, match="in no weight group"):
        await engine.update(None, UPDATE, Version(1, 1))
    await received(engine, store, "healed", send_all)
    await engine.resume()
    assert engine.version == Version(1, 1)
    assert len((await engine.generate(a_prompt(), 0, "salt")).token_ids)


async def test_a_probe_that_is_missing_is_right_only_in_a_simulated_run(
    engine: SimulatedEngine,
) -> None:
    own = np.array([-1.0, -2.0], dtype=np.float32)
    reply = Reply("done", probe=(await engine.probe(np.arange(3, dtype=np.int32))).tolist())
    assert probe_gap(reply, own, simulated=True) == 0.0
    assert probe_gap(reply, own) == math.inf
    assert probe_gap(Reply("done", probe=[-1.0, -4.0]), own, simulated=True) == 1.0


# --- its settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generator", "publish", "words"),
    [
        ({"simulated_length": 9}, {}, "simulated_length has no effect with generator.engine = vl"),
        ({"engine": "simulated", "kv_cache_gib": 1}, {}, "kv_cache_gib has no effect"),
        ({"engine": "simulated"}, {"probe_tolerance": 0.1}, "probe_tolerance has no effect"),
        ({"engine": "simulated"}, {"backend": "nccl"}, "publish.backend = nccl needs a GPU"),
    ],
)  # fmt: skip
def test_keys_of_the_other_kind_of_engine_are_refused(
    make_config: MakeConfig, generator: dict[str, Any], publish: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_config(generator=generator, publish=publish)


def test_a_model_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 12}}')
    assert vocabulary_size(tmp_path) == 12
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no vocab_size"):
        vocabulary_size(tmp_path)
