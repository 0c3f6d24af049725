"""Hostile messages on every way into the roles: nobody dies of them, and the run goes on.

DAPO_FUZZ sets their number: 5,000 by default, 100,000 for the whole exercise (minutes).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from common.broker import Broker
from common.config import Config
from common.entry import PROMPTS, ROLLOUTS, VERDICTS
from common.errors import BrokerError
from common.messages import Prompt, Rollout, Sample, Verdict, Version, decode, encode
from common.rounds import Call
from common.server import EmbeddedServer
from learner import dispatcher as dispatcher_module
from tests.conftest import MakeConfig
from tests.integration import pipeline as pipeline_module
from tests.integration.hostile import NAMES, Hostile, readable
from tests.integration.pipeline import Pipeline, pipeline, simulated
from tests.integration.pretend import say, world
from tests.integration.test_generator_worker import dispatch
from tests.unit.records import a_judgement, a_prompt, a_sample, a_verdict
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker

COUNT = int(os.environ.get("DAPO_FUZZ", "5000"))
SEED = int(os.environ.get("DAPO_FUZZ_SEED", "0"))
CHUNK = 50
DEPTH = 100
"""Entries that may wait in a stream before more are sent."""
KINDS: dict[str, type[Any]] = {PROMPTS: Prompt, ROLLOUTS: Rollout, VERDICTS: Verdict}
SHARES = {PROMPTS: 5, ROLLOUTS: 5, VERDICTS: 5, "control": 2, "reply": 1, "sample": 1, "member": 1}
"""How the messages are spread over the ways in."""


class Attacker:
    """Writes past every rule, on a connection of its own."""

    def __init__(self, p: Pipeline, client: Any) -> None:
        self.p, self.client, self.key = p, client, p.broker.key
        self.limit = p.config.max_message_bytes
        self.hostile = Hostile(SEED, self.limit)
        self.sent: Counter[str] = Counter()
        self.unreadable: Counter[str] = Counter()

    async def attack(self, count: int) -> None:
        ways, weights = zip(*SHARES.items(), strict=True)
        while (left := count - self.sent.total()) > 0:
            pipe = self.client.pipeline(transaction=False)
            for way in self.hostile.dice.choices(ways, weights, k=min(CHUNK, left)):
                self.sent[way] += 1
                self._send(pipe, way)
            await pipe.execute()
            self.p.check()
            while max((await self.p.dispatcher.streams.depths()).values()) > DEPTH:
                self.p.check()
                await asyncio.sleep(0.01)

    def _send(self, pipe: Any, way: str) -> None:
        dice, key = self.hostile.dice, self.key
        if way in KINDS:
            fields = self.hostile.fields(KINDS[way])
            self.unreadable[way] += not readable(KINDS[way], fields.get(b"r", b""), self.limit)
            pipe.xadd(key(way), fields)
        elif way == "control":
            pipe.xadd(key("control"), {"r": self.hostile.said()}, maxlen=200)
        elif way == "reply":
            name = dice.choice([b"stranger", b"\xff\xfe", b"", b"*"])
            pipe.hset(key("round", f"1.{dice.randrange(9)}"), name, self.hostile.said())
        elif way == "sample":
            place = (dice.choice(sorted(self.p.dispatcher.open) or [0]), 0, dice.randrange(4))
            pipe.set(key("sample", *place), self.hostile.record(Sample))
        else:
            data = dice.choice([b"", b"{", b"3", b"null", b'{"role": 3}', b"\xff", b'{"a": []}'])
            pipe.hset(key("status"), dice.choice(NAMES), data)
            pipe.set(key("lease", dice.randbytes(4).hex()), data, px=500)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.2)
    monkeypatch.setattr(pipeline_module, "PATIENCE_S", 240.0)  # a batch waits for the attack


@pytest.mark.timeout(3600 if COUNT > 5000 else 300)
async def test_nobody_dies_of_hostile_messages_and_every_unreadable_entry_is_a_dead_letter(
    make_config: MakeConfig, server: EmbeddedServer, run_name: str
) -> None:
    config = simulated(
        make_config,
        generator={"max_samples": 512},
        redis={"max_message_mib": 0.004, "lease_s": 3.0},
        admission={"attempts": 20},
    )
    async with pipeline(config, run_name, server.url) as p:
        with capture_logs() as logs:
            await p.train(1)
            attacker = Attacker(p, (await p.connect("learner")).client)
            attack = p.spawn(attacker.attack(COUNT))
            while not attack.done():
                await p.train(1)
            await p.train(2)
        # what is left of the attack in places that the run does not look at any more
        async for key in p.broker.client.scan_iter(p.broker.key("sample", "*"), count=1000):
            await p.broker.client.unlink(key)
        await p.finish()
        result = await p.audit()
        dead = await p.broker.client.xinfo_stream(p.broker.key("dead"))
        letters: Any = await p.broker.client.xrange(p.broker.key("dead"))

    assert attacker.sent.total() == COUNT and set(attacker.sent) == set(SHARES)
    buried = Counter(row["stream"] for row in logs if row["event"] == "dead letter")
    for stream in KINDS:
        assert attacker.unreadable[stream] <= buried[stream] <= attacker.sent[stream]
    assert dead["entries-added"] == buried.total()
    assert all(fields[b"reason"] and fields[b"stream"] for _, fields in letters)
    assert result.trained == 4 * len(p.batches) >= 16
    print(f"\n{COUNT:,} hostile messages: {dict(attacker.sent)}; {buried.total():,} dead letters "
          f"{dict(buried)}; meanwhile {len(p.batches)} batches; {result}")  # fmt: skip


# --- what it has found, one by one ----------------------------------------------------------------


async def entries(broker: Broker, stream: str, count: int) -> list[dict[bytes, bytes]]:
    async with asyncio.timeout(10):
        while await broker.client.xlen(broker.key(stream)) < count:
            await asyncio.sleep(0.01)
    found: Any = await broker.client.xrange(broker.key(stream))
    return [fields for _, fields in found]


async def generated(broker: Broker, ordinal: int) -> None:
    """A group of four samples that a generator has handed on."""
    await broker.publish(1, "1.0")
    await dispatch(broker, ordinal)
    [entry] = await broker.claim_prompts("1.0", "g", 1)
    for index in range(4):
        await broker.put_sample(str(ordinal), 0, index, encode(a_sample()))
    rollout = encode(Rollout(str(ordinal), ordinal, 0, "g", ""))
    await broker.advance(entry.id, "g", str(ordinal), 0, ("dispatched", "generated"), rollout)


@contextlib.asynccontextmanager
async def judging(config: Config, broker: Broker) -> AsyncIterator[VerifierWorker]:
    async with CheckerPool(1, warm=()) as pool:
        worker = VerifierWorker(config, broker, pool, "v")
        task = asyncio.create_task(worker.run())
        yield worker
        worker.drain()
        await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("damage", [b"", b"\xc1", encode(a_sample(33))], ids=["", "no", "long"])
async def test_a_damaged_payload_fails_its_group_and_is_not_kept_for_the_next_attempt(
    make_config: MakeConfig, broker: Broker, damage: bytes
) -> None:
    await generated(broker, 7)
    await broker.client.set(broker.key("sample", 7, 0, 2), damage)
    async with judging(make_config(), broker):
        [fields] = await entries(broker, VERDICTS, 1)
    verdict = decode(Verdict, fields[b"r"])
    assert verdict.fate == "failed" and "payload of sample 2 is damaged" in verdict.reason
    assert await broker.have_samples("7", 0, 4) == [True, True, False, True]


async def test_a_prompt_that_asks_for_weights_that_never_come_goes_once_its_group_has_moved_on(
    make_config: MakeConfig, server: EmbeddedServer, run_name: str
) -> None:
    async with pipeline(simulated(make_config), run_name, server.url) as p:
        await p.train(1)
        broker = p.broker
        lost = replace(a_prompt(99), least=Version(9, 9))
        await broker.client.xadd(broker.key(PROMPTS), {"r": encode(lost), "g": "99"})
        await p.train(1)
        await p.finish()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"samples": [a_judgement()] * 3}, "3 samples in a group of 4"),
        ({"samples": []}, "0 samples in a group of 4"),
        ({"samples": [a_judgement(version=Version(1, 10**9))] * 4}, "the newest one is 1.0"),
        ({"samples": [a_judgement(version=Version(7, 0))] * 4}, "the newest one is 1.0"),
    ],
)
async def test_a_verdict_that_no_verifier_gives_is_a_dead_letter(
    make_config: MakeConfig, broker: Broker, change: dict[str, Any], why: str
) -> None:
    async with world(make_config(), broker) as w:
        await w.until(lambda: w.dispatcher.open)
        await say(broker, [replace(a_verdict(0), **change)])
        [letter] = await entries(broker, "dead", 1)
        assert why in letter[b"reason"].decode()
        assert w.dispatcher.open[0].verdict is None


async def test_an_entry_with_thousands_of_fields_can_be_buried_and_given_back(
    broker: Broker,
) -> None:
    many = {f"f{number}": "" for number in range(9000)}
    await broker.publish(1, "1.0")
    for _ in range(2):
        await broker.client.xadd(broker.key(PROMPTS), {"reason": "", "r": "x", "g": "7", **many})
    first, second = await broker.claim_prompts("1.0", "g", 2)
    await broker.bury(PROMPTS, first, "no msgpack")
    [letter] = await entries(broker, "dead", 1)
    assert letter == {b"stream": b"prompts", b"reason": b"no msgpack", b"r": b"x", b"g": b"7"}
    assert await broker.release(PROMPTS, second.id, "g")
    assert await entries(broker, PROMPTS, 1) == [{b"r": b"x", b"g": b"7"}]


async def test_leases_reports_and_messages_that_cannot_be_read_are_passed_over(
    broker: Broker,
) -> None:
    for number, data in enumerate([b"{", b"3", b"\xff", b'{"role": 3}']):
        await broker.client.set(broker.key("lease", number), data)
        await broker.client.hset(broker.key("status"), str(number), data)
        await broker.client.xadd(broker.key("control"), {"r": data})
    await broker.client.rpush(broker.key("lease", "list"), "x")
    await broker.client.hset(broker.key("status"), b"\xff", b"{}")
    await broker.say(Call("r", "1.0"))
    async with broker.lease("generator", "g", {}):
        assert list(await broker.members("generator")) == ["g"]
    assert await broker.reports() == {"3": {"role": 3}, "\ufffd": {}}
    _, heard = await broker.hear("0-0", 1)
    assert heard == [Call("r", "1.0")]


async def test_a_verifier_whose_reports_fail_ends_with_their_error(
    make_config: MakeConfig, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse() -> None:
        raise BrokerError("forbidden")

    monkeypatch.setattr(broker, "ended", refuse)
    with pytest.raises(BrokerError, match="forbidden"):
        async with asyncio.timeout(10), CheckerPool(1, warm=()) as pool:
            await VerifierWorker(make_config(), broker, pool, "v").run()
