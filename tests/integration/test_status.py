"""What is read of a run on a real server, and of one that is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.broker import Broker
from common.server import EmbeddedServer
from common.status import open_groups, read_status
from tests.unit.synthetic_run import write_config


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    embedded = EmbeddedServer(tmp_path / "run" / "server", maxmemory_mib=64)
    embedded.start()
    yield embedded
    embedded.stop()


async def test_members_are_who_holds_a_lease_and_reports_outlive_them(
    server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(server.url, "run")
    other = await Broker.connect(server.url, "run-2")
    lease = broker.lease("generator", "generator-0.1", {"workers": 1})
    async with lease, other.lease("generator", "generator-5.5", {}):
        await broker.report("generator-0.1", {"version": "1.3", "time": 1.0})
        await broker.report("generator-9.9", {"version": "1.2", "time": 0.0})
        await broker.client.hset(broker.key("status"), "broken", "{")
        status = read_status(server.url, "run")
    assert list(status["members"]) == ["generator-0.1"]
    assert status["members"]["generator-0.1"]["role"] == "generator"
    assert set(status["reports"]) == {"generator-0.1", "generator-9.9"}
    assert status["published"] is None and status["ended"] is None
    assert read_status(server.url, "run")["members"] == {}
    await broker.close()
    await other.close()


async def test_depths_open_groups_and_the_end_of_a_run_are_read(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    broker = await Broker.connect(server.url, "run")
    await broker.client.xadd(broker.key("prompts"), {"r": b"x"})
    await broker.client.xadd(broker.key("dead"), {"r": b"x"})
    await broker.client.sadd(broker.key("open"), "3", str(2**40 + 1), "ebefore-0")
    await broker.publish(1, "1.4")
    await broker.end("complete")
    status = read_status(server.url, "run")
    assert status["streams"] == {"prompts": 1, "rollouts": 0, "verdicts": 0, "dead": 1}
    assert (status["open"], status["published"], status["ended"]) == (3, "1.4", "complete")
    assert json.dumps(status)
    write_config(tmp_path / "run", batches=1)
    assert open_groups(tmp_path / "run") == {3, 2**40 + 1}
    await broker.close()


def test_a_lost_server_is_an_answer_without_the_password(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    write_config(tmp_path / "run", batches=1)
    server.stop()
    status = read_status(server.url, "run")
    assert list(status) == ["error"]
    assert "no answer from the server at 127.0.0.1:" in status["error"]
    assert server.url.split(":")[2].split("@")[0] not in status["error"]
    assert open_groups(tmp_path / "run") is None


def test_refused_credentials_and_a_bad_address_are_answers_too(server: EmbeddedServer) -> None:
    address = server.url.rpartition("@")[2]
    assert "error" in read_status(f"redis://:wrong@{address}", "run")
    assert "error" in read_status("not an address", "run")
    assert "error" in read_status("redis://localhost:port/0", "run")


def test_a_run_directory_without_a_configuration_has_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAPO_REDIS_URL", raising=False)
    assert open_groups(tmp_path) is None
    write_config(tmp_path / "run", batches=1)
    assert open_groups(tmp_path / "run") is None
