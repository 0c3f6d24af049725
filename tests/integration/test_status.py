"""What is read of a run on a real server, and of one that is not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from common.broker import Broker
from common.cli import app
from common.config import Config, dump_toml
from common.errors import BrokerError, ConfigError
from common.ledger import Ledger
from common.messages import Rollout, encode
from common.metrics import Metrics, last_row
from common.prometheus import Prometheus
from common.server import EmbeddedServer
from common.status import open_groups, read_status, target_of
from common.vitals import Clock, Vitals
from generator.worker import GeneratorWorker
from learner.decision import Group
from learner.dispatcher import Dispatcher
from learner.progress import Progress
from learner.timeline import Timeline
from tests.conftest import MakeConfig
from tests.integration.pretend import rows
from tests.integration.test_generator_worker import PretendEngine
from tests.unit.synthetic_run import batch_row, write_config
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of the run directory, which a test may stop."""
    embedded = EmbeddedServer(tmp_path / "run" / "server", maxmemory_mib=64)
    embedded.start()
    yield embedded
    embedded.stop()


async def test_members_are_who_holds_a_lease_and_reports_outlive_them(
    own_server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(own_server.url, "run")
    other = await Broker.connect(own_server.url, "run-2")
    lease = broker.lease("generator", "generator-0.1", {"workers": 1})
    async with lease, other.lease("generator", "generator-5.5", {}):
        await broker.report("generator-0.1", {"version": "1.3", "time": 1.0})
        await broker.report("generator-9.9", {"version": "1.2", "time": 0.0})
        await broker.client.hset(broker.key("status"), "broken", "{")
        status = read_status(own_server.url, "run")
    assert list(status["members"]) == ["generator-0.1"]
    assert status["members"]["generator-0.1"]["role"] == "generator"
    assert set(status["reports"]) == {"generator-0.1", "generator-9.9"}
    assert status["published"] is None and status["ended"] is None
    assert read_status(own_server.url, "run")["members"] == {}
    await broker.close()
    await other.close()


async def test_depths_open_groups_and_the_end_of_a_run_are_read(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    broker = await Broker.connect(own_server.url, "run")
    await broker.client.xadd(broker.key("prompts"), {"r": b"x"})
    await broker.client.xadd(broker.key("dead"), {"r": b"x"})
    await broker.client.sadd(broker.key("open"), "3", str(2**40 + 1), "ebefore-0")
    await broker.publish(1, "1.4")
    await broker.end("complete")
    status = read_status(own_server.url, "run")
    assert status["streams"] == {"prompts": 1, "rollouts": 0, "verdicts": 0, "dead": 1}
    assert (status["open"], status["published"], status["ended"]) == (3, "1.4", "complete")
    assert json.dumps(status)
    write_config(tmp_path / "run", batches=1)
    assert open_groups(tmp_path / "run") == {3, 2**40 + 1}
    await broker.close()


def test_a_lost_server_is_an_answer_without_the_password(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    write_config(tmp_path / "run", batches=1)
    own_server.stop()
    status = read_status(own_server.url, "run")
    assert list(status) == ["error"]
    assert "no answer from the server at 127.0.0.1:" in status["error"]
    assert own_server.url.split(":")[2].split("@")[0] not in status["error"]
    assert open_groups(tmp_path / "run") is None


def test_refused_credentials_and_a_bad_address_are_answers_too(own_server: EmbeddedServer) -> None:
    address = own_server.url.rpartition("@")[2]
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


# --- staged runs: the verdict through what the roles really write ---------------------------------


class Stage:
    """A run whose roles spent their time as told: real leases, reports, streams and metrics.

    Only the clock is pretended: a minute of waiting takes none.
    """

    def __init__(self, config: Config, broker: Broker) -> None:
        self.config, self.broker = config, broker
        self.seconds = 0.0
        self.progress = Progress(config, Prometheus("learner", "learner"), lambda: self.seconds)
        self.metrics = Metrics(config.run_dir)
        self.dispatcher = Dispatcher(
            config, broker, Ledger(config.run_dir / "ledger.jsonl"), Timeline.open(config.run_dir),
            rows(),
        )  # fmt: skip
        write_run_config(config)

    def learner(self, **spent: float) -> None:
        """Train a batch, spending its time so."""
        for state, seconds in spent.items():
            self.progress.clock.enter(state)
            self.seconds += seconds
        row = batch_row(3, 1.0, random.Random(1), acceptance=0.6, staleness_max=1)
        self.metrics.log("batch", 3, row | self.progress.batch(row["tokens_trained"]))

    async def report(self, member: str, role: str, **spent: float) -> None:
        """The report of a worker, as its loop makes it."""
        at = 0.0
        clock = Clock(*spent, now=lambda: at)
        for state, seconds in spent.items():
            clock.enter(state)
            at += seconds
        await self.broker.report(member, {"role": role, **Vitals(clock).figures()})

    async def groups(self, generating: int, judging: int) -> None:
        """Groups under way, some of them on the stream of the verifiers."""
        open_groups = [Group(n, 3, started=True) for n in range(generating + judging)]
        self.dispatcher.admission.restore(3, 3, open_groups)
        for ordinal in range(judging):
            record = encode(Rollout(str(ordinal), ordinal, 0, "generator-0.1", ""))
            await self.broker.client.xadd(self.broker.key("rollouts"), {"r": record})

    async def page(self, *target: str) -> dict[str, Any]:
        """What `dapo status --json` prints while everybody holds a lease."""
        queues = await self.dispatcher.streams.depths()
        report = self.progress.report(self.dispatcher, "1.3", queues)
        await self.broker.report("learner", report)
        async with contextlib.AsyncExitStack() as held:
            for name, role in MEMBERS.items():
                await held.enter_async_context(self.broker.lease(role, name, {}))
            words = ["status", *(target or [str(self.config.run_dir)]), "--json"]
            result = await asyncio.to_thread(CliRunner().invoke, app, words)
        page: dict[str, Any] = json.loads(result.output)
        return page


MEMBERS = {"learner": "learner", "verifier-0.2": "verifier", "generator-0.1": "generator"}


def write_run_config(config: Config) -> None:
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.toml").write_text(dump_toml(config))


@pytest.fixture
async def stage(
    make_config: MakeConfig, broker: Broker, server: EmbeddedServer
) -> AsyncIterator[Stage]:
    config = make_config(run={"name": broker.run, "stall_s": 300.0})
    (config.run_dir / "server").mkdir(parents=True)
    (config.run_dir / "server" / "url").write_text(server.url)
    staged = Stage(config, broker)
    await staged.report("generator-0.1", "generator", generating=50, idle=5, paused=5)
    await staged.report("verifier-0.2", "verifier", busy=20, idle=40)
    await staged.groups(generating=6, judging=1)
    yield staged
    staged.metrics.close()
    staged.dispatcher.ledger.close()


async def test_a_healthy_run_and_its_figures_are_read_from_what_its_roles_wrote(
    stage: Stage,
) -> None:
    stage.learner(waiting=5, training=50, publishing=5)
    page = await stage.page()
    assert page["verdict"] == "healthy", page["figure"]
    assert page["batches"]["trained"] == 3 and page["staleness"]["max"] == 1
    assert page["groups"]["generating"] == 6 and page["groups"]["judging"] == 1
    assert page["queues"]["rollouts"] == 1 and page["capacity"] == 8
    assert page["shares"]["learner"]["training"] == pytest.approx(50 / 60, abs=1e-3)
    assert page["tokens_per_second"]["trained"] == pytest.approx(page_tokens(stage) / 60, rel=1e-3)
    members = {row["name"]: row for row in page["members"]}
    assert members.keys() == MEMBERS.keys() and all(row["alive"] for row in page["members"])
    assert all(0 <= row["lease_age_s"] <= 1.0 for row in page["members"])


def page_tokens(stage: Stage) -> float:
    row = last_row(stage.config.run_dir, "batch")
    assert row is not None
    return float(row["tokens_trained"])


async def test_a_starved_learner_is_found(stage: Stage) -> None:
    stage.learner(waiting=40, training=20)
    page = await stage.page()
    assert page["verdict"] == "learner starved"
    assert "67%" in page["figure"] and "generator.count" in page["knob"]


async def test_saturated_verifiers_are_found(stage: Stage) -> None:
    await stage.report("verifier-0.2", "verifier", busy=59, idle=1)
    await stage.groups(generating=1, judging=6)
    stage.learner(waiting=40, training=20)
    page = await stage.page()
    assert page["verdict"] == "verifier saturated"
    assert "98%" in page["figure"] and "verifier.count" in page["knob"]


async def test_slow_publishing_is_found(stage: Stage) -> None:
    stage.learner(waiting=5, training=30, publishing=25)
    page = await stage.page()
    assert page["verdict"] == "publishing slow"
    assert "42%" in page["figure"] and "publish.bucket_mib" in page["knob"]


async def test_starved_generators_are_found(stage: Stage) -> None:
    await stage.report("generator-0.1", "generator", generating=20, idle=40, paused=0)
    stage.learner(training=58, publishing=2)
    page = await stage.page()
    assert page["verdict"] == "generators starved"
    assert "67%" in page["figure"] and "admission.max_staleness" in page["knob"]


async def test_a_stalled_run_is_found(stage: Stage) -> None:
    stage.learner(waiting=5, training=55)
    stage.progress.clock.enter("waiting")
    stage.seconds += 400
    page = await stage.page()
    assert page["verdict"] == "stalled"
    assert "400 s" in page["figure"] and "generators" in page["knob"]


async def test_an_address_will_do_if_the_run_is_named(stage: Stage, server: EmbeddedServer) -> None:
    stage.learner(waiting=40, training=20)
    page = await stage.page(server.url, "--run", stage.broker.run)
    assert page["verdict"] == "learner starved" and page["run"] == stage.broker.run
    assert page["groups"]["generating"] == 6
    with pytest.raises(ConfigError, match=f"the server has .*{stage.broker.run}.*--run"):
        target_of(server.url, "another-run")
    with pytest.raises(BrokerError, match="no answer"):
        target_of("redis://127.0.0.1:1/0", None)


async def test_workers_report_how_they_spend_their_time(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(run={"name": broker.run})
    async with CheckerPool(1, warm=()) as pool:
        verifier = VerifierWorker(config, broker, pool, "v")
        generator = GeneratorWorker(config, broker, PretendEngine(), "g")  # type: ignore[arg-type]
        tasks = [asyncio.create_task(verifier.run()), asyncio.create_task(generator.run())]
        async with asyncio.timeout(20):
            while len(reports := await broker.reports()) < 2:
                await asyncio.sleep(0.05)
        verifier.drain()
        generator.drain()
        await asyncio.gather(*tasks)
    assert reports["v"]["shares"] == {"idle": 1.0, "busy": 0.0}
    assert reports["g"]["shares"] == {"paused": 1.0, "idle": 0.0, "generating": 0.0}
    for report in reports.values():
        assert report["rss_mib"] > 0 and report["lag_s"] >= 0 and report["errors_logged"] >= 0
    exported = generate_latest(verifier.prometheus.registry) + generate_latest(
        generator.prometheus.registry
    )
    assert b'dapo_time_seconds_total{member="v",role="verifier",state="idle"}' in exported
    assert b'dapo_time_seconds_total{member="g",role="generator",state="paused"}' in exported


async def test_groups_that_are_judged_are_progress_also_before_the_first_batch(
    stage: Stage,
) -> None:
    seen = []
    for judged in (0, 5, 5):
        stage.seconds += 200.0
        stage.dispatcher.judged = judged
        seen.append((await stage.page())["since_progress_s"])
    assert seen[1] < 1 and seen[0] > 199 and seen[2] > 199
