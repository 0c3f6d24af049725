"""The server fails: whatever happens to it, every group has one fate and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from common import calls
from common.broker import Broker
from common.config import Config
from common.connection import connect
from common.errors import BrokerError
from common.server import EmbeddedServer, free_port
from common.startup import URL_VARIABLE
from learner import dispatcher as dispatcher_module
from tests.conftest import MakeConfig
from tests.integration.pipeline import pipeline, simulated
from tests.integration.wire import Wire

AWAY_S = 1.5
"""Longer than a lease, so that everyone comes back as one presumed dead."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "PUMP_S", 0.01)
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.1)
    monkeypatch.setattr(calls, "SOCKET_TIMEOUT_S", 1.0)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill or fill."""
    embedded = EmbeddedServer(tmp_path / "server", maxmemory_mib=64)
    embedded.start(free_port())
    yield embedded
    embedded.stop(0.0)


@pytest.fixture
async def wire(own_server: EmbeddedServer) -> AsyncIterator[Wire]:
    async with Wire(own_server.url) as made:
        yield made


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return simulated(make_config)


@contextlib.asynccontextmanager
async def admin(server: EmbeddedServer) -> AsyncIterator[Any]:
    """The operator's own connection."""
    broker = await Broker.connect(server.url, "admin")
    yield broker.client
    await broker.close()


def kill(server: EmbeddedServer) -> int:
    """`kill -9`; the port that it listened on."""
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    return int(server.url.rpartition(":")[2].removesuffix("/0"))


# --- what happens to it -------------------------------------------------------------------------


async def killed(server: EmbeddedServer, wire: Wire) -> None:
    port = kill(server)
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(server.start, port)


async def killed_and_emptied(server: EmbeddedServer, wire: Wire) -> None:
    port = kill(server)
    shutil.rmtree(server.folder / "appendonlydir")
    await asyncio.sleep(0.3)
    await asyncio.to_thread(server.start, port)


async def killed_again_and_again(server: EmbeddedServer, wire: Wire) -> None:
    for _ in range(4):
        port = kill(server)
        await asyncio.to_thread(server.start, port)
        await asyncio.sleep(0.1)


async def connections_killed(server: EmbeddedServer, wire: Wire) -> None:
    async with admin(server) as client:
        for _ in range(8):
            await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.1)


async def cut_off(server: EmbeddedServer, wire: Wire) -> None:
    wire.cut()
    await asyncio.sleep(AWAY_S)
    await wire.mend()


async def silent(server: EmbeddedServer, wire: Wire) -> None:
    wire.fall_silent()
    await asyncio.sleep(AWAY_S)
    wire.speak_again()


async def standing_still(server: EmbeddedServer, wire: Wire) -> None:
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(AWAY_S)
    server.process.send_signal(signal.SIGCONT)


async def full(server: EmbeddedServer, wire: Wire) -> None:
    async with admin(server) as client:
        await client.config_set("maxmemory", "1mb")
        await asyncio.sleep(AWAY_S)
        await client.config_set("maxmemory", "64mb")


Fault = Callable[[EmbeddedServer, Wire], Awaitable[None]]
FAULTS: list[Fault] = [
    killed, killed_and_emptied, killed_again_and_again, connections_killed, cut_off, silent,
    standing_still, full,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_run_goes_on_and_every_group_has_one_fate_when_the_server_was(
    fault: Fault, config: Config, own_server: EmbeddedServer, wire: Wire
) -> None:
    async with pipeline(config, "run", wire.through(own_server.url)) as p:
        with capture_logs() as logs:
            await p.train(1)
            training = asyncio.create_task(p.train(3))
            await asyncio.sleep(0.1)
            await fault(own_server, wire)
            await training
            await p.train(1)
        await p.finish()
        assert [len(batch.ordinals) for batch in p.batches] == [4] * 5
        assert (await p.audit()).trained == 20
        assert all(min(b.oldest) >= b.version - 1 for b in p.batches)
    waits = [row for row in logs if row["event"] == "waiting for the server"]
    assert waits and all(row["since"] and row["why"] for row in waits)
    assert any(row["event"] == "the server is back" for row in logs)


# --- a full server ------------------------------------------------------------------------------


async def fill(client: Any) -> int:
    """Another tenant takes what room there is, until not even the smallest value fits.

    The server gives the buffers of its connections back after a while: then there is room again.
    Returns how often it was refused.
    """
    sizes = (2**14, 2**8, 1)
    for size in sizes:
        with contextlib.suppress(ResponseError):
            while True:
                number = await client.incr("filler")
                await client.set(f"filler:{number}", b"x" * size)
    return len(sizes)


async def test_a_full_server_is_emptied_by_training_and_the_run_goes_on_once_there_is_room(
    config: Config, own_server: EmbeddedServer
) -> None:
    async with pipeline(config, "run", own_server.url) as p, admin(own_server) as client:
        await p.train(1)
        chosen = await p.choose()
        await client.config_set("maxmemory", "8mb")
        tenant = await fill(client)
        assert await p.write(chosen) == []
        await p.committed(chosen)
        assert not {item.ordinal for item in chosen} & await p.on_server()

        async def samples_wait() -> bool:
            nonlocal tenant
            tenant += await fill(client)
            errors = await client.info("errorstats")
            return int(errors["errorstat_OOM"]["count"]) > tenant

        await p.wait_for(samples_wait, "a sample that does not fit")
        await client.unlink(*[key async for key in client.scan_iter("filler*", count=1000)])
        await p.train(2)
        await p.finish()
        assert (await p.audit()).trained == 16


async def test_the_learner_never_waits_for_room(own_server: EmbeddedServer) -> None:
    """It alone can empty the server, and the attempts that it may make are few."""
    broker = await Broker.connect(own_server.url, "run", lease_s=0.3, patience_s=0.01)
    keys = [broker.key(name) for name in ("fence", "open", "group:1", "prompts")]
    async with broker.lease("learner", "learner", {}):
        await fill(broker.client)
        arguments = [1, "1", 0, "1.0", b"p" * 1000, 4, broker.key("sample", "1", "")]
        assert await broker.script("dispatch", keys, arguments) == 1
        await broker.publish(1, "1.0")
        await broker.report("learner", {"role": "learner"})
        await broker.client.delete(broker.key("lease", "learner"))
        await asyncio.sleep(0.5)
        assert list(await broker.members("learner")) == ["learner"]
        assert list(await broker.reports()) == ["learner"]
        await broker.end("complete")
        assert await broker.ended() == "complete"
        await fill(broker.client)
        with pytest.raises(BrokerError, match="its memory is full"):
            await broker.put_sample("1", 0, 0, b"x" * 1000)
    await broker.close()


# --- the start, and the end of patience -----------------------------------------------------------


@pytest.fixture
def elsewhere(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Config, EmbeddedServer, int]:
    """A configuration that names a server which is not up yet."""
    server, port = EmbeddedServer(tmp_path / "server", maxmemory_mib=16), free_port()
    monkeypatch.setenv(URL_VARIABLE, f"redis://:{server.password}@127.0.0.1:{port}/0")
    config = make_config(redis={"url": f"redis://127.0.0.1:{port}/0", "patience_s": 30.0})
    return config, server, port


async def test_a_role_waits_for_a_server_that_is_started_after_it(
    elsewhere: tuple[Config, EmbeddedServer, int],
) -> None:
    config, server, port = elsewhere
    with capture_logs() as logs:
        connecting = asyncio.create_task(connect(config))
        await asyncio.sleep(0.3)
        assert not connecting.done()
        await asyncio.to_thread(server.start, port)
        broker = await connecting
    assert await broker.published() is None
    await broker.close()
    server.stop(0.0)
    said = [row["event"] for row in logs]
    assert said == ["waiting for the server", "the server is back"]


async def test_a_role_gives_a_server_up_that_does_not_come_and_names_it(
    elsewhere: tuple[Config, EmbeddedServer, int],
) -> None:
    config, _, port = elsewhere
    config = config.model_copy(
        update={"redis": config.redis.model_copy(update={"patience_s": 0.2})}
    )
    with pytest.raises(BrokerError) as caught:
        await connect(config)
    for words in (f"127.0.0.1:{port}", "waited", "redis.patience_s", "redis.url"):
        assert words in str(caught.value)


async def test_a_server_that_cannot_write_to_its_disk_is_waited_for(broker: Broker) -> None:
    answers: list[Any] = [ResponseError("MISCONF Errors writing to the AOF file"), b"ok"]

    async def call() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with capture_logs() as logs:
        assert await broker.persist(call, "writing") == b"ok"
    assert "cannot write to its disk" in logs[0]["why"]


async def test_roles_give_up_in_one_line_when_the_server_stays_away(
    make_config: MakeConfig, own_server: EmbeddedServer
) -> None:
    config = simulated(make_config, redis={"patience_s": 0.5})
    with pytest.raises(BrokerError, match=r"waited \d s for the server \(.*redis.patience_s"):
        async with pipeline(config, "run", own_server.url) as p:
            await p.train(1)
            kill(own_server)
            await p.train(5)
