"""Weight rounds in which somebody dies, hangs, is slow or sends nonsense: the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from common import transport
from common.broker import Broker
from common.config import Config
from common.messages import Version
from common.server import EmbeddedServer
from common.startup import URL_VARIABLE
from generator.engine import START, EngineDead
from generator.simulated import SimulatedEngine, _join
from generator.worker import GeneratorWorker
from learner import publisher as publisher_module
from tests.conftest import MakeConfig
from tests.integration.pipeline import simulated
from tests.integration.round_rig import (
    RoundLearner,
    generator,
    process,
    run_generator,
    run_learner,
    until,
    write_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def config(make_config: MakeConfig, tmp_path: Path, run_name: str) -> Config:
    write_model(tmp_path / "model")
    return simulated(
        make_config, run={"dir": str(tmp_path / "runs"), "name": run_name},
        model={"path": str(tmp_path / "model"), "max_length": 64, "dtype": "float32"},
        publish={"ready_timeout_s": 4.0, "round_timeout_s": 4.0, "bucket_mib": 0.001},
        redis={"lease_s": 2.0, "patience_s": 60.0},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "BACKOFF_S", (0.5, 4.0))


def environment(server: EmbeddedServer, **more: str) -> dict[str, str]:
    return {URL_VARIABLE: server.url, **more}


def left_out(logs: list[Any]) -> dict[str, str]:
    return {line["member"]: line["why"] for line in logs if line["event"] == "left out"}


async def serving(worker: GeneratorWorker, version: str) -> None:
    async def there() -> bool:
        return worker.rounds.serving == version

    await until(there, f"{version} at {worker.name}")


# --- members --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "generator_before_ready", "generator_after_ready", "generator_in_round",
        "bucket_received:2", "generator_before_done",
    ],
)  # fmt: skip
async def test_a_member_that_is_killed_in_a_round_costs_the_others_nothing_but_that_round(
    config: Config, broker: Broker, server: EmbeddedServer, point: str
) -> None:
    dying = environment(server, DAPO_MEMBER="dying", DAPO_FAILPOINT=point)
    learner = RoundLearner(config, broker)
    async with (
        generator(config, broker, server.url, "alive") as worker,
        process(run_generator, config, dying) as doomed,
    ):

        async def both() -> bool:
            return len(await broker.members("generator")) == 2

        await until(both, "both generators")
        await learner.round(1)
        await asyncio.to_thread(doomed.join, 30)
        assert doomed.exitcode == -signal.SIGKILL
        await learner.serve(1, {"alive"})
        await serving(worker, "1.1")
        assert worker.engine.version == Version(1, 1)
        assert learner.publisher.members == {"alive"}


async def test_a_member_that_stands_still_is_left_out_by_name_and_joins_once_it_goes_on(
    config: Config, broker: Broker, server: EmbeddedServer
) -> None:
    """Its lease outlives the deadline: it is alive, and late."""
    patient = config.model_copy(
        update={"redis": config.redis.model_copy(update={"lease_s": 60.0})}
    )  # fmt: skip
    slow = environment(server, DAPO_MEMBER="slow")
    learner = RoundLearner(config, broker)
    async with (
        generator(config, broker, server.url, "quick") as worker,
        process(run_generator, patient, slow) as other,
    ):

        async def both() -> bool:
            return len(await broker.members("generator")) == 2

        await until(both, "both generators")
        (name,) = {m for m in await broker.members("generator") if m.startswith("slow")}
        await learner.serve(1, {"quick", name})
        os.kill(other.pid, signal.SIGSTOP)
        with capture_logs() as logs:
            assert await learner.round(2) == {"quick"}
        assert left_out(logs) == {name: "not ready in time"}
        await serving(worker, "1.2")
        os.kill(other.pid, signal.SIGCONT)
        await learner.serve(2, {"quick", name})


class Hanging(SimulatedEngine):
    """Takes part in its first broadcast up to the first bucket, and says nothing more."""

    hangs = True

    async def update(self, init_info: Any, update_info: Any, version: Version) -> None:
        if not self.hangs:
            return await super().update(init_info, update_info, version)
        self.hangs = False
        group = await asyncio.to_thread(lambda: _join(**init_info))
        await asyncio.to_thread(transport._receive_header, group)
        await asyncio.Event().wait()


class Absent(SimulatedEngine):
    """Does not come to its first broadcast."""

    hangs = True

    async def update(self, init_info: Any, update_info: Any, version: Version) -> None:
        if self.hangs:
            self.hangs = False
            await asyncio.Event().wait()
        await super().update(init_info, update_info, version)


@pytest.mark.parametrize("kind", [Hanging, Absent])
async def test_a_member_that_hangs_in_the_broadcast_is_blamed_and_the_others_go_on(
    config: Config, broker: Broker, server: EmbeddedServer, kind: type[SimulatedEngine]
) -> None:
    learner = RoundLearner(config, broker)
    async with (
        generator(config, broker, server.url, "whole") as worker,
        generator(config, broker, server.url, "hung", kind),
    ):
        with capture_logs() as logs:
            assert "hung" not in await learner.round(1)
        assert left_out(logs)["hung"] == "not done before the deadline"
        await learner.serve(1, {"whole"})
        await serving(worker, "1.1")


async def test_a_generator_whose_engine_hangs_in_a_round_ends_so_that_it_is_started_again(
    config: Config, broker: Broker, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("generator.rounds.ENGINE_S", 0.5)
    learner = RoundLearner(config, broker)
    own = await Broker.connect(server.url, broker.run, config.redis.lease_s)
    worker = GeneratorWorker(config, own, Absent(config, 64, START, "hung"), "hung")
    task = asyncio.create_task(worker.run())

    async def there() -> bool:
        return bool(await broker.members("generator"))

    await until(there, "the generator")
    await learner.round(1)
    with pytest.raises(EngineDead, match="hangs in a weight round"):
        async with asyncio.timeout(60):
            await task
    await own.close()


async def test_damaged_bytes_reach_no_engine_and_the_next_round_heals(
    config: Config, broker: Broker, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, damaged = transport._send_header, threading.Event()

    def garbled(group: Any, command: int, index: int, count: int, mark: int) -> None:
        wrong = command == transport.NEXT and index == 1 and not damaged.is_set()
        if wrong:
            damaged.set()
        send(group, command, index, count, mark + wrong)

    monkeypatch.setattr(transport, "_send_header", garbled)
    learner = RoundLearner(config, broker)
    async with (
        generator(config, broker, server.url, "a") as a,
        generator(config, broker, server.url, "b") as b,
    ):
        with capture_logs() as logs:
            assert await learner.round(1) == set()
        for why in left_out(logs).values():
            assert "bucket 1 of 8192 bytes arrived damaged (digest)" in why
        assert left_out(logs).keys() == {"a", "b"}
        assert not a.engine._whole and not b.engine._whole
        await learner.serve(1, {"a", "b"})
        await serving(a, "1.1")
        await serving(b, "1.1")


async def test_half_an_update_is_no_update(
    config: Config, broker: Broker, server: EmbeddedServer
) -> None:
    learner = RoundLearner(config, broker)
    async with generator(config, broker, server.url, "a") as a:
        learner.engine.sent = 2
        with capture_logs() as logs:
            assert await learner.round(1) == set()
        assert "ended before bucket 2 of 4" in left_out(logs)["a"]
        assert a.rounds.serving == "" and not a.engine._whole
        learner.engine.sent = 4
        await learner.serve(1, {"a"})
        await serving(a, "1.1")


async def test_joiners_are_served_at_any_time_also_when_nobody_was_left(
    config: Config, broker: Broker, server: EmbeddedServer
) -> None:
    learner = RoundLearner(config, broker)
    assert await learner.round(1) == set()
    assert await broker.published() == "1.1"
    async with contextlib.AsyncExitStack() as first:
        a = await first.enter_async_context(generator(config, broker, server.url, "a"))
        await learner.serve(1, {"a"})
        await serving(a, "1.1")
        b = await first.enter_async_context(generator(config, broker, server.url, "b"))
        await learner.serve(1, {"a", "b"})
        await serving(b, "1.1")
    assert await learner.round(2) == set()
    async with generator(config, broker, server.url, "c") as c:
        await learner.serve(2, {"c"})
        await serving(c, "1.2")


async def test_a_learner_that_is_told_to_end_gives_its_round_up_at_once(
    config: Config, broker: Broker, server: EmbeddedServer
) -> None:
    learner = RoundLearner(config, broker)
    async with generator(config, broker, server.url, "absent", Absent):
        task = asyncio.create_task(learner.round(1))

        async def said() -> bool:
            return bool(learner.sender._store)

        await until(said, "go")
        learner.stopping, learner.publisher.ending = "SIGTERM", True
        with capture_logs() as logs:
            assert await task == set()
        assert learner.failures == ["the weight group did not form: the learner ends"]
        assert left_out(logs) == {"absent": "the learner ends"}


# --- learners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point", ["round_go_said:2", "bucket_sent:6", "round_collected:2", "round_published:2"]
)
async def test_generators_outlive_a_learner_and_follow_the_next_one_back_to_an_older_version(
    config: Config, broker: Broker, server: EmbeddedServer, point: str
) -> None:
    async with (
        generator(config, broker, server.url, "a") as a,
        generator(config, broker, server.url, "b") as b,
    ):
        dying = {"DAPO_FAILPOINT": point}
        async with process(run_learner, config, server.url, 5, dying) as first:
            await asyncio.to_thread(first.join, 60)
            assert first.exitcode == -signal.SIGKILL
        assert (config.run_dir / "served").exists(), "it died before both had its weights"
        assert {a.rounds.serving, b.rounds.serving} <= {"", "1.5"}, "half a round was published"
        second = RoundLearner(config, broker, 3)
        await second.take_over()
        assert await broker.claim_prompts("1.5", "a", 1) == []
        await second.serve(3, {"a", "b"})
        for worker in (a, b):
            await serving(worker, "2.3")
            assert worker.engine.version == Version(2, 3)
