"""Dead letters: what cannot be worked on leaves the streams, and no group gets lost by it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from typer.testing import CliRunner

from common import dead
from common.broker import Broker, dead_letters_so_far
from common.cli import app
from common.config import Config
from common.entry import PROMPTS, ROLLOUTS, STREAMS, VERDICTS, Entry
from common.errors import ConfigError
from common.messages import Rollout, Verdict, decode, encode, is_deadly
from common.server import EmbeddedServer
from generator.worker import GeneratorWorker
from learner import dispatcher as dispatcher_module
from tests.conftest import MakeConfig
from tests.integration import pretend
from tests.integration.pretend import World, drawn, world
from tests.integration.test_generator_worker import PretendEngine, dispatch, rollouts, serve
from tests.unit.records import a_sample
from verifier import worker as verifier_module
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker

MOST = 3
VERSION = "1.0"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "PUMP_S", 0.005)
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.05)
    monkeypatch.setattr(verifier_module, "RETRY_S", 0.01)
    monkeypatch.setattr(pretend, "DEADLINE_S", 20.0)


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(redis={"max_deliveries": MOST}, generator={"max_samples": 8})


@pytest.fixture
async def verifier(config: Config, broker: Broker) -> AsyncIterator[VerifierWorker]:
    """A verifier at work on a connection of the run."""
    async with CheckerPool(1, warm=()) as pool:
        made = VerifierWorker(config, broker, pool, "v")
        task = asyncio.create_task(made.run())
        yield made
        made.drain()
        await asyncio.wait_for(task, 5)


async def letters(broker: Broker, count: int = 1) -> list[dict[bytes, bytes]]:
    async with asyncio.timeout(10):
        while await broker.client.xlen(broker.key("dead")) < count:
            await asyncio.sleep(0.01)
    found: Any = await broker.client.xrange(broker.key("dead"))
    return [fields for _, fields in found]


async def verdicts(broker: Broker, count: int = 1) -> list[Verdict]:
    async with asyncio.timeout(10):
        while await broker.client.xlen(broker.key(VERDICTS)) < count:
            await asyncio.sleep(0.01)
    entries: Any = await broker.client.xrange(broker.key(VERDICTS))
    return [decode(Verdict, fields[b"r"]) for _, fields in entries]


async def lengths(broker: Broker) -> list[int]:
    return [await broker.client.xlen(broker.key(stream)) for stream in STREAMS]


async def generated(broker: Broker, ordinal: int, record: bytes | None = None) -> None:
    """A group that a generator has handed on."""
    await broker.publish(1, VERSION)
    await dispatch(broker, ordinal)
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    for index in range(4):
        await broker.put_sample(str(ordinal), 0, index, encode(a_sample()))
    rollout = record or encode(Rollout(str(ordinal), ordinal, 0, "g", ""))
    step = ("dispatched", "generated")
    assert await broker.advance(entry.id, "g", str(ordinal), 0, step, rollout)


# --- burying ------------------------------------------------------------------------------------


async def test_the_group_of_a_dead_letter_fails_with_the_reason_in_the_same_step(
    broker: Broker,
) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, 7)
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    before = dead_letters_so_far()
    await broker.bury(PROMPTS, entry, "no msgpack")
    await broker.bury(PROMPTS, entry, "no msgpack")  # as after a lost reply
    assert dead_letters_so_far() == before + 1
    assert await lengths(broker) == [0, 1, 0]
    [rollout] = await rollouts(broker, 1)
    assert (rollout.group, rollout.ordinal, rollout.attempt) == ("7", 7, 0)
    assert rollout.failure == "dead letter: no msgpack"
    [letter] = await letters(broker)
    assert letter[b"r"] == entry.data and letter[b"attempt"] == b"0"


async def test_a_problem_of_an_evaluation_fails_under_its_own_number(broker: Broker) -> None:
    await broker.client.hset(
        broker.key("group", "ebefore-5"), mapping={"state": "dispatched", "attempt": 1}
    )
    await broker.client.xadd(broker.key(PROMPTS), {"r": b"x", "g": "ebefore-5"})
    await broker.publish(1, VERSION)
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    await broker.bury(PROMPTS, entry, "no msgpack")
    [rollout] = await rollouts(broker, 1)
    assert (rollout.ordinal, rollout.attempt) == (-6, 1)


async def test_a_group_that_has_moved_on_is_not_failed_by_an_old_letter(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, 7)
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    await broker.client.hset(broker.key("group", "7"), "state", "generated")
    await broker.bury(PROMPTS, entry, "no msgpack")
    assert await lengths(broker) == [0, 0, 0]
    assert len(await letters(broker)) == 1


async def test_an_entry_that_another_worker_has_by_now_is_not_buried(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, 7)
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    [taken] = await broker.reclaim(PROMPTS, "heir", 1)
    await broker.bury(PROMPTS, entry, "no msgpack")
    assert await lengths(broker) == [1, 0, 0]
    await broker.bury(PROMPTS, taken, "no msgpack")
    assert await lengths(broker) == [0, 1, 0]


async def test_a_record_that_is_too_long_is_not_kept_but_its_letter_is(broker: Broker) -> None:
    await broker.client.xadd(broker.key(ROLLOUTS), {"r": b"x" * (2**20 + 1), "g": "7"})
    [entry] = await broker.claim(ROLLOUTS, "v", 1, 10)
    await broker.bury(ROLLOUTS, entry, "above redis.max_message_mib")
    [letter] = await letters(broker)
    assert letter[b"r"] == b"" and letter[b"g"] == b"7"


# --- deliveries ---------------------------------------------------------------------------------


async def test_only_the_deaths_of_workers_count_as_deliveries(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, 7)
    [entry] = await broker.claim_prompts(VERSION, "g1", 1)
    assert entry.deliveries == 1
    for _ in range(3):
        broker.disconnects += 1  # what is held is read again after each
        [entry] = await broker.claim_prompts(VERSION, "g1", 1)
    assert (entry.deliveries, entry.group, entry.owner) == (1, "7", "g1")
    [entry] = await broker.reclaim(PROMPTS, "g2", 1)
    assert entry.deliveries == 2
    [entry] = await broker.reclaim(PROMPTS, "g3", 1)
    assert (entry.deliveries, entry.owner) == (3, "g3")


async def test_a_prompt_over_which_generators_die_is_not_claimed_for_ever(
    config: Config, broker: Broker
) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, 7)
    await broker.claim_prompts(VERSION, "g1", 1)
    for name in ("g2", "g3"):
        await broker.reclaim(PROMPTS, name, 1)
    engine = PretendEngine()
    worker = GeneratorWorker(config, broker, engine, "g")  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(5):
        while not await broker.members("generator"):
            await asyncio.sleep(0.01)
        await serve(broker, "1.1", "g")
    [rollout] = await rollouts(broker, 1)
    assert rollout.failure == "dead letter: deadly: the last 3 generators that had it died"
    assert is_deadly(rollout.failure)
    assert engine.asked == []
    worker._stop.set()
    await asyncio.wait_for(task, 5)


async def test_prompts_that_cannot_be_read_become_dead_letters_and_others_are_generated(
    config: Config, broker: Broker
) -> None:
    await dispatch(broker, 7)
    await broker.client.hset(
        broker.key("group", "8"), mapping={"state": "dispatched", "attempt": 0}
    )
    await broker.client.xadd(broker.key(PROMPTS), {"r": b"\xc1", "g": "8"})
    worker = GeneratorWorker(config, broker, PretendEngine(), "g")  # type: ignore[arg-type]
    task = asyncio.create_task(worker.run())
    async with asyncio.timeout(5):
        while not await broker.members("generator"):
            await asyncio.sleep(0.01)
        await serve(broker, VERSION, "g")
    failures = {rollout.group: rollout.failure for rollout in await rollouts(broker, 2)}
    assert failures.keys() == {"7", "8"} and failures["7"] == ""
    assert "no msgpack" in failures["8"]
    worker._stop.set()
    await asyncio.wait_for(task, 5)


# --- the verifier -------------------------------------------------------------------------------


async def test_rollouts_that_cannot_be_read_become_dead_letters(
    verifier: VerifierWorker, broker: Broker
) -> None:
    newer = encode(Rollout("7", 7, 0, "g", "")).replace(b"\x97\x01", b"\x97\x02", 1)
    await generated(broker, 7, newer)
    await generated(broker, 8)
    first, second = await verdicts(broker, 2)
    assert {first.group, second.group} == {"7", "8"}
    failed = first if first.group == "7" else second
    assert failed.fate == "failed" and "record of schema 2" in failed.reason


async def test_a_lasting_fault_of_the_verifier_costs_one_group_and_not_the_verifier(
    verifier: VerifierWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, tries = verifier._verdict, []

    async def faulty(rollout: Rollout) -> Verdict:
        if rollout.ordinal == 7:
            tries.append(rollout.ordinal)
            raise ZeroDivisionError("a fault of the verifier")
        return await judge(rollout)

    monkeypatch.setattr(verifier, "_verdict", faulty)
    await generated(broker, 7)
    await generated(broker, 8)
    found = {verdict.group: verdict for verdict in await verdicts(broker, 2)}
    assert found["8"].fate == "filtered"
    assert found["7"].fate == "failed"
    assert "after 3 deliveries: ZeroDivisionError: a fault of the verifier" in found["7"].reason
    assert len(tries) == MOST
    [letter] = await letters(broker)
    assert letter[b"g"] == b"7" and letter[b"stream"] == b"rollouts"


async def test_a_passing_fault_of_the_verifier_costs_nothing(
    verifier: VerifierWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, faults = verifier._verdict, [MemoryError("for a moment")]

    async def faulty(rollout: Rollout) -> Verdict:
        if faults:
            raise faults.pop()
        return await judge(rollout)

    monkeypatch.setattr(verifier, "_verdict", faulty)
    await generated(broker, 7)
    [verdict] = await verdicts(broker)
    assert verdict.fate == "filtered"
    assert await broker.client.xlen(broker.key("dead")) == 0


async def test_a_rollout_over_which_verifiers_died_is_not_judged_again(
    config: Config, broker: Broker
) -> None:
    await generated(broker, 7)
    await broker.claim(ROLLOUTS, "v1", 1, 10)
    for name in ("v2", "v3"):
        await broker.reclaim(ROLLOUTS, name, 1)
    async with CheckerPool(1, warm=()) as pool:
        worker = VerifierWorker(config, broker, pool, "v")
        task = asyncio.create_task(worker.run())
        [verdict] = await verdicts(broker)
        worker.drain()
        await asyncio.wait_for(task, 5)
    assert verdict.reason == "dead letter: deadly: the last 3 verifiers that had it died"


async def test_an_entry_that_comes_back_while_it_is_held_is_handed_on_all_the_same(
    config: Config, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for longer than its lease, and who took its entry over died at once."""
    await generated(broker, 7)
    async with CheckerPool(1, warm=()) as pool:
        worker = VerifierWorker(config, broker, pool, "v")
        judge, go, judging = worker._verdict, asyncio.Event(), []

        async def slow(rollout: Rollout) -> Verdict:
            judging.append(rollout)
            await go.wait()
            return await judge(rollout)

        monkeypatch.setattr(worker, "_verdict", slow)
        task = asyncio.create_task(worker.run())
        async with asyncio.timeout(5):
            while not judging:
                await asyncio.sleep(0.01)
        await broker.client.delete(broker.key("lease", "v"))
        [taken] = await broker.reclaim(ROLLOUTS, "heir", 1)
        advance, refused = broker.advance, asyncio.Event()

        async def late(*args: Any) -> bool:
            """Between the refusal and the end of the claim it is given to this worker again."""
            done = await advance(*args)
            if not refused.is_set():
                refused.set()
                assert not done
                worker._again[taken.id] = (await broker.reclaim(ROLLOUTS, "v", 1))[0]
            return done

        monkeypatch.setattr(broker, "advance", late)
        go.set()
        [verdict] = await verdicts(broker)
        assert verdict.fate == "filtered" and len(judging) == 2
        worker.drain()
        await asyncio.wait_for(task, 5)


# --- the whole way ------------------------------------------------------------------------------


async def test_groups_of_dead_letters_are_tried_again_and_every_group_has_one_fate(
    make_config: MakeConfig, broker: Broker
) -> None:
    """Verdicts that the learner cannot read: each group is tried again at once."""
    config = make_config(algorithm={"group_size": 2}, admission={"silence_s": 100})
    poisoned: set[str] = set()

    async with world(config, broker) as w:
        advance = broker.advance

        async def poison(
            entry: str, consumer: str, group: str, attempt: int, step: Any, record: bytes
        ) -> bool:
            if step[1] == "judged" and attempt == 0 and int(group) % 3 == 0:
                poisoned.add(group)
                record = b"\xc1" + record
            return await advance(entry, consumer, group, attempt, step, record)

        broker.advance = poison  # type: ignore[method-assign]
        w.generators().verifier(drawn(3, accept=0.6, fail=0.0))
        await w.train(4)
        await w.dispatcher.end()
        assert len(poisoned) > 2
        result = await w.audit()
        assert result.balanced and result.trained == 16
        assert await w.leftovers() == []
        attempts = {group.ordinal for group in await trained_later(w)}
        assert attempts & {int(group) for group in poisoned}, "none of them was trained"


async def trained_later(w: World) -> list[Any]:
    """Groups of batch files that were trained at a later attempt than the first."""
    stored = [group for version in w.files.versions() for group in w.files.load(version)]
    return [group for group in stored if group.attempt > 0]


# --- the command --------------------------------------------------------------------------------


async def buried(broker: Broker, ordinal: int) -> Entry:
    await dispatch(broker, ordinal)
    await broker.publish(1, VERSION)
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    await broker.bury(PROMPTS, entry, "no msgpack")
    return entry


async def test_the_command_lists_letters_and_puts_them_back(
    broker: Broker, server: EmbeddedServer
) -> None:
    entry = await buried(broker, 7)
    await broker.client.xadd(broker.key(PROMPTS), {"r": b"lonely"})
    [lonely] = await broker.claim_prompts(VERSION, "g", 1)
    await broker.bury(PROMPTS, lonely, "no group")

    def command(*words: str) -> Any:
        return CliRunner().invoke(app, ["dead", server.url, *words], catch_exceptions=False)

    said = json.loads((await asyncio.to_thread(command, "list", "--json")).stdout)
    mine = [item for item in said if item["run"] == broker.run]
    assert [item["reason"] for item in mine] == ["no msgpack", "no group"]
    assert (mine[0]["group"], mine[0]["attempt"], mine[0]["waiting"]) == ("7", "0", False)
    text = (await asyncio.to_thread(command, "list")).stdout
    assert "group 7 attempt 0" in text and "no msgpack" in text

    with pytest.raises(ConfigError, match="no dead letter has the id '1-1'"):
        await asyncio.to_thread(command, "requeue", "1-1")
    with pytest.raises(ConfigError, match="with ids or --all"):
        await asyncio.to_thread(command, "requeue")
    done = await asyncio.to_thread(command, "requeue", mine[0]["id"])
    assert done.stdout.strip() == "1 put back"
    [again] = await broker.claim_prompts(VERSION, "g", 1)
    assert (again.data, again.group) == (entry.data, "7")
    assert len(await letters(broker)) == 1


async def test_a_letter_whose_group_still_waits_is_told_from_others_and_can_be_saved(
    broker: Broker, server: EmbeddedServer
) -> None:
    """A group can be where its letter left it when the server was restored from a backup."""
    await buried(broker, 7)
    await broker.client.hset(broker.key("group", "7"), "state", "dispatched")
    with dead.DeadLetters.at(server.url) as found:
        [letter] = [item for item in found.read() if item.run == broker.run]
        assert letter.waiting
        found.requeue([letter.id])
    [entry] = await broker.claim_prompts(VERSION, "g", 1)
    record = encode(Rollout("7", 7, 0, "g", ""))
    assert await broker.advance(entry.id, "g", "7", 0, ("dispatched", "generated"), record)


async def test_a_letter_without_its_record_cannot_be_put_back(
    broker: Broker, server: EmbeddedServer
) -> None:
    await broker.client.xadd(broker.key("dead"), {"stream": "prompts", "reason": "long", "r": ""})
    with dead.DeadLetters.at(server.url) as found:
        [letter] = [item for item in found.read() if item.run == broker.run]
        with pytest.raises(ConfigError, match="too long to be kept"):
            found.requeue([letter.id])
