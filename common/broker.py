"""The Redis-protocol server as this project uses it: streams with consumer groups, leases.

Invariants:
- Every key is scoped to the run and shares its hash tag; nothing is ever flushed.
- A worker's result and its acknowledgement are one script; a late result of a worker that was
  presumed dead changes nothing (compare-and-set on the group's state and attempt).
- Entries change hands only when the lease of their owner has expired.
- A call is never retried inside the client library: a reply that was lost may have had an
  effect. Scripts are idempotent, so `Broker` repeats them itself; after each connection error
  the next `claim` first reads what is pending for this consumer already.
- On a full server only payloads wait for room. Whatever leads to their end, and what the learner
  and the leases need, is written by scripts with `allow-oom`; admission bounds how much that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.address import address
from common.errors import FencedError, MessageError
from common.log import get_logger
from common.messages import DEAD_LETTER, Rollout, Verdict, encode, ordinal_of
from common.patience import Patience, Wait
from common.refusal import forbidden, is_forbidden, refused
from common.rounds import Message, Reply, dumps, loads

PROMPTS, ROLLOUTS, VERDICTS = "prompts", "rollouts", "verdicts"
STREAMS = (PROMPTS, ROLLOUTS, VERDICTS)
SCRIPTS = (
    *("dispatch", "publish", "settle", "acknowledge", "say", "end"),  # the learner's, fenced
    *("claim", "held", "put_sample", "advance", "reclaim", "release", "bury"),
    *("answer", "lease", "report"),
)
STATE_BEFORE = {PROMPTS: "dispatched", ROLLOUTS: "generated", VERDICTS: "judged"}
"""The state of a group whose entry lies in a stream."""
FAILURE_TO = {PROMPTS: ROLLOUTS, ROLLOUTS: VERDICTS, VERDICTS: VERDICTS}
"""Where the failure of a group goes whose entry is a dead letter: to its next worker, as every
result, so that each role writes to one stream only."""
SOCKET_TIMEOUT_S = 5.0
"""Limit of one call; above every block of a read, so that an idle stream is no error."""
CONNECTIONS = 16
NAME_BYTES = 200
"""What is read of the name of a group; none is longer."""
PATIENCE_S = 120.0
"""How long a server may be away before a call gives up; [redis] may say otherwise."""

_LOST = (RedisConnectionError, RedisTimeoutError, OSError)
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a stream, claimed by `owner`.

    `group` is the id of its group, empty where it names none. `deliveries` counts the workers that
    it was given to, this one included: all before died without a result.
    """

    id: str
    data: bytes
    group: str = ""
    owner: str = ""
    deliveries: int = 1


class Broker:
    """One role's connection to the server, scoped to a run."""

    def __init__(
        self, client: redis_asyncio.Redis, run: str, lease_s: float = 10.0,
        patience_s: float = PATIENCE_S, where: str = "",
    ) -> None:  # fmt: skip
        self.client = client
        self.run = run
        self.lease_s = lease_s
        self.where = where
        self.patience = Patience(patience_s)
        self.disconnects = 0
        self.fence = 0
        """Of a learner: its incarnation, from its first `publish` on."""
        self._read_at: dict[str, int] = {}
        self._scripts = {name: client.register_script(_source(name)) for name in SCRIPTS}

    @classmethod
    async def connect(
        cls, url: str, run: str, lease_s: float = 10.0, patience_s: float = PATIENCE_S
    ) -> Broker:
        """Connect and create the streams' consumer groups. Waits for nobody.

        Raises:
            ServerAwayError: no server answers at the address.
            BrokerError: it refuses the credentials, the certificates do not fit, and the like.
        """
        # Blocking: a burst of calls waits for a connection instead of failing for want of one.
        pool = redis_asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=None,
            socket_timeout=None,  # see `in_time`
            retry=Retry(NoBackoff(), 0),
        )
        client = redis_asyncio.Redis(connection_pool=pool)
        broker = cls(client, run, lease_s, patience_s, address(url))
        try:
            await in_time(client.ping())
            await in_time(broker.ensure_streams())
        except (*_LOST, ResponseError) as error:
            await client.aclose()
            raise await asyncio.to_thread(refused, url, error) from None
        return broker

    async def close(self) -> None:
        await self.client.aclose(close_connection_pool=True)

    def key(self, *parts: object) -> str:
        """Name of a key of this run; the hash tag keeps a run on one cluster slot."""
        return f"{{{self.run}}}:" + ":".join(map(str, parts))

    async def ensure_streams(self) -> None:
        """Create the consumer groups, also on a server that was emptied."""
        for stream in STREAMS:
            try:
                await self.client.xgroup_create(self.key(stream), "workers", id="0", mkstream=True)
            except ResponseError as error:
                if "BUSYGROUP" not in str(error):
                    raise

    # --- calls that survive a lost connection -------------------------------------------------

    async def persist(self, call: Callable[[], Awaitable[Any]], what: str) -> Any:
        """Repeat an idempotent call until the server answers, as long as patience lasts.

        Raises:
            BrokerError: it is at its end, or waiting would not help.
        """
        wait = self.patience.begin(what)
        while True:
            try:
                result = await in_time(call())
            except ResponseError as error:
                pause = await self._after_refusal(error, wait)
            except _LOST as error:
                self.disconnects += 1
                stranger = isinstance(error, AuthenticationError)
                why = "it refuses the credentials" if stranger else "it does not answer"
                pause = wait.again(why, error)
            else:
                wait.over()
                return result
            await asyncio.sleep(pause)

    async def _after_refusal(self, error: ResponseError, wait: Wait) -> float:
        """Seconds to wait where a refusal may pass; any other is raised."""
        said = str(error)
        if "FENCED" in said:
            raise FencedError(
                f"another learner has taken over run {self.run}; this one stops. If there is "
                "none, the run directory is older than the server: restore its timeline.json, or "
                "choose another run.name"
            )
        if is_forbidden(error):
            raise forbidden(self.where, error)
        if "NOGROUP" in said or "no such key" in said:
            self.disconnects += 1
            await self._recreate_streams()
            return wait.again("its streams are gone: it was emptied", error)
        if isinstance(error, OutOfMemoryError):
            return wait.again("its memory is full; raise redis.maxmemory_mib, or maxmemory of a "
                              "server of your own", error)  # fmt: skip
        if said.startswith("MISCONF"):
            return wait.again("it cannot write to its disk", error)
        raise error

    async def _recreate_streams(self) -> None:
        with contextlib.suppress(*_LOST):  # the call that is repeated will find it out
            await in_time(self.ensure_streams())

    async def script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Run one of the scripts, again after a lost connection."""
        return await self.persist(lambda: self._scripts[name](keys=keys, args=args), name)

    # --- streams --------------------------------------------------------------------------------

    async def claim(self, stream: str, consumer: str, count: int, block_ms: int) -> list[Entry]:
        """New entries for this consumer; after a lost connection its pending ones come first.

        The caller drops entries that it already holds (by id). `block_ms` stays under the
        socket's timeout. A read is never to be cancelled: what it claimed would be lost to all.
        """

        async def read() -> list[Entry]:
            key = self.key(stream)
            if entries := await self._pending(stream, consumer):
                return entries
            reply = await self.client.xreadgroup(
                "workers", consumer, {key: ">"}, count=count, block=min(block_ms, 4000)
            )
            return _entries(reply, consumer)

        result: list[Entry] = await self.persist(read, f"reading {stream}")
        return result

    async def _pending(self, stream: str, consumer: str) -> list[Entry]:
        """What this consumer holds already, asked at the start and after each lost connection."""
        seen = self.disconnects
        if self._read_at.get(stream, -1) == seen:
            return []
        # not XREADGROUP, which would count every look as a delivery
        reply = await self._scripts["held"](keys=[self.key(stream)], args=[consumer])
        self._read_at[stream] = seen
        return [_entry(item, consumer) for item in reply]

    async def claim_prompts(self, version: str, consumer: str, count: int) -> list[Entry]:
        """Prompts for a generator that holds the published version; none for any other."""
        pending: list[Entry] = await self.persist(
            lambda: self._pending(PROMPTS, consumer), "reading prompts"
        )
        if pending:
            return pending
        keys = [self.key("published"), self.key(PROMPTS)]
        groups = self.key("group", "")
        reply = await self.script("claim", keys, [version, consumer, count, groups])
        return [_entry(item, consumer) for item in reply or []]

    async def unclaimed(self) -> set[str]:
        """Groups whose prompts nobody has claimed, as of about now."""
        key = self.key(PROMPTS)

        async def read() -> set[str]:
            groups = await self.client.xinfo_groups(key)
            if not groups:
                raise ResponseError(f"NOGROUP of {key}")
            last = groups[0]["last-delivered-id"].decode()
            waiting: Any = await self.client.xrange(key, min=f"({last}")
            return {_entry(item, "").group for item in waiting if b"g" in item[1]}

        found: set[str] = await self.persist(read, "looking for unclaimed prompts")
        return found

    async def reclaim(self, stream: str, consumer: str, count: int) -> list[Entry]:
        """Entries of consumers whose lease has expired, now this consumer's."""
        reply = await self.script(
            "reclaim", [self.key(stream)], [consumer, self.key("lease", ""), count]
        )
        return [_entry(item, consumer) for item in reply or []]

    async def advance(
        self,
        entry: str,
        consumer: str,
        group: str,
        attempt: int,
        step: tuple[str, str],
        record: bytes,
    ) -> bool:
        """Hand a group on: generated to the verifiers, or judged to the learner.

        `step` is ("dispatched", "generated") or ("generated", "judged"). False: the group is
        somewhere else by now, or the entry belongs to another worker; nothing was changed.
        """
        source, target = (PROMPTS, ROLLOUTS) if step[1] == "generated" else (ROLLOUTS, VERDICTS)
        keys = [self.key("group", group), self.key(source), self.key(target)]
        args = [entry, consumer, attempt, *step, record, group]
        reply = await self.script("advance", keys, args)
        return int(reply) == 1

    async def release(self, stream: str, entry: str, consumer: str) -> bool:
        """Give a claim back for another worker; False if it is another's already."""
        return int(await self.script("release", [self.key(stream)], [entry, consumer])) == 1

    async def bury(self, stream: str, entry: Entry, reason: str) -> None:
        """Move an entry that cannot be worked on to the dead letters.

        Its group, where it names one, fails with the reason: the learner tries it again, under
        its budget, unless it is `deadly`. Nothing happens if the entry is another worker's by now.
        """
        log.error("dead letter", stream=stream, entry=entry.id, group=entry.group, reason=reason)
        key, group = self.key, entry.group
        current = await self.persist(
            lambda: self.client.hget(key("group", group), "attempt"), "burying"
        )
        attempt = (current or b"").decode(errors="replace")
        failure = _failure(stream, entry, attempt, reason)
        target, waiting = FAILURE_TO[stream], STATE_BEFORE[stream]
        keys = [key(stream), key("dead"), key("group", group), key(target)]
        args = [entry.id, entry.owner, stream, reason, waiting, attempt, STATE_BEFORE[target]]
        await self.script("bury", keys, [*args, failure, group])

    # --- payloads -------------------------------------------------------------------------------

    async def put_sample(self, group: str, attempt: int, index: int, payload: bytes) -> bool:
        """Write a payload; False if the group has moved on to another attempt."""
        keys = [self.key("group", group), self.key("sample", group, attempt, index)]
        return bool(await self.script("put_sample", keys, [attempt, payload]))

    async def is_current(self, group: str, attempt: int) -> bool:
        """Whether the group is alive and at this attempt."""
        current = await self.persist(
            lambda: self.client.hget(self.key("group", group), "attempt"), "asking for an attempt"
        )
        return bool(current == str(attempt).encode())

    async def have_samples(self, group: str, attempt: int, count: int) -> list[bool]:
        """Which payloads of a group are there already."""

        async def ask() -> list[bool]:
            pipe = self.client.pipeline(transaction=False)
            for index in range(count):
                pipe.exists(self.key("sample", group, attempt, index))
            return [bool(n) for n in await pipe.execute()]

        found: list[bool] = await self.persist(ask, "looking for samples")
        return found

    async def get_samples(self, group: str, attempt: int, count: int) -> list[bytes | None]:
        keys = [self.key("sample", group, attempt, index) for index in range(count)]
        payloads: list[bytes | None] = await self.persist(
            lambda: self.client.mget(keys), "reading samples"
        )
        return payloads

    async def discard_samples(self, group: str, attempt: int, indices: list[int]) -> None:
        """Forget payloads that are of no use, so that they are made again."""
        keys = [self.key("sample", group, attempt, index) for index in indices]
        await self.persist(lambda: self.client.unlink(*keys), "discarding samples")

    async def get_prompt(self, group: str) -> bytes | None:
        """The prompt record of a group that is alive."""
        data: bytes | None = await self.persist(
            lambda: self.client.hget(self.key("group", group), "prompt"), "reading a prompt"
        )
        return data

    async def publish(self, fence: int, version: str) -> list[str]:
        """Learner: make a version the published one; returns the groups that nobody has claimed.

        An empty version withdraws what is published, so that nobody claims until the next one.
        """
        self.fence = fence
        keys = [self.key("fence"), self.key("published"), self.key(PROMPTS)]
        waiting = await self.script("publish", keys, [fence, version])
        return [gid[:NAME_BYTES].decode(errors="replace") for gid in waiting]

    async def published(self) -> str | None:
        """The published version as the server knows it; None if there is none."""
        version = await self.persist(
            lambda: self.client.get(self.key("published")), "asking for the published version"
        )
        return version.decode() if version else None

    # --- weight rounds --------------------------------------------------------------------------

    async def say(self, message: Message) -> None:
        """Learner: speak on the control stream. Saying a thing twice is harmless."""
        await self.script(
            "say", [self.key("fence"), self.key("control")], [self.fence, dumps(message)]
        )

    async def hear(self, after: str, block_ms: int) -> tuple[str, list[Message]]:
        """Member: what was said after the entry `after`; returns the new place in the stream.

        `$` as place means "from now on" and is turned into a real one by the first call.
        """
        key = self.key("control")

        async def read() -> tuple[str, list[Message]]:
            if after == "$":
                last: Any = await self.client.xrevrange(key, count=1)
                return (last[0][0].decode() if last else "0-0"), []
            reply = await self.client.xread({key: after}, block=min(block_ms, 4000))
            entries = _entries(reply, "")
            return entries[-1].id if entries else after, list(_readable(entries))

        heard: tuple[str, list[Message]] = await self.persist(read, "listening")
        return heard

    async def answer(self, round_id: str, member: str, reply: Reply) -> None:
        await self.script("answer", [self.key("round", round_id)], [member, dumps(reply)])

    async def answers(self, round_id: str) -> dict[str, Reply]:
        key = self.key("round", round_id)
        raw = await self.persist(lambda: self.client.hgetall(key), "reading answers")
        return {name.decode(errors="replace"): _reply(data) for name, data in raw.items()}

    # --- status and the end ---------------------------------------------------------------------

    async def report(self, member: str, status: dict[str, Any]) -> None:
        """Best effort: a member's figures for `dapo status`, and nothing depends on them."""
        with contextlib.suppress(*_LOST, ResponseError):
            arguments = [member, json.dumps(status)]
            await in_time(self._scripts["report"](keys=[self.key("status")], args=arguments))

    async def reports(self) -> dict[str, dict[str, Any]]:
        raw = await self.persist(lambda: self.client.hgetall(self.key("status")), "status")
        return _objects(raw)

    async def end(self, reason: str) -> None:
        """Tell every role that the run is over."""
        await self.script("end", [self.key("fence"), self.key("ended")], [self.fence, reason])

    async def forget_end(self) -> None:
        """A run that goes on after its end is not over any more."""
        key = self.key("ended")
        await self.persist(lambda: self.client.delete(key), "taking the end back")

    async def ended(self) -> str | None:
        """Why the run is over; None while it is not."""
        reason = await self.persist(
            lambda: self.client.get(self.key("ended")), "asking for the end"
        )
        return reason.decode() if reason else None

    # --- leases ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def lease(self, role: str, consumer: str, info: dict[str, Any]) -> AsyncIterator[None]:
        """Hold a lease while the block runs; a task renews it three times in its life."""
        own = {"role": role, "pid": os.getpid(), "lease_s": self.lease_s}
        value = json.dumps(own | info)
        key = self.key("lease", consumer)
        await self._renew(key, value)
        task = asyncio.create_task(self._keep(key, value), name=f"lease {consumer}")
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            with contextlib.suppress(*_LOST, ResponseError):
                await in_time(self.client.unlink(key))

    async def _keep(self, key: str, value: str) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            await self._renew(key, value)

    async def _renew(self, key: str, value: str) -> None:
        arguments = [value, str(int(self.lease_s * 1000))]
        try:
            await in_time(self._scripts["lease"](keys=[key], args=arguments))
        except (*_LOST, ResponseError) as error:
            log.warning("lease not renewed", key=key, error=str(error))

    async def members(self, role: str | None = None) -> dict[str, dict[str, Any]]:
        """Living members of a role, or of all, by consumer name."""

        async def scan() -> dict[str, dict[str, Any]]:
            prefix = self.key("lease", "")
            pattern = _escape(prefix) + "*"
            keys = [key async for key in self.client.scan_iter(match=pattern, count=200)]
            values = await self.client.mget(keys) if keys else []
            names = (key.removeprefix(prefix.encode()) for key in keys)
            members = _objects(dict(zip(names, values, strict=True))).items()
            return {name: info for name, info in members if role in (None, info.get("role"))}

        result: dict[str, dict[str, Any]] = await self.persist(scan, "listing members")
        return result


async def in_time(call: Awaitable[Any]) -> Any:
    """The result of a call, or a TimeoutError, which counts as a lost connection.

    Not the client's own `socket_timeout`: its `asyncio.wait_for` loses about every second
    cancellation on Python 3.11, and a task that cannot be cancelled hangs the end of its process.
    """
    try:
        async with asyncio.timeout(SOCKET_TIMEOUT_S):
            return await call
    except TimeoutError:
        raise TimeoutError(f"no answer within {SOCKET_TIMEOUT_S:g} s") from None


def _failure(stream: str, entry: Entry, attempt: str, reason: str) -> bytes:
    """What the next worker gets of a group whose entry is a dead letter; nothing if no group can
    have that name, or the server does not know it."""
    try:
        ids = (entry.group, ordinal_of(entry.group), int(attempt))
    except (MessageError, ValueError):
        return b""
    reason = f"{DEAD_LETTER}{reason[:300]}"
    if stream == PROMPTS:
        return encode(Rollout(*ids, entry.owner, reason))
    return encode(Verdict(*ids, ids[1] < 0, "failed", reason, [], entry.owner))


def _source(name: str) -> str:
    return (resources.files("common") / "scripts" / f"{name}.lua").read_text()


def _entries(reply: Any, owner: str) -> list[Entry]:
    """Entries of one stream; those deleted while pending come with empty fields and are left."""
    batches = reply.values() if isinstance(reply, dict) else [b for _, b in reply or []]
    flat: list[Any] = []
    for batch in batches:
        # RESP3 wraps the entries of a stream once more
        flat += batch[0] if batch and isinstance(batch[0], list) else batch
    return [_entry(item, owner) for item in flat if item[1]]


def _entry(item: Any, owner: str) -> Entry:
    """An entry out of (id, fields) or (id, fields, deliveries)."""
    id_, fields, *count = item
    pairs = (
        fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    )
    data, group = pairs.get(b"r", b""), pairs.get(b"g", b"")[:NAME_BYTES]
    return Entry(id_.decode(), data, group.decode(errors="replace"), owner, *map(int, count))


def _readable(entries: list[Entry]) -> Iterator[Message]:
    """What was said on the control stream. What cannot be read is no message: everyone hears it,
    so it is nobody's to bury."""
    for entry in entries:
        try:
            yield loads(entry.data)
        except MessageError as error:
            log.error("unreadable message", entry=entry.id, reason=str(error))


def _objects(records: dict[bytes, Any]) -> dict[str, dict[str, Any]]:
    """Records that are JSON objects, by name; anything else is left out."""
    found = {}
    for name, data in records.items():
        with contextlib.suppress(ValueError):
            if data and isinstance(record := json.loads(data), dict):
                found[name.decode(errors="replace")] = record
    return found


def _reply(data: bytes) -> Reply:
    """A member's answer; one that cannot be read is that member's failure and nobody else's."""
    try:
        reply = loads(data)
    except MessageError as error:
        return Reply("failed", error=str(error))
    return reply if isinstance(reply, Reply) else Reply("failed", error=f"it said {reply.OP!r}")


def _escape(text: str) -> str:
    """A literal for MATCH patterns."""
    return "".join("\\" + c if c in "*?[]\\" else c for c in text)
