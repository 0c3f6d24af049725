"""The examiner of `dapo eval` on a real server, and evaluations beside training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from common.broker import Broker
from common.config import Config
from common.errors import ConfigError
from common.messages import Prompt, Version, decode, encode
from common.results import read_results
from common.server import EmbeddedServer
from generator.main import _refuse_training
from generator.worker import GeneratorWorker
from learner import dispatcher as dispatcher_module
from learner import examination as examination_module
from learner.dispatcher import UNCLAIMED_PER_GENERATOR
from learner.evaluation import Evaluation
from learner.examination import Examination
from tests.conftest import MakeConfig
from tests.integration.pretend import World, rows, world
from tests.integration.test_generator_worker import PretendEngine, serve
from tests.unit.records import a_judgement, a_prompt

FROZEN = Version(0, 7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "PUMP_S", 0.005)
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.05)
    monkeypatch.setattr(examination_module, "REPORT_S", 0.05)


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(
        data={"heldout": ["a", "b"]}, eval={"samples": 4, "top_p": 0.7}, admission={"attempts": 2}
    )


@pytest.fixture
async def workers(config: Config, server: EmbeddedServer, run_name: str) -> AsyncIterator[World]:
    """Pretended generators and verifiers, to be started by the test."""
    connection = await Broker.connect(server.url, run_name, lease_s=1.0)
    made = World(config, connection)
    yield made
    made.check()
    await made.crash()
    await connection.close()


def judge(prompt: Prompt, attempt: int) -> str:
    return "accepted"


def found(config: Config) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((config.run_dir / "result.json").read_text())
    return result


async def test_every_problem_of_every_file_is_judged_with_the_frozen_weights(
    config: Config, broker: Broker, workers: World
) -> None:
    seen: list[Prompt] = []

    def watch(prompt: Prompt, attempt: int) -> str:
        seen.append(prompt)
        return "filtered"  # which an evaluation must not be

    workers.generators(2).verifier(watch)
    examination = Examination(config, broker, FROZEN, {"a": rows(5), "b": rows(3)})
    async with asyncio.timeout(10):
        await examination.run()
    assert {(p.samples, p.top_p, p.least, p.evaluation) for p in seen} == {(4, 0.7, FROZEN, True)}
    result = found(config)
    assert result["complete"] and result["version"] == "0.7"
    assert result["planned"] == {"a": 5, "b": 3}
    assert [result["files"][name]["problems"] for name in "ab"] == [5, 3]
    assert {tuple(files["versions"]) for files in result["files"].values()} == {(7,)}
    records = read_results(config.run_dir / "problems.jsonl")
    assert [(r.file, r.row) for r in records] == [
        *(("a", n) for n in range(1, 6)),
        *(("b", n) for n in range(1, 4)),
    ]
    assert await broker.ended() == "complete"
    assert await workers.leftovers() == []


async def test_one_that_is_stopped_keeps_what_is_done_and_is_finished_by_the_next(
    config: Config, broker: Broker, workers: World
) -> None:
    examination = Examination(config, broker, FROZEN, {"a": rows(30)})
    asked: list[int] = []

    def stop_early(prompt: Prompt, attempt: int) -> str:
        asked.append(prompt.row)
        if len(asked) == 6:
            examination.stop()
        return "accepted"

    workers.generators(1).verifier(stop_early)
    async with asyncio.timeout(10):
        await examination.run()
    done = read_results(config.run_dir / "problems.jsonl")
    assert 0 < len(done) < 30
    assert not found(config)["complete"]
    assert found(config)["files"]["a"]["problems"] == len(done)
    assert await broker.ended() == "stopped"

    with (config.run_dir / "problems.jsonl").open("a") as file:
        file.write('{"torn')  # as a kill leaves it
    asked.clear()
    again = Examination(config, broker, FROZEN, {"a": rows(30)})
    async with asyncio.timeout(10):
        await again.run()
    assert found(config)["complete"]
    assert read_results(config.run_dir / "problems.jsonl")[: len(done)] == done
    assert not {record.row - 1 for record in done} & set(asked)


async def test_samples_whose_check_worked_count_although_another_ones_never_did(
    config: Config, broker: Broker, workers: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = World._verdict

    async def one_check_fails(self: World, rollout: Any, judge: Any) -> Any:
        verdict = await original(self, rollout, judge)
        verdict.samples[0] = a_judgement("error")
        return type(verdict)(
            verdict.group, verdict.ordinal, verdict.attempt, True, "failed", "error:timeout",
            verdict.samples, "v",
        )  # fmt: skip

    monkeypatch.setattr(World, "_verdict", one_check_fails)
    workers.generators(1).verifier(judge)
    async with asyncio.timeout(10):
        await Examination(config, broker, FROZEN, {"a": rows(1)}).run()
    [record] = read_results(config.run_dir / "problems.jsonl")
    assert (record.samples, record.errors, record.checked, record.correct) == (4, 1, 3, 2)
    assert record.failure == "error:timeout"
    assert found(config)["files"]["a"]["problems"] == 1


async def test_a_server_that_forgot_everything_is_told_what_is_published_again(
    config: Config, broker: Broker, workers: World
) -> None:
    examination = Examination(config, broker, FROZEN, {"a": rows(2)})
    task = asyncio.create_task(examination.run())
    async with asyncio.timeout(10):
        while await broker.published() is None:
            await asyncio.sleep(0.01)
        await workers.forget()
        await broker.ensure_streams()
        broker.disconnects += 1
        workers.generators(1).verifier(judge)
        await task
    assert found(config)["complete"]


# --- generators with frozen weights -------------------------------------------------------------


async def test_frozen_weights_are_served_without_a_round_and_calls_are_not_answered(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(generator={"max_samples": 8, "drain_s": 1.0})
    engine = PretendEngine()
    engine.version = FROZEN
    worker = GeneratorWorker(config, broker, engine, "g", frozen=True)  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    await broker.publish(0, str(FROZEN))
    await _dispatch(broker, a_prompt(3, least=0), Version(0, 0))
    async with asyncio.timeout(5):
        while worker.finished["groups"] < 1:
            await asyncio.sleep(0.01)
    assert len(engine.asked) == 4
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await serve(broker, "0.8", "g")  # waits for an answer to its call
    worker.drain()
    await task


async def test_prompts_of_training_are_never_claimed_with_frozen_weights(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(generator={"max_samples": 8, "drain_s": 0.0})
    engine = PretendEngine()
    engine.version = FROZEN
    worker = GeneratorWorker(config, broker, engine, "g", frozen=True)  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    await broker.publish(1, "1.7")
    await _dispatch(broker, a_prompt(3, least=7), Version(1, 7))
    await asyncio.sleep(0.3)
    assert engine.asked == []
    worker.drain()
    await task
    with pytest.raises(ConfigError, match=r"published version 1\.7.*--frozen"):
        await _refuse_training(config, broker, FROZEN)


async def _dispatch(broker: Broker, prompt: Prompt, least: Version) -> None:
    key, record = broker.key, replace(prompt, least=least)
    keys = [key("fence"), key("open"), key("group", record.group), key("prompts")]
    args = [least.incarnation, record.group, record.attempt, str(least), encode(record)]
    await broker.script("dispatch", keys, [*args, record.samples, key("sample", record.group, "")])


# --- beside training ----------------------------------------------------------------------------


async def test_prompts_of_training_go_out_while_those_of_an_evaluation_wait(
    config: Config, broker: Broker
) -> None:
    """Of 50 problems and 8 groups, as many as admission allows, the groups are not the last."""
    async with world(config, broker) as w:
        await w.dispatcher.examiner.begin(Evaluation("5", {"a": rows(50)}))
        claimed: list[Prompt] = []
        async with asyncio.timeout(10):
            while len(claimed) < 30:
                await asyncio.sleep(0.02)  # for both kinds to be sent again up to their limits
                assert len(await broker.unclaimed()) <= 2 * UNCLAIMED_PER_GENERATOR
                entries = await broker.claim_prompts("1.0", "g", 1)
                claimed += [decode(Prompt, entry.data) for entry in entries]
        assert sum(not prompt.evaluation for prompt in claimed) == 8
