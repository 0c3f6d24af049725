"""The learner's conversation in weight rounds: who is waited for, who is left out, what is lost."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from common.broker import Broker
from common.config import Config
from common.errors import RoundError
from common.messages import Version
from common.rounds import Call, Publish, Reply
from learner.publisher import Publisher, probe_gap
from learner.timeline import Timeline
from tests.conftest import MakeConfig

OWN = np.array([-1.0, -2.0], dtype=np.float32)
MANIFEST = [("a.weight", (2, 3))]


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(publish={"ready_timeout_s": 5.0, "probe_tolerance": 0.1})


@pytest.fixture
def publisher(config: Config, broker: Broker) -> Publisher:
    config.run_dir.mkdir(parents=True)
    timeline = Timeline.open(config.run_dir)
    timeline.begin(0)
    return Publisher(config, broker, timeline, "127.0.0.1")


async def member(broker: Broker, name: str, *answers: Reply) -> None:
    """A generator that gives these answers to the next round, one for each message."""
    place, _ = await broker.hear("$", 0)
    async with broker.lease("generator", name, {}):
        for answer in answers:
            messages = []
            while not messages:
                place, messages = await broker.hear(place, 100)
            await broker.answer(messages[0].round, name, answer)  # type: ignore[union-attr]
        await asyncio.sleep(60)


async def joined(publisher: Publisher, count: int) -> None:
    async with asyncio.timeout(5):
        while len(await publisher.joiners()) < count:
            await asyncio.sleep(0.01)


async def round_of(publisher: Publisher, number: int) -> list[str]:
    """One round; the broadcast itself is left out."""
    version = Version(1, number)
    round_id, ready = await publisher.call(version)
    go = publisher.plan(round_id, version, ready, MANIFEST, 1234, [1, 2, 3])
    await publisher.say(go)
    members, _ = await publisher.collect(go, OWN, time.monotonic() + 3)
    await publisher.publish(round_id, version, members)
    return members


READY, DONE = Reply("ready"), Reply("done", probe=[-1.0, -2.0])


async def test_members_that_are_ready_and_agree_on_the_probe_are_published(
    publisher: Publisher, broker: Broker
) -> None:
    off = Reply("done", probe=[-1.0, -3.0])
    answers = {"a": (READY, DONE), "b": (READY, off), "c": (READY, Reply("failed", error="gloo"))}
    tasks = [asyncio.create_task(member(broker, name, *said)) for name, said in answers.items()]
    await joined(publisher, 3)
    assert await round_of(publisher, 1) == ["a"]
    assert publisher.members == {"a"}
    assert await publisher.joiners() == set()  # the others back off
    assert await broker.published() == "1.1"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_nobody_waits_for_a_member_that_dies_after_the_call(
    publisher: Publisher, broker: Broker
) -> None:
    alive = asyncio.create_task(member(broker, "alive", READY, DONE))
    dying = asyncio.create_task(member(broker, "dying"))
    await joined(publisher, 2)
    asyncio.get_running_loop().call_later(0.2, dying.cancel)
    since = time.monotonic()
    _, ready = await publisher.call(Version(1, 1))
    assert set(ready) == {"alive"}
    assert time.monotonic() - since < 3
    alive.cancel()
    await asyncio.gather(alive, dying, return_exceptions=True)


PEER = Reply("failed", error="RoundError: weight broadcast failed: Connection closed by peer")


@pytest.mark.parametrize(
    ("answers", "again"),
    [
        ({"a": PEER, "b": PEER, "bad": Reply("failed", error="no memory")}, {"a", "b"}),
        ({"a": PEER, "b": PEER}, set()),
        ({"a": DONE, "b": PEER}, set()),
    ],
)
async def test_who_fails_with_others_is_served_again_at_once_and_who_made_them_fail_backs_off(
    publisher: Publisher, broker: Broker, answers: dict[str, Reply], again: set[str]
) -> None:
    tasks = [asyncio.create_task(member(broker, name, READY, a)) for name, a in answers.items()]
    await joined(publisher, len(answers))
    done = {name for name, answer in answers.items() if answer is DONE}
    assert set(await round_of(publisher, 1)) == done
    assert await publisher.joiners() == again
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_round_is_given_up_when_a_member_dies_before_the_group_is_formed(
    publisher: Publisher, broker: Broker
) -> None:
    alive = asyncio.create_task(member(broker, "alive", READY, PEER))
    dying = asyncio.create_task(member(broker, "dying", READY))
    await joined(publisher, 2)
    round_id, ready = await publisher.call(Version(1, 1))
    go = publisher.plan(round_id, Version(1, 1), ready, MANIFEST, 1234, [1, 2, 3])
    await publisher.say(go)
    await publisher.require_living(go)
    dying.cancel()
    with pytest.raises(RoundError, match="did not form: dying died meanwhile"):
        async with asyncio.timeout(10):
            while True:
                await publisher.require_living(go)
                await asyncio.sleep(0.01)
    assert await publisher.collect(go, OWN, time.monotonic() + 5) == ([], 0.0)
    assert await publisher.joiners() == {"alive"}
    alive.cancel()
    await asyncio.gather(alive, dying, return_exceptions=True)


async def test_answers_that_an_emptied_server_has_lost_leave_members_out_and_raise_nothing(
    publisher: Publisher, broker: Broker
) -> None:
    task = asyncio.create_task(member(broker, "a", READY))
    await joined(publisher, 1)
    round_id, ready = await publisher.call(Version(1, 1))
    go = publisher.plan(round_id, Version(1, 1), ready, MANIFEST, 1234, [1, 2, 3])
    await broker.client.unlink(broker.key("round", round_id))
    assert (await publisher.collect(go, OWN, time.monotonic() + 0.2))[0] == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_server_that_lost_the_published_version_makes_every_member_a_joiner(
    publisher: Publisher, broker: Broker
) -> None:
    task = asyncio.create_task(member(broker, "a", READY, DONE))
    await joined(publisher, 1)
    assert await round_of(publisher, 1) == ["a"]
    assert await publisher.joiners() == set()
    await broker.client.unlink(broker.key("published"))
    assert await publisher.joiners() == {"a"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_group_is_formed_anew_when_the_members_change_and_only_then(
    publisher: Publisher,
) -> None:
    one, two = {"a": READY}, {"a": READY, "b": Reply("ready", workers=2)}
    plans = [
        publisher.plan(f"r{n}", Version(1, n), ready, MANIFEST, 1, [1, 2])
        for n, ready in enumerate((one, one, two, two, one))
    ]
    assert [plan.fresh for plan in plans] == [True, False, True, False, True]
    assert plans[2].ranks == {"a": 1, "b": 2}
    assert [plan.world for plan in plans] == [2, 2, 4, 4, 2]
    publisher.broken()
    assert publisher.plan("r9", Version(1, 9), one, MANIFEST, 1, [1, 2]).fresh


async def test_the_order_on_the_control_stream_is_call_go_publish(
    publisher: Publisher, broker: Broker
) -> None:
    place, _ = await broker.hear("$", 0)
    task = asyncio.create_task(member(broker, "a", READY, DONE))
    await joined(publisher, 1)
    await round_of(publisher, 3)
    _, said = await broker.hear(place, 100)
    assert [message.OP for message in said] == ["call", "go", "publish"]
    assert said[0] == Call("1.1", "1.3")
    assert said[2] == Publish("1.1", "1.3", ["a"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("probe", [[], [-1.0], [-1.0, float("nan")], [-1.0, float("inf")]])
def test_a_probe_that_does_not_fit_is_infinitely_far_off(probe: list[float]) -> None:
    assert probe_gap(Reply("done", probe=probe), OWN) == float("inf")
