"""A real vLLM engine takes weights from this process, which plays the learner's rank 0."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from engine_rig import (
    CONTEXT,
    TIMEOUT_S,
    TOLERANCE,
    Learner,
    assert_serves,
    gap,
    heal,
    make_model,
    make_prompt,
    make_tree,
    reference,
    samples_of,
    send_all,
    write_model,
)

from common import transport
from common.config import Config, dump_toml, parse_config
from common.errors import RoundError
from common.messages import Version
from generator.engine import Engine, GenerationError

pytestmark = pytest.mark.slow
in_module_loop = pytest.mark.asyncio(loop_scope="module")

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


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def config(model_dir: Path) -> Config:
    return parse_config(make_tree(model_dir), "test")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(config: Config, model_dir: Path) -> AsyncIterator[Engine]:
    running = await Engine.start(config, model_dir, Version(1, 0), "g0")
    yield running
    await running.close()


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    yield Learner()


def test_killing_the_owner_ends_the_engine_processes(
    config: Config, model_dir: Path, tmp_path: Path
) -> None:
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
