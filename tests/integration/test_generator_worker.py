"""The generator's loop on a real server, with an engine that only pretends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from common.broker import Broker
from common.config import Config
from common.entry import PROMPTS, ROLLOUTS
from common.errors import RoundError
from common.messages import Prompt, Rollout, Version, decode, encode
from common.rounds import Call, Go, Publish, Reply
from generator.engine import GenerationError
from generator.worker import GeneratorWorker
from tests.conftest import MakeConfig
from tests.unit.records import a_prompt, a_sample


class PretendEngine:
    """Generates when `gate` is open; `fails` counts the failures still to come."""

    on_cpu = True

    def __init__(self) -> None:
        self.version = Version(1, 0)
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = 0
        self.asked: list[tuple[str, int]] = []
        self._running: set[asyncio.Future[None]] = set()

    async def generate(self, prompt: Prompt, index: int, salt: str, on_tokens: Any) -> Any:
        self.asked.append((prompt.group, index))
        if self.fails:
            self.fails -= 1
            raise GenerationError("no memory")
        abort = asyncio.get_running_loop().create_future()
        self._running.add(abort)
        waiting = asyncio.ensure_future(self.gate.wait())
        await asyncio.wait([abort, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        self._running.discard(abort)
        if abort.done():
            raise GenerationError("aborted")
        on_tokens(3)
        return a_sample(3, self.version)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update(self, init: Any, update: Any, version: Version) -> None:
        self.version = version

    async def probe(self, token_ids: Any) -> Any:
        return np.zeros(len(token_ids) - 1, dtype=np.float32)

    async def abort_all(self) -> None:
        for abort in list(self._running):
            if not abort.done():
                abort.set_result(None)


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(generator={"max_samples": 8, "drain_s": 1.0})


@pytest.fixture
def engine() -> PretendEngine:
    return PretendEngine()


@pytest.fixture
async def worker(
    config: Config, broker: Broker, engine: PretendEngine
) -> AsyncIterator[GeneratorWorker]:
    made = GeneratorWorker(config, broker, engine, "g")  # type: ignore[arg-type]
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(5):
        while not await broker.members("generator"):
            await asyncio.sleep(0.01)
    yield made
    made._stop.set()
    async with asyncio.timeout(5):
        await task


def go(name: str, version: str, *members: str) -> Go:
    ranks = {member: rank for rank, member in enumerate(members, 1)}
    return Go(name, version, "p", True, "h", 1, "gloo", 2, ranks, [], "float32", 1, 5.0, [1, 2, 3])


async def serve(broker: Broker, version: str, *members: str) -> None:
    """One weight round of these members."""
    name = f"r{version}"
    broker.fence = 1  # as after a learner's first publication
    await broker.say(Call(name, version))
    async with asyncio.timeout(5):
        while "g" not in await broker.answers(name):
            await asyncio.sleep(0.01)
        await broker.say(go(name, version, *members))
        while "g" in members and (await broker.answers(name))["g"].status != "done":
            await asyncio.sleep(0.01)
    await broker.publish(1, version)
    await broker.say(Publish(name, version, list(members)))


async def dispatch(broker: Broker, ordinal: int, attempt: int = 0, least: int = 0) -> None:
    key, group = broker.key, str(ordinal)
    keys = [key("fence"), key("open"), key("group", group), key(PROMPTS)]
    prompt = a_prompt(ordinal, attempt, 4, least)
    args = [1, group, attempt, str(prompt.least), encode(prompt), 4, key("sample", group, "")]
    await broker.script("dispatch", keys, args)


async def rollouts(broker: Broker, count: int) -> list[Rollout]:
    async with asyncio.timeout(5):
        while await broker.client.xlen(broker.key(ROLLOUTS)) < count:
            await asyncio.sleep(0.01)
    entries: Any = await broker.client.xrange(broker.key(ROLLOUTS))
    return [decode(Rollout, fields[b"r"]) for _, fields in entries]


async def test_a_joiner_claims_nothing_until_it_was_served_and_then_works(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    await broker.publish(1, "1.0")
    await dispatch(broker, 1)
    await asyncio.sleep(0.1)
    assert engine.asked == []
    await serve(broker, "1.0", "g")
    [rollout] = await rollouts(broker, 1)
    assert (rollout.group, rollout.failure, rollout.generator) == ("1", "", "g")
    assert None not in await broker.get_samples("1", 0, 4)


async def test_a_sample_that_fails_is_tried_again_and_only_it(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    engine.fails = 2
    await serve(broker, "1.0", "g")
    await dispatch(broker, 1)
    [rollout] = await rollouts(broker, 1)
    assert rollout.failure == ""
    assert len(engine.asked) == 6


async def test_a_group_whose_sample_keeps_failing_is_handed_on_with_the_reason(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    engine.fails = 100
    await serve(broker, "1.0", "g")
    await dispatch(broker, 1)
    [rollout] = await rollouts(broker, 1)
    assert rollout.failure == "no memory"
    assert len(engine.asked) == 4 * 3


async def test_only_missing_samples_of_a_later_attempt_are_made(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    await dispatch(broker, 1)
    await broker.put_sample("1", 0, 2, encode(a_sample()))
    await dispatch(broker, 1, attempt=1)
    await serve(broker, "1.0", "g")
    [rollout] = await rollouts(broker, 1)
    assert rollout.attempt == 1
    # nothing was made for the first attempt, whose prompt was still in the stream
    assert engine.asked == [("1", 0), ("1", 1), ("1", 3)]
    await asyncio.sleep(0.05)
    assert await broker.client.xlen(broker.key(PROMPTS)) == 0


async def test_who_is_left_out_gives_its_claims_back_and_claims_nothing(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    await serve(broker, "1.0", "g")
    engine.gate.clear()
    await dispatch(broker, 1)
    async with asyncio.timeout(5):
        while not worker.claims:
            await asyncio.sleep(0.01)
        await serve(broker, "1.1")
        while worker.claims or await broker.unclaimed() != {"1"}:
            await asyncio.sleep(0.01)
    engine.gate.set()
    await asyncio.sleep(0.1)
    assert await broker.unclaimed() == {"1"}
    await serve(broker, "1.2", "g")
    await rollouts(broker, 1)


async def test_a_claim_that_is_taken_over_and_read_again_at_once_is_made_once(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    await broker.publish(1, "1.0")
    await dispatch(broker, 1)
    assert await broker.claim_prompts("1.0", "dead", 1)
    broker.disconnects += 1  # so that what is held is read again, after it was taken over
    worker.rounds._reclaim_at = 0.0
    await serve(broker, "1.0", "g")
    await rollouts(broker, 1)
    await asyncio.sleep(0.05)
    assert not worker._stop.is_set(), worker._failure
    assert len(engine.asked) == 4


async def test_a_claim_that_comes_back_while_it_is_held_is_handed_on_all_the_same(
    worker: GeneratorWorker, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for longer than its lease, and who took its claim over died at once."""
    advance = broker.advance
    stolen: list[Any] = []

    async def late(*args: Any) -> bool:
        """The claim is another's when it is to be handed on, and this one's again just after."""
        if not stolen:
            await broker.client.delete(broker.key("lease", "g"))
            stolen.extend(await broker.reclaim(PROMPTS, "heir", 1))
            assert not await advance(*args)
            [again] = await broker.reclaim(PROMPTS, "g", 1)
            worker._again[again.id] = again
            return False
        return await advance(*args)

    monkeypatch.setattr(broker, "advance", late)
    await dispatch(broker, 1)
    await serve(broker, "1.0", "g")
    [rollout] = await rollouts(broker, 1)
    assert (len(stolen), rollout.group) == (1, "1")


async def test_samples_that_end_with_a_failed_round_cost_their_group_no_attempt(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve(broker, "1.0", "g")
    engine.gate.clear()
    await dispatch(broker, 1)
    async with asyncio.timeout(5):
        while not worker.in_flight or len(engine.asked) < 4:
            await asyncio.sleep(0.01)
    answer = broker.answer

    async def slow(round_id: str, member: str, reply: Reply) -> None:
        """The server is away just when the failure is to be told."""
        if reply.status == "failed":
            await asyncio.sleep(0.2)
        await answer(round_id, member, reply)

    async def update(init: Any, update: Any, version: Version) -> None:
        engine.fails = 100
        await engine.abort_all()
        raise RoundError("gloo")

    monkeypatch.setattr(broker, "answer", slow)
    monkeypatch.setattr(engine, "update", update)
    await broker.say(Call("r1.1", "1.1"))
    await broker.say(go("r1.1", "1.1", "g"))
    async with asyncio.timeout(5):
        while "g" not in (said := await broker.answers("r1.1")) or said["g"].status != "failed":
            await asyncio.sleep(0.01)
        while worker.claims:
            await asyncio.sleep(0.01)
    assert await broker.unclaimed() == {"1"}
    assert await broker.client.xlen(broker.key(ROLLOUTS)) == 0


async def test_a_claim_that_arrives_after_being_left_out_is_given_back(
    worker: GeneratorWorker, broker: Broker
) -> None:
    await serve(broker, "1.0", "g")
    await serve(broker, "1.1")
    async with asyncio.timeout(5):
        while not worker.rounds.excluded:
            await asyncio.sleep(0.01)
    await dispatch(broker, 1)
    [late] = await broker.claim_prompts("1.1", "g", 1)
    worker._accept(late)
    async with asyncio.timeout(5):
        while await broker.unclaimed() != {"1"}:
            await asyncio.sleep(0.01)
    assert worker.claims == {}


async def test_a_prompt_that_asks_for_newer_weights_is_given_back(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    await serve(broker, "1.0", "g")
    await dispatch(broker, 1, least=7)
    await asyncio.sleep(0.2)
    assert engine.asked == []
    assert await broker.client.xlen(broker.key(ROLLOUTS)) == 0


async def test_claims_of_a_dead_generator_are_taken_over(
    worker: GeneratorWorker, broker: Broker
) -> None:
    await serve(broker, "1.0", "other")
    await dispatch(broker, 1)
    assert len(await broker.claim_prompts("1.0", "dead", 5)) == 1
    await serve(broker, "1.1", "g")
    [rollout] = await rollouts(broker, 1)
    assert rollout.generator == "g"


async def test_draining_finishes_running_groups_and_still_takes_part_in_rounds(
    worker: GeneratorWorker, broker: Broker, engine: PretendEngine
) -> None:
    await serve(broker, "1.0", "g")
    engine.gate.clear()
    await dispatch(broker, 1)
    await dispatch(broker, 2)
    async with asyncio.timeout(5):
        while len(worker.claims) < 2:
            await asyncio.sleep(0.01)
    worker.drain()
    await serve(broker, "1.1", "g")
    engine.gate.set()
    await rollouts(broker, 2)


async def test_an_unreadable_prompt_goes_to_the_dead_letters_and_work_goes_on(
    worker: GeneratorWorker, broker: Broker
) -> None:
    await serve(broker, "1.0", "g")
    await broker.client.xadd(broker.key(PROMPTS), {"r": b"poison", "g": "9"})
    await dispatch(broker, 1)
    await rollouts(broker, 1)
    async with asyncio.timeout(5):
        while not await broker.client.xlen(broker.key("dead")):
            await asyncio.sleep(0.01)
