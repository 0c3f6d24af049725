"""Checkers of users that hang, eat memory, crash or raise: groups fail, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from common.broker import Broker
from common.config import Config
from common.data import Row
from common.ledger import read_lines
from common.messages import Prompt, Rollout, Verdict, Version, decode, encode
from common.order import Shuffled, base_ordinal, recycled
from common.server import EmbeddedServer
from learner import dispatcher as dispatcher_module
from tests.conftest import MakeConfig
from tests.integration import pretend
from tests.integration.pretend import World, rows
from tests.unit.records import a_sample
from verifier import registry
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker

CHECKERS = """
import os, signal, time

def never_returns(response, gold, **options):
    while True:
        time.sleep(60)

def allocates(response, gold, **options):
    held = []
    while True:
        held.append(bytes(1 << 24))  # pages that are never touched: at the limit at once

def dies(response, gold, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def raises(response, gold, **options):
    raise RuntimeError("no luck")

def sound(response, gold, **options):
    return response.endswith(gold)
"""
REASONS = {
    "never_returns": "error:timeout",
    "allocates": "error:MemoryError:",
    "dies": "error:died with exit code -9",
    "raises": "error:RuntimeError: no luck",
}
PLACES = dict(zip((1, 3, 4, 6), REASONS, strict=True))
"""Ordinals whose problems name a failing checker."""
ROWS = 400  # more than are dispatched, so that every problem comes once
ATTEMPTS = 3
WORKERS = 2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "PUMP_S", 0.005)
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.05)
    monkeypatch.setattr(pretend, "DEADLINE_S", 40.0)  # a batch may wait for failing groups


@pytest.fixture
def checkers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with checkers; spawned workers inherit the search path."""
    (tmp_path / "failing_checkers.py").write_text(CHECKERS)
    info = tmp_path / "failing_checkers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: failing-checkers\nVersion: 1.0\n")
    lines = [f"{name} = failing_checkers:{name}" for name in (*REASONS, "sound")]
    (info / "entry_points.txt").write_text("\n".join(["[dapo.checkers]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.get.cache_clear()
    yield
    registry.get.cache_clear()


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(
        algorithm={"group_size": 2},
        admission={"max_staleness": 1, "attempts": ATTEMPTS, "recycles": 1},
    )


@pytest.fixture
async def second(server: EmbeddedServer, run_name: str) -> AsyncIterator[Broker]:
    """The verifier's own connection."""
    connected = await Broker.connect(server.url, run_name, lease_s=1.0)
    yield connected
    await connected.close()


@pytest.fixture
async def third(server: EmbeddedServer, run_name: str) -> AsyncIterator[Broker]:
    """The connection of another verifier."""
    connected = await Broker.connect(server.url, run_name, lease_s=1.0)
    yield connected
    await connected.close()


def problems(config: Config, places: dict[int, str] = PLACES) -> list[Row]:
    """Failing checkers at `places`, else "math"; every third gold is one that nobody answers."""
    data, order = rows(ROWS), Shuffled(ROWS, config.run.seed)
    for ordinal in range(ROWS):
        index = order.row(ordinal)
        gold = "5" if ordinal % 3 == 2 else "4"
        checker = places.get(ordinal, "math")
        data[index] = replace(data[index], gold=gold, checker=checker)
    return data


class Answering(World):
    """Generators whose responses claim an answer: the first one 3, the second one 4."""

    def __init__(self, config: Config, broker: Broker, data: list[Row]) -> None:
        super().__init__(config, broker, data)
        self.prompts: list[Prompt] = []

    async def generate(
        self, entry: str, prompt: Prompt, name: str, version: str, fails: bool = False
    ) -> bool:
        self.prompts.append(prompt)
        for index in range(prompt.samples):
            sample = replace(a_sample(3, Version.parse(version)), text=f"Answer: {3 + index}")
            await self.broker.put_sample(prompt.group, prompt.attempt, index, encode(sample))
        rollout = encode(Rollout(prompt.group, prompt.ordinal, prompt.attempt, name, ""))
        step = ("dispatched", "generated")
        return await self.broker.advance(entry, name, prompt.group, prompt.attempt, step, rollout)


class Recording(VerifierWorker):
    """The verifier, whose verdicts are kept in the order in which they were handed on."""

    def __init__(self, config: Config, broker: Broker, pool: CheckerPool, name: str = "v") -> None:
        super().__init__(config, broker, pool, name)
        self.verdicts: list[Verdict] = []
        advance = broker.advance

        async def watched(
            entry: str, consumer: str, group: str, attempt: int, step: tuple[str, str], data: bytes
        ) -> bool:
            done = await advance(entry, consumer, group, attempt, step, data)
            if done:
                self.verdicts.append(decode(Verdict, data))
            return done

        broker.advance = watched  # type: ignore[method-assign, assignment]


def processes() -> dict[int, str]:
    """Children of this process and their states, without multiprocessing's own helper."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            zombie = child.status() == psutil.STATUS_ZOMBIE
            if zombie or "resource_tracker" not in " ".join(child.cmdline()):
                found[child.pid] = child.status()
    return found


async def settled(true: Callable[[], bool]) -> None:
    """Wait for what the end of a process brings about; a condition that stays false is shown."""
    for _ in range(100):
        if true():
            return
        await asyncio.sleep(0.05)
    raise AssertionError(processes())


def of_failing(verdicts: list[Verdict], ordinal: int) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.ordinal == ordinal]


async def test_groups_of_failing_checkers_fail_with_the_reason_and_all_others_are_judged(
    checkers: None, config: Config, broker: Broker, second: Broker
) -> None:
    before = processes()
    w = Answering(config, broker, problems(config))
    async with CheckerPool(WORKERS, deadline_s=1.0, memory_mib=512, warm=()) as pool:
        worker = Recording(config, second, pool)
        try:
            await w.start()
            judging = w.spawn(worker.run())
            w.generators()
            children = {recycled(ordinal) for ordinal in PLACES}
            while not children <= w.ledger.fates.keys():
                await w.train(1)
            worker.drain()
            await judging
            w.check()

            # the pool answers, with as many workers as it should have
            verdict = await pool.check("sound", "Answer: 4", "4")
            assert verdict.outcome == "correct"
            await settled(lambda: len(processes().keys() - before.keys()) <= WORKERS)
            await settled(lambda: psutil.STATUS_ZOMBIE not in processes().values())
            await w.fold()
            await w.dispatcher.end()
            assert (await w.audit()).balanced
        finally:
            await w.crash()
    await settled(lambda: not processes().keys() - before.keys())

    fates = {line.ordinal: line for line in read_lines(w.ledger.path)}
    for ordinal, checker in PLACES.items():
        reason = REASONS[checker]
        for failing in (ordinal, recycled(ordinal)):
            said = of_failing(worker.verdicts, failing)
            assert [(v.attempt, v.fate, v.reason) for v in said] == [
                (attempt, "failed", reason) for attempt in range(ATTEMPTS)
            ]
            assert {judged.outcome for v in said for judged in v.samples} == {"error"}
            line = fates[failing]
            assert (line.fate, line.attempt, line.reason) == ("failed", ATTEMPTS - 1, reason)
        first, again = (
            [p for p in w.prompts if p.ordinal == o] for o in (ordinal, recycled(ordinal))
        )
        assert [p.attempt for p in again] == [p.attempt for p in first] == list(range(ATTEMPTS))
        assert {(p.row, p.checker) for p in first + again} == {(first[0].row, checker)}
        assert recycled(recycled(ordinal)) not in {p.ordinal for p in w.prompts}

    golds = {prompt.ordinal: prompt.gold for prompt in w.prompts}
    rest = [v for v in worker.verdicts if base_ordinal(v.ordinal) not in PLACES]
    for v in rest:
        wanted = ("accepted", "mixed") if golds[v.ordinal] == "4" else ("filtered", "all_wrong")
        assert (v.attempt, v.fate, v.reason) == (0, *wanted)
    assert {v.fate for v in rest} == {"accepted", "filtered"}
    assert len({v.group for v in rest}) == len(rest)
    # they did not wait for the checkers that failed
    said_at = [v.reason for v in worker.verdicts].index(REASONS["never_returns"])
    assert sum(v in rest for v in worker.verdicts[:said_at]) >= 3
    by_fate = {
        fate: {ordinal for ordinal, line in fates.items() if line.fate == fate}
        for fate in ("failed", "filtered", "trained")
    }
    assert by_fate["failed"] == {*PLACES, *map(recycled, PLACES)}
    assert by_fate["filtered"] == {v.ordinal for v in rest if v.fate == "filtered"}
    assert by_fate["trained"] <= {v.ordinal for v in rest if v.fate == "accepted"}
    assert len(by_fate["trained"]) == len(w.batches) * config.algorithm.groups_per_batch


async def test_a_verifier_that_ends_during_a_check_leaves_its_groups_to_another_one(
    checkers: None, make_config: MakeConfig, broker: Broker, second: Broker, third: Broker
) -> None:
    config = make_config(algorithm={"group_size": 2}, verifier={"slow_deadline_s": 0.3})
    # the samples of one are being checked, those of the other wait for a worker
    never = {1: "never_returns", 3: "never_returns"}
    w = Answering(config, broker, problems(config, never))
    patient = CheckerPool(WORKERS, deadline_s=60.0, memory_mib=512, warm=())
    strict = CheckerPool(WORKERS, deadline_s=0.5, memory_mib=512, warm=())
    first, other = Recording(config, second, patient), Recording(config, third, strict, "w")
    try:
        await w.start()
        judging = w.spawn(first.run())
        w.generators()
        await w.until(lambda: len(first.verdicts) > 3 and len(first._held) == len(never))
        first.drain()
        await judging
        await patient.close()
        await asyncio.sleep(0.2)
        assert not [v for v in first.verdicts if v.ordinal in never]

        judging = w.spawn(other.run())
        await w.until(lambda: all(of_failing(other.verdicts, ordinal) for ordinal in never))
        for ordinal in never:
            said = of_failing(other.verdicts, ordinal)[0]
            assert (said.attempt, said.fate, said.reason) == (0, "failed", REASONS["never_returns"])
        other.drain()
        await judging
    finally:
        await w.crash()
        await patient.close()
        await strict.close()


async def test_checks_in_flight_and_waiting_become_errors_when_the_pool_is_closed(
    checkers: None,
) -> None:
    pool = CheckerPool(WORKERS, deadline_s=60.0, memory_mib=512, warm=())
    assert (await pool.check("sound", "Answer: 4", "4")).outcome == "correct"
    checks = [asyncio.create_task(pool.check("never_returns", "", "")) for _ in range(4)]
    await asyncio.sleep(0.5)
    await pool.close()
    async with asyncio.timeout(5):
        verdicts = await asyncio.gather(*checks)
    assert {verdict.outcome for verdict in verdicts} == {"error"}


async def test_the_other_workers_are_ended_when_one_that_died_between_checks_breaks_the_pool(
    checkers: None,
) -> None:
    before = processes().keys()
    async with CheckerPool(WORKERS, deadline_s=5.0, memory_mib=512, warm=()) as pool:
        for _ in range(2):
            checks = (pool.check("sound", "Answer: 4", "4") for _ in range(2 * WORKERS))
            assert {verdict.outcome for verdict in await asyncio.gather(*checks)} == {"correct"}
            os.kill(max(processes().keys() - before), signal.SIGKILL)
            await asyncio.sleep(0.5)
        assert (await pool.check("sound", "Answer: 4", "4")).outcome == "correct"
        await settled(lambda: len(processes().keys() - before) <= WORKERS)
    await settled(lambda: not processes().keys() - before)
