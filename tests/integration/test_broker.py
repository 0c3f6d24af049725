"""The broker's promises on a real server: who may change what, and what a crash leaves."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from common import calls
from common.broker import Broker
from common.entry import PROMPTS, ROLLOUTS, STREAMS, VERDICTS, Entry
from common.errors import BrokerError, FencedError
from common.messages import Rollout, encode
from common.rounds import Call, Publish, Reply
from common.server import EmbeddedServer, free_port

VERSION = "1.0"
SAMPLES = 3


@pytest.fixture
async def other(server: EmbeddedServer, run_name: str) -> AsyncIterator[Broker]:
    """A second process of the same run."""
    connected = await Broker.connect(server.url, run_name, lease_s=1.0)
    yield connected
    await connected.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill or fill."""
    embedded = EmbeddedServer(tmp_path / "a server", maxmemory_mib=16)
    embedded.start(free_port())
    yield embedded
    embedded.stop(0.0)


async def dispatch(broker: Broker, group: str, attempt: int = 0, fence: int = 1) -> bool:
    key = broker.key
    keys = [key("fence"), key("open"), key("group", group), key(PROMPTS)]
    record = f"prompt {group} {attempt}"
    args = [fence, group, attempt, VERSION, record, SAMPLES, key("sample", group, "")]
    return bool(await broker.script("dispatch", keys, args))


async def settle(broker: Broker, group: str, entry: str = "", fence: int = 1) -> None:
    key = broker.key
    keys = [key("fence"), key("open"), key("group", group), key(VERDICTS)]
    await broker.script("settle", keys, [fence, group, entry, SAMPLES, key("sample", group, "")])


async def claim(broker: Broker, consumer: str, count: int = 10) -> list[Entry]:
    return await broker.claim_prompts(VERSION, consumer, count)


async def generate(
    broker: Broker, entry: Entry, consumer: str, group: str, attempt: int = 0
) -> bool:
    for index in range(SAMPLES):
        await broker.put_sample(group, attempt, index, b"payload")
    record = encode(Rollout(group, int(group), attempt, consumer, ""))
    return await broker.advance(
        entry.id, consumer, group, attempt, ("dispatched", "generated"), record
    )


async def judge(broker: Broker, entry: Entry, consumer: str, group: str, attempt: int = 0) -> bool:
    step = ("generated", "judged")
    return await broker.advance(entry.id, consumer, group, attempt, step, b"verdict")


async def keys_of(broker: Broker, *parts: str) -> list[str]:
    found = [key async for key in broker.client.scan_iter(match=f"{{{broker.run}}}:*", count=1000)]
    names = [key.decode().split(":", 1)[1] for key in found]
    return sorted(name for name in names if name.startswith(parts))


async def lengths(broker: Broker) -> list[int]:
    return [await broker.client.xlen(broker.key(stream)) for stream in STREAMS]


async def pending(broker: Broker, stream: str) -> int:
    return int((await broker.client.xpending(broker.key(stream), "workers"))["pending"])


# --- dispatch and fencing -----------------------------------------------------------------------


async def test_dispatching_an_attempt_twice_puts_one_prompt_on_the_stream(broker: Broker) -> None:
    assert await dispatch(broker, "1")
    assert not await dispatch(broker, "1")
    assert await lengths(broker) == [1, 0, 0]


async def test_an_older_attempt_that_arrives_late_changes_nothing(broker: Broker) -> None:
    await dispatch(broker, "1", attempt=1)
    assert not await dispatch(broker, "1", attempt=0)
    assert await broker.client.hget(broker.key("group", "1"), "attempt") == b"1"


async def test_a_learner_that_was_replaced_can_neither_dispatch_nor_settle_nor_publish(
    broker: Broker, other: Broker
) -> None:
    await dispatch(broker, "1", fence=1)
    await other.publish(2, "2.0")
    for call in (dispatch(broker, "2"), settle(broker, "1"), broker.publish(1, "1.7")):
        with pytest.raises(FencedError, match="another learner has taken over"):
            await call
    assert await keys_of(broker, "group") == ["group:1"]
    assert await broker.published() == "2.0"
    assert await dispatch(other, "2", fence=2)


# --- a group's way ------------------------------------------------------------------------------


async def test_a_group_goes_from_prompt_to_rollout_to_verdict_and_each_entry_is_acknowledged(
    broker: Broker,
) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    [prompt] = await claim(broker, "g")
    assert prompt.data == b"prompt 1 0"
    assert await generate(broker, prompt, "g", "1")
    assert await lengths(broker) == [0, 1, 0]
    [rollout] = await broker.claim(ROLLOUTS, "v", 10, 100)
    assert await judge(broker, rollout, "v", "1")
    assert await lengths(broker) == [0, 0, 1]
    assert await broker.client.hget(broker.key("group", "1"), "verdict") == b"verdict"
    [verdict] = await broker.claim(VERDICTS, "learner", 10, 100)
    assert verdict.data == b"verdict"
    await settle(broker, "1", verdict.id)
    assert await lengths(broker) == [0, 0, 0]
    assert [await pending(broker, stream) for stream in STREAMS] == [0, 0, 0]
    assert await keys_of(broker, "group", "sample", "open") == []


async def test_a_result_handed_on_twice_counts_once(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    [entry] = await claim(broker, "g")
    assert await generate(broker, entry, "g", "1")
    assert not await generate(broker, entry, "g", "1")
    assert await lengths(broker) == [0, 1, 0]


async def test_a_late_result_of_an_older_attempt_is_rejected_and_its_entry_forgotten(
    broker: Broker,
) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1", attempt=0)
    [late] = await claim(broker, "presumed-dead")
    await dispatch(broker, "1", attempt=1)
    assert not await broker.put_sample("1", 0, 0, b"late")
    assert not await generate(broker, late, "presumed-dead", "1", attempt=0)
    assert await lengths(broker) == [1, 0, 0]
    assert await pending(broker, PROMPTS) == 0
    [entry] = await claim(broker, "g")
    assert await generate(broker, entry, "g", "1", attempt=1)
    assert await lengths(broker) == [0, 1, 0]


async def test_a_result_for_an_entry_that_was_taken_over_changes_nothing(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    [entry] = await claim(broker, "dead")
    [taken] = await broker.reclaim(PROMPTS, "heir", 10)
    assert not await generate(broker, entry, "dead", "1")
    assert await lengths(broker) == [1, 0, 0]
    assert await generate(broker, taken, "heir", "1")


async def test_a_result_of_a_group_that_has_its_fate_leaves_nothing_behind(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    [entry] = await claim(broker, "g")
    await settle(broker, "1")
    assert not await generate(broker, entry, "g", "1")
    assert await lengths(broker) == [0, 0, 0]
    assert await keys_of(broker, "group", "sample", "open") == []


# --- claims -------------------------------------------------------------------------------------


async def test_prompts_are_claimed_only_with_the_published_version(broker: Broker) -> None:
    await dispatch(broker, "1")
    assert await broker.claim_prompts("1.0", "g", 5) == []
    await broker.publish(1, "1.3")
    assert await broker.claim_prompts("1.2", "g", 5) == []
    assert await broker.claim_prompts("2.3", "g", 5) == []
    assert await broker.claim_prompts("", "g", 5) == []
    assert len(await broker.claim_prompts("1.3", "g", 5)) == 1


async def test_a_publication_can_be_withdrawn_and_then_nobody_claims(broker: Broker) -> None:
    await broker.publish(1, "1.3")
    await dispatch(broker, "1")
    assert await broker.publish(2, "") == ["1"]
    assert await broker.published() is None
    assert await broker.claim_prompts("1.3", "g", 5) == []
    assert await broker.claim_prompts("", "g", 5) == []


async def test_publishing_names_the_groups_that_nobody_has_claimed(broker: Broker) -> None:
    await broker.publish(1, VERSION)
    for group in ("1", "2", "3"):
        await dispatch(broker, group)
    [first] = await claim(broker, "g", 1)
    assert await broker.publish(1, "1.1") == ["2", "3"]
    await broker.release(PROMPTS, first.id, "g")
    assert await broker.publish(1, "1.2") == ["2", "3", "1"]


async def test_a_claim_notes_the_version_that_the_group_starts_with(broker: Broker) -> None:
    """Else a learner that starts again would take the group for as old as its prompt."""
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    await dispatch(broker, "2")
    await broker.publish(1, "1.1")
    assert len(await broker.claim_prompts("1.1", "g", 1)) == 1
    least = [await broker.client.hget(broker.key("group", group), "least") for group in ("1", "2")]
    assert least == [b"1.1", VERSION.encode()]
    await settle(broker, "2")
    assert len(await broker.claim_prompts("1.1", "g", 1)) == 1
    assert await keys_of(broker, "group") == ["group:1"], "a claim brought a group back to life"


async def test_no_claim_is_given_twice(broker: Broker, other: Broker) -> None:
    await broker.publish(1, VERSION)
    for group in range(20):
        await dispatch(broker, str(group))

    async def take(who: Broker, name: str) -> list[Entry]:
        return [entry for _ in range(4) for entry in await claim(who, name, 3)]

    parts = await asyncio.gather(take(broker, "a"), take(other, "b"))
    entries = [entry for part in parts for entry in part]
    assert len(entries) == len({entry.id for entry in entries}) == 20


async def test_a_released_claim_goes_to_the_next_worker_with_the_same_record(
    broker: Broker,
) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    [entry] = await claim(broker, "g")
    await broker.release(PROMPTS, entry.id, "stranger")
    assert await claim(broker, "h") == []
    await broker.release(PROMPTS, entry.id, "g")
    await broker.release(PROMPTS, entry.id, "g")
    [again] = await claim(broker, "h")
    assert again.data == entry.data
    assert await generate(broker, again, "h", "1")


async def test_entries_of_a_worker_are_taken_over_only_when_its_lease_is_gone_and_once(
    broker: Broker, other: Broker
) -> None:
    await broker.publish(1, VERSION)
    for group in range(6):
        await dispatch(broker, str(group))
    async with broker.lease("generator", "g", {}):
        entries = await claim(broker, "g")
        assert len(entries) == 6
        await asyncio.sleep(0.05)
        assert await other.reclaim(PROMPTS, "heir", 10) == []
    some = await other.reclaim(PROMPTS, "heir", 4)
    assert len(some) == 4
    async with other.lease("generator", "heir", {}):
        rest = await broker.reclaim(PROMPTS, "late", 10)
        assert await broker.reclaim(PROMPTS, "late", 10) == []
    assert {e.id for e in some} | {e.id for e in rest} == {e.id for e in entries}
    assert len(rest) == 2


async def test_a_lease_is_renewed_while_it_is_held_and_expires_after_a_crash(
    server: EmbeddedServer, run_name: str
) -> None:
    broker = await Broker.connect(server.url, run_name, lease_s=0.15)
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    lease = broker.lease("generator", "g", {"workers": 2})
    await lease.__aenter__()
    await claim(broker, "g")
    await asyncio.sleep(0.4)
    assert (await broker.members("generator"))["g"]["workers"] == 2
    assert await broker.members("verifier") == {}
    assert await broker.reclaim(PROMPTS, "heir", 1) == []
    for task in asyncio.all_tasks():
        if task.get_name() == "lease g":
            task.cancel()  # as a crash ends it
    await asyncio.sleep(0.3)
    assert await broker.members("generator") == {}
    assert len(await broker.reclaim(PROMPTS, "heir", 1)) == 1
    await broker.close()


async def test_members_of_another_run_are_not_seen_even_if_its_name_looks_like_a_pattern(
    server: EmbeddedServer,
) -> None:
    one, other = await Broker.connect(server.url, "a.b"), await Broker.connect(server.url, "a.bc")
    async with one.lease("generator", "g", {}):
        assert list(await one.members("generator")) == ["g"]
        assert await other.members("generator") == {}
    await one.close()
    await other.close()


async def test_dead_consumers_are_removed_and_their_pending_entries_never_with_them(
    broker: Broker,
) -> None:
    await broker.publish(1, VERSION)
    await dispatch(broker, "1")
    await claim(broker, "dead")
    await broker.client.xgroup_createconsumer(broker.key(PROMPTS), "workers", "idle")
    assert len(await broker.reclaim(PROMPTS, "heir", 1)) == 1
    await broker.reclaim(PROMPTS, "heir", 1)
    consumers = await broker.client.xinfo_consumers(broker.key(PROMPTS), "workers")
    assert [info["name"] for info in consumers] == [b"heir"]
    assert await pending(broker, PROMPTS) == 1


# --- payloads -----------------------------------------------------------------------------------


async def test_a_payload_is_written_once_and_only_for_the_current_attempt(broker: Broker) -> None:
    assert not await broker.put_sample("1", 0, 0, b"before the group")
    await dispatch(broker, "1", attempt=2)
    assert not await broker.put_sample("1", 1, 0, b"older")
    assert await broker.put_sample("1", 2, 0, b"first")
    assert await broker.put_sample("1", 2, 0, b"second")
    assert await broker.get_samples("1", 2, 2) == [b"first", None]
    assert await broker.have_samples("1", 2, 2) == [True, False]
    assert await keys_of(broker, "sample") == ["sample:1:2:0"]


async def test_complete_samples_are_kept_by_the_next_attempt_under_its_name(broker: Broker) -> None:
    await dispatch(broker, "1")
    await broker.put_sample("1", 0, 0, b"zero")
    await broker.put_sample("1", 0, 2, b"two")
    await dispatch(broker, "1", attempt=1)
    assert await keys_of(broker, "sample") == ["sample:1:1:0", "sample:1:1:2"]
    assert await broker.get_samples("1", 1, SAMPLES) == [b"zero", None, b"two"]
    await dispatch(broker, "1", attempt=3)
    await settle(broker, "1")
    assert await keys_of(broker, "sample", "group", "open") == []


async def test_a_poison_entry_goes_to_the_dead_letters_with_the_reason(broker: Broker) -> None:
    await broker.client.xadd(broker.key(ROLLOUTS), {"r": b"\x00poison"})
    [entry] = await broker.claim(ROLLOUTS, "v", 10, 100)
    await broker.bury(ROLLOUTS, entry, "no msgpack")
    assert await lengths(broker) == [0, 0, 0]
    [(_, letter)] = await broker.client.xrange(broker.key("dead"))
    assert letter == {b"stream": b"rollouts", b"reason": b"no msgpack", b"r": b"\x00poison"}


# --- a full server ------------------------------------------------------------------------------


async def fill(broker: Broker) -> None:
    """Lower the limit below what is used: from here on the server refuses to take more."""
    await broker.client.config_set("maxmemory", "1mb")
    assert int((await broker.client.info("memory"))["used_memory"]) > 2**20
    with pytest.raises(OutOfMemoryError):
        await broker.client.set("one more", b"value")


async def test_a_full_server_can_still_be_emptied(own_server: EmbeddedServer) -> None:
    broker = await Broker.connect(own_server.url, "run", lease_s=0.2)
    await broker.publish(1, VERSION)
    for group in ("1", "2", "3", "4"):
        await dispatch(broker, group)
    one, two, three, _ = await claim(broker, "g", 4)
    await generate(broker, one, "g", "1")
    [rollout] = await broker.claim(ROLLOUTS, "v", 1, 100)
    async with broker.lease("generator", "g", {}):
        await fill(broker)
        assert await judge(broker, rollout, "v", "1")
        [verdict] = await broker.claim(VERDICTS, "learner", 1, 100)
        await settle(broker, "1", verdict.id)
        await broker.publish(1, "1.1")
        await broker.say(Publish("r", "1.1", ["g"]))
        await broker.answer("r", "g", Reply("done"))
        await broker.release(PROMPTS, two.id, "g")
        await broker.bury(PROMPTS, three, "poison")
        await asyncio.sleep(0.5)
        assert list(await broker.members("generator")) == ["g"]
    for group in ("2", "3", "4"):
        await settle(broker, group)
    assert await keys_of(broker, "group", "sample", "open") == []
    assert (await broker.answers("r"))["g"].status == "done"
    await broker.close()


async def test_writing_to_a_full_server_waits_until_there_is_room(
    own_server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(own_server.url, "run")
    await dispatch(broker, "1")
    await fill(broker)
    writing = asyncio.create_task(broker.put_sample("1", 0, 0, b"x" * 1000))
    await asyncio.sleep(0.15)
    assert not writing.done()
    await broker.client.config_set("maxmemory", "16mb")
    assert await asyncio.wait_for(writing, 5)
    await broker.close()


async def test_a_server_that_stays_full_is_an_error_that_says_so(
    own_server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(own_server.url, "run", patience_s=0.2)
    await dispatch(broker, "1")
    await fill(broker)
    with pytest.raises(BrokerError, match="its memory is full; raise redis.maxmemory_mib"):
        await broker.put_sample("1", 0, 0, b"x" * 1000)
    await broker.close()


# --- connecting ---------------------------------------------------------------------------------


async def test_a_wrong_or_missing_password_is_an_error_that_says_where_to_put_it(
    server: EmbeddedServer, run_name: str
) -> None:
    where = server.url.rpartition("@")[2]
    for url in (f"redis://:wrong@{where}", f"redis://{where}"):
        with pytest.raises(BrokerError) as caught:
            await Broker.connect(url, run_name)
        assert f"the server at {where.removesuffix('/0')} refuses" in str(caught.value)
        assert "DAPO_REDIS_PASSWORD" in str(caught.value)
        assert "wrong@" not in str(caught.value)


async def test_no_server_at_the_address_is_an_error_that_names_it_within_seconds() -> None:
    port, since = free_port(), time.monotonic()
    with pytest.raises(BrokerError, match=rf"no Redis-protocol server answers at 127.0.0.1:{port}"):
        await Broker.connect(f"redis://127.0.0.1:{port}/0", "run")
    assert time.monotonic() - since < 5


def test_a_port_in_use_is_an_error_that_names_it(server: EmbeddedServer, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2].removesuffix("/0"))
    with pytest.raises(BrokerError, match=rf"port {port} is in use"):
        EmbeddedServer(tmp_path).start(port)


def test_servers_started_at_the_same_time_find_ports_of_their_own(tmp_path: Path) -> None:
    servers = [EmbeddedServer(tmp_path / str(n), 16) for n in range(3)]
    try:
        assert len({embedded.start() for embedded in servers}) == 3
    finally:
        for embedded in servers:
            embedded.stop(0.0)


def test_the_files_with_the_password_are_private(own_server: EmbeddedServer) -> None:
    for name in ("server.conf", "url"):
        assert (own_server.folder / name).stat().st_mode & 0o077 == 0


# --- crashes ------------------------------------------------------------------------------------


def kill(server: EmbeddedServer) -> int:
    """`kill -9` and the port it listened on."""
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    return int(server.url.rpartition(":")[2].removesuffix("/0"))


async def test_calls_wait_for_a_killed_server_and_find_everything_when_it_is_back(
    own_server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(own_server.url, "run")
    await broker.publish(1, VERSION)
    for group in ("1", "2"):
        await dispatch(broker, group)
    [held] = await claim(broker, "g", 1)
    await broker.put_sample("1", 0, 0, b"payload")
    port = kill(own_server)
    writing = asyncio.create_task(broker.put_sample("1", 0, 1, b"later"))
    await asyncio.sleep(0.2)
    assert not writing.done()
    await asyncio.to_thread(own_server.start, port)
    assert await asyncio.wait_for(writing, 10)
    assert broker.disconnects > 0
    assert await broker.get_samples("1", 0, 2) == [b"payload", b"later"]
    # what was claimed before is seen again first, by the same consumer, and then what is new
    assert [entry.id for entry in await claim(broker, "g")] == [held.id]
    [second] = await claim(broker, "g")
    assert second.data == b"prompt 2 0"
    await broker.close()


async def test_a_reader_that_waits_while_the_server_is_killed_goes_on_with_the_same_stream(
    own_server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(own_server.url, "run")
    reading = asyncio.create_task(broker.claim(VERDICTS, "learner", 10, 4000))
    await asyncio.sleep(0.1)
    port = kill(own_server)
    await asyncio.to_thread(own_server.start, port)
    writer = await Broker.connect(own_server.url, "run")
    await writer.client.xadd(writer.key(VERDICTS), {"r": b"hello"})
    assert [entry.data for entry in await asyncio.wait_for(reading, 10)] == [b"hello"]
    await writer.close()
    await broker.close()


class Cutting:
    """A proxy that forwards to the server and can swallow answers: a network that is cut."""

    def __init__(self, port: int) -> None:
        self.port, self.swallow = port, False
        self.swallowed = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers += [writer, outer]
        tasks = [
            asyncio.create_task(self._pump(reader, outer, False)),
            asyncio.create_task(self._pump(inner, writer, True)),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, outer):
            end.close()

    async def _pump(self, source: Any, target: asyncio.StreamWriter, answers: bool) -> None:
        while data := await source.read(65536):
            if answers and self.swallow:
                self.swallow = False
                self.swallowed.set()
                return  # the answer is lost and the connection ends
            target.write(data)
            await target.drain()

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def cut(server: EmbeddedServer) -> AsyncIterator[tuple[Cutting, str]]:
    proxy = Cutting(int(server.url.rpartition(":")[2].removesuffix("/0")))
    port = await proxy.start()
    yield proxy, f"{server.url.rpartition('@')[0]}@127.0.0.1:{port}/0"
    await proxy.stop()


async def test_entries_whose_delivery_was_lost_with_the_connection_are_read_again(
    cut: tuple[Cutting, str], broker: Broker
) -> None:
    proxy, url = cut
    reader = await Broker.connect(url, broker.run)
    assert await reader.claim(VERDICTS, "learner", 10, 1) == []
    reading = asyncio.create_task(reader.claim(VERDICTS, "learner", 10, 3000))
    await asyncio.sleep(0.1)
    proxy.swallow = True
    for number in range(3):
        await broker.client.xadd(broker.key(VERDICTS), {"r": str(number)})
    first = await asyncio.wait_for(reading, 10)
    assert proxy.swallowed.is_set()
    rest = await reader.claim(VERDICTS, "learner", 10, 1)
    data = [entry.data for entry in first + rest]
    assert sorted(set(data)) == [b"0", b"1", b"2"]
    assert await pending(broker, VERDICTS) == 3
    await reader.close()


@pytest.mark.parametrize("lost", ["dispatch", "claim", "put_sample", "advance", "settle"])
async def test_a_call_whose_answer_was_lost_is_repeated_without_a_second_effect(
    cut: tuple[Cutting, str], broker: Broker, lost: str
) -> None:
    proxy, url = cut
    shaky = await Broker.connect(url, broker.run)
    await shaky.publish(1, VERSION)
    assert await claim(shaky, "g") == []

    async def step(name: str, call: Any) -> Any:
        proxy.swallow = name == lost
        result = await asyncio.wait_for(call, 10)
        assert not proxy.swallow
        return result

    await step("dispatch", dispatch(shaky, "1"))
    assert await lengths(broker) == [1, 0, 0]
    # what a lost answer had claimed comes with the next call
    claimed = await step("claim", claim(shaky, "g")) or await claim(shaky, "g")
    [entry] = claimed
    assert entry.data == b"prompt 1 0"
    assert await step("put_sample", shaky.put_sample("1", 0, 0, b"payload"))
    record = encode(Rollout("1", 1, 0, "g", ""))
    advanced = shaky.advance(entry.id, "g", "1", 0, ("dispatched", "generated"), record)
    await step("advance", advanced)
    assert await lengths(broker) == [0, 1, 0]
    await step("settle", settle(shaky, "1"))
    assert await keys_of(broker, "group", "sample", "open") == []
    assert shaky.disconnects > 0
    await shaky.close()


async def test_a_task_that_talks_to_the_server_ends_when_it_is_cancelled(broker: Broker) -> None:
    async def talk(number: int) -> None:
        async with broker.lease("generator", f"g{number}", {}):
            while True:
                await broker.claim_prompts(VERSION, f"g{number}", 1)

    for trial in range(20):
        tasks = [asyncio.create_task(talk(number)) for number in range(4)]
        await asyncio.sleep(0.01 + trial / 7000)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=5)
        assert len(done) == 4


async def test_a_server_that_stands_still_counts_as_away_and_its_entries_are_read_again(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SOCKET_TIMEOUT_S", 0.2)
    broker = await Broker.connect(own_server.url, "run")
    assert own_server.process is not None
    await broker.client.xadd(broker.key(VERDICTS), {"r": b"hello"})
    own_server.process.send_signal(signal.SIGSTOP)
    reading = asyncio.create_task(broker.claim(VERDICTS, "learner", 1, 100))
    await asyncio.sleep(0.4)
    own_server.process.send_signal(signal.SIGCONT)
    assert [entry.data for entry in await asyncio.wait_for(reading, 5)] == [b"hello"]
    assert broker.disconnects > 0
    await broker.close()


async def test_patience_with_a_server_that_is_gone_ends_in_an_error(
    own_server: EmbeddedServer,
) -> None:
    broker = await Broker.connect(own_server.url, "run", patience_s=0.3)
    kill(own_server)
    with pytest.raises(
        BrokerError, match=r"waited \d s for the server \(dispatch\): it does not answer"
    ):
        await dispatch(broker, "1")
    await broker.close()


async def test_every_call_works_on_a_server_that_was_emptied(own_server: EmbeddedServer) -> None:
    broker = await Broker.connect(own_server.url, "run")
    before = broker.disconnects
    for call in (
        lambda: broker.claim(ROLLOUTS, "v", 1, 1),
        lambda: broker.claim_prompts(VERSION, "g", 1),
        lambda: broker.reclaim(PROMPTS, "g", 1),
        lambda: broker.publish(1, VERSION),
        lambda: broker.release(PROMPTS, "1-1", "g"),
        lambda: broker.advance("1-1", "g", "1", 0, ("dispatched", "generated"), b""),
        lambda: broker.answers("r"),
        lambda: broker.members("generator"),
        lambda: dispatch(broker, "1"),
        lambda: settle(broker, "1"),
    ):  # fmt: skip
        await broker.client.flushall()
        await asyncio.wait_for(call(), 5)
    assert broker.disconnects > before
    await broker.close()


# --- rounds and the end -------------------------------------------------------------------------


async def test_what_the_learner_says_is_heard_in_order_from_the_place_tuned_in_to(
    broker: Broker, other: Broker
) -> None:
    await broker.say(Call("r0", "1.0"))
    place, heard = await other.hear("$", 0)
    assert heard == []
    await broker.say(Call("r1", "1.1"))
    await broker.say(Publish("r1", "1.1", ["g"]))
    place, heard = await other.hear(place, 100)
    assert heard == [Call("r1", "1.1"), Publish("r1", "1.1", ["g"])]
    assert await other.hear(place, 1) == (place, [])


async def test_an_answer_that_cannot_be_read_is_its_members_failure_and_nobody_elses(
    broker: Broker,
) -> None:
    await broker.answer("r", "good", Reply("ready", 2))
    await broker.client.hset(broker.key("round", "r"), "bad", "{nonsense")
    await broker.client.hset(
        broker.key("round", "r"), "odd", '["call", {"round": "r", "version": "1"}]'
    )
    answers = await broker.answers("r")
    assert answers["good"] == Reply("ready", 2)
    assert answers["bad"].status == answers["odd"].status == "failed"


async def test_the_end_of_the_run_is_seen_by_everyone(broker: Broker, other: Broker) -> None:
    assert await other.ended() is None
    await broker.end("complete")
    assert await other.ended() == "complete"
