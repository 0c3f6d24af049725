"""Two learners of one run: the older incarnation changes nothing any more, and says why it ends.

The lock on the run directory keeps a second learner out. These tests are about the case in which it
does not: a file server that dropped the lock of a learner that stood still.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from common.broker import Broker
from common.config import Config, dump_toml, load_config
from common.entry import VERDICTS
from common.errors import DapoError, FencedError
from common.ledger import read_lines
from common.messages import Version
from common.rounds import Call
from common.server import EmbeddedServer
from learner.streams import Streams
from learner.timeline import RunLock, Timeline
from tests.conftest import MakeConfig
from tests.integration.pretend import World, drawn, rows, say, world
from tests.unit.records import a_judgement, a_verdict

ROOT = Path(__file__).parents[2]
FENCED = ("dispatch", "publish", "settle", "acknowledge", "say", "end")
"""What the learner's scripts are called; all others are the workers'."""


@pytest.fixture
def config(make_config: MakeConfig, run_name: str) -> Config:
    return make_config(run={"name": run_name}, admission={"max_staleness": 1})


@pytest.fixture
async def other(server: EmbeddedServer, run_name: str) -> AsyncIterator[Broker]:
    connected = await Broker.connect(server.url, run_name, lease_s=1.0)
    yield connected
    await connected.close()


def timeline(config: Config, *starts: int) -> Timeline:
    for number in starts:
        Timeline.open(config.run_dir).begin(number)
    return Timeline.open(config.run_dir)


@pytest.mark.parametrize("name", FENCED)
def test_every_script_of_the_learner_checks_the_fence_before_it_changes_anything(
    name: str,
) -> None:
    text = (resources.files("common") / "scripts" / f"{name}.lua").read_text()
    code = [line for line in text.splitlines() if not line.startswith(("--", "#!"))]
    assert code[0] == "local fence = redis.call('GET', KEYS[1])"
    assert code[1].startswith("if fence and tonumber(fence) > tonumber(ARGV[1]) then return")


async def test_an_older_incarnation_is_refused_by_every_call_and_changes_nothing(
    config: Config, broker: Broker, other: Broker
) -> None:
    config.run_dir.mkdir(parents=True)
    old = Streams(config, broker, timeline(config, 0))
    prompt = old.prompt("7", 7, 0, 0, rows()[0], 0)
    await broker.publish(1, "1.0")
    await old.put(prompt)
    await other.publish(2, "")
    await say(broker, [a_verdict(7)])
    [entry] = await other.claim(VERDICTS, "learner.2", 1, 100)
    before = await state(broker)
    calls = {
        "put": old.put(old.prompt("8", 8, 0, 0, rows()[0], 0)),
        "another attempt": old.put(old.prompt("7", 7, 1, 0, rows()[0], 0)),
        "settle": old.settle("7", entry.id),
        "acknowledge": old.acknowledge(entry.id),
        "publish": broker.publish(1, "1.1"),
        "say": broker.say(Call("1.1", "1.1")),
        "end": broker.end("complete"),
    }
    for what, call in calls.items():
        with pytest.raises(FencedError, match="another learner has taken over.*this one stops"):
            await call
        assert await state(broker) == before, what


async def state(broker: Broker) -> dict[bytes, Any]:
    """Everything on the server of a run, and who holds which verdict."""
    keys = sorted([key async for key in broker.client.scan_iter(f"{{{broker.run}}}:*")])
    values: dict[bytes, Any] = {key: await broker.client.dump(key) for key in keys}
    pending = await broker.client.xpending(broker.key(VERDICTS), "workers")
    return values | {b"pending": pending}


async def test_a_server_that_was_put_back_is_fenced_again_by_the_next_call(
    config: Config, broker: Broker, other: Broker
) -> None:
    config.run_dir.mkdir(parents=True)
    old = Streams(config, broker, Timeline(config.run_dir / "timeline.json", [0]))
    new = Streams(config, other, timeline(config, 0, 0))
    await broker.client.set(broker.key("fence"), 1)
    await new.put(new.prompt("1", 1, 0, 0, rows()[0], 0))
    with pytest.raises(FencedError):
        await old.put(old.prompt("2", 2, 0, 0, rows()[0], 0))


async def test_verdicts_that_an_older_incarnation_has_claimed_come_to_the_newer_one(
    config: Config, broker: Broker, other: Broker
) -> None:
    """Also those that it claims after the newer one has begun."""
    async with world(config, broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        name = f"learner.{w.timeline.incarnation - 1}"
        for ordinal in (0, 1):
            verdict = a_verdict(ordinal, fate="filtered", reason="all_wrong")
            verdict.samples[:] = [a_judgement("wrong", 3, Version(1, 0))] * 4
            await say(other, [verdict])
            await other.claim(VERDICTS, name, 1, 20)
        await w.until(lambda: {0, 1} <= w.ledger.fates.keys(), "the verdicts")


async def test_a_learner_that_stood_still_while_another_began_ends_and_changes_nothing(
    config: Config, broker: Broker, server: EmbeddedServer
) -> None:
    config.run_dir.mkdir(parents=True)
    recipe = config.run_dir / "config.toml"
    recipe.write_text(dump_toml(config))
    command = [sys.executable, "-m", "tests.integration.test_two_learners", str(recipe), server.url]
    older = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        await until(lambda: len(list(read_lines(config.run_dir / "ledger.jsonl"))) >= 4)
        os.kill(older.pid, signal.SIGSTOP)
        (config.run_dir / "lock").unlink()  # as a file server that has dropped the lock
        lock = RunLock(config.run_dir)
        async with world(config, broker) as w:
            assert w.timeline.incarnation == 2
            w.generators(2).verifier(drawn(2))
            await w.train(2)
            durable = {line.ordinal: line for line in read_lines(w.ledger.path)}
            os.kill(older.pid, signal.SIGCONT)
            await asyncio.to_thread(older.wait, 30)
            await w.train(2)
            await w.fold()
            await w.dispatcher.end()
            result = await w.audit()
            assert result.balanced and result.trained == 4 * 4, result.as_text()
        fates = {line.ordinal: line for line in read_lines(w.ledger.path)}
        assert all(fates[ordinal] == line for ordinal, line in durable.items())
        del lock
    finally:
        older.kill()
    assert older.returncode == 2
    said = older.communicate()[1]
    assert "another learner has taken over" in said and "Traceback" not in said


async def until(true: Any) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.02)


async def be_the_older(config: Config, url: str) -> None:
    """A learner with workers of its own, who trains nothing: groups are filtered for ever."""
    lock = RunLock(config.run_dir)
    broker = await Broker.connect(url, config.run.name, lease_s=1.0)
    w = await World(config, broker).start()
    w.generators(2).verifier(drawn(1, accept=0.0, fail=0.0))
    while True:
        w.check()
        await asyncio.sleep(0.01)
    del lock


if __name__ == "__main__":
    try:
        asyncio.run(be_the_older(load_config(Path(sys.argv[1])), sys.argv[2]))
    except DapoError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
