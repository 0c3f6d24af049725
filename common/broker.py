"""The Redis-protocol server as this project uses it: streams with consumer groups, leases.

Invariants:
- Every key is scoped to the run and shares its hash tag; nothing is ever flushed.
- A worker's result and its acknowledgement are one script; a late result of a worker that was
  presumed dead changes nothing (compare-and-set on the group's state and attempt).
- Entries change hands only when the lease of their owner has expired.
- A call is never retried inside the client library: a reply that was lost may have had an
  effect. Scripts are idempotent, so `Broker` repeats them itself; after each connection error
  the next `claim` first reads what is pending for this consumer already.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.errors import BrokerError, FencedError, MessageError
from common.log import get_logger
from common.rounds import Message, Reply, dumps, loads

PROMPTS, ROLLOUTS, VERDICTS = "prompts", "rollouts", "verdicts"
STREAMS = (PROMPTS, ROLLOUTS, VERDICTS)
SCRIPTS = (
    *("dispatch", "publish", "settle"),  # the learner's, fenced
    *("claim", "put_sample", "advance", "reclaim", "release", "bury"),
    *("say", "answer"),
)
SOCKET_TIMEOUT_S = 5.0
"""Limit of one call; above every block of a read, so that an idle stream is no error."""
CONNECTIONS = 16
PATIENCE_S = 120.0
"""How long a server may be away before a call gives up."""

_LOST = (RedisConnectionError, RedisTimeoutError, OSError)
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """A claimed entry of a stream."""

    id: str
    data: bytes


class Broker:
    """One role's connection to the server, scoped to a run."""

    def __init__(self, client: redis_asyncio.Redis, run: str, lease_s: float = 10.0) -> None:
        self.client = client
        self.run = run
        self.lease_s = lease_s
        self.disconnects = 0
        self._read_at: dict[str, int] = {}
        self._scripts = {name: client.register_script(_source(name)) for name in SCRIPTS}

    @classmethod
    async def connect(cls, url: str, run: str, lease_s: float = 10.0) -> Broker:
        """Connect and create the streams' consumer groups.

        Raises:
            BrokerError: no server at the address, or it refuses the credentials.
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
        broker = cls(client, run, lease_s)
        where = address(url)
        try:
            await in_time(client.ping())
            await in_time(broker.ensure_streams())
        except (AuthenticationError, NoPermissionError) as error:
            await client.aclose()
            raise BrokerError(password_help(where, error)) from None
        except _LOST as error:
            await client.aclose()
            raise BrokerError(
                f"no Redis-protocol server answers at {where} ({error}); start one there or set "
                "redis.url, or leave redis.url out and use `dapo run` with its embedded server"
            ) from None
        except ResponseError as error:
            await client.aclose()
            if "NOAUTH" in str(error):
                raise BrokerError(password_help(where, error)) from None
            raise
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
        """Repeat an idempotent call until the server answers, for PATIENCE_S at most."""
        since, delay = time.monotonic(), 0.05
        while True:
            try:
                return await in_time(call())
            except ResponseError as error:
                if "FENCED" in str(error):
                    raise FencedError(
                        f"another learner has taken over run {self.run}; this one stops"
                    ) from None
                if "NOGROUP" in str(error) or "no such key" in str(error):
                    self.disconnects += 1  # the streams are gone: this server was emptied
                    await self._recreate_streams()
                elif isinstance(error, OutOfMemoryError):
                    self._wait_for_server(what, since, "its memory is full; raise maxmemory", error)
                elif "LOADING" not in str(error):
                    raise
            except _LOST as error:
                self.disconnects += 1
                self._wait_for_server(what, since, "it does not answer", error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 2.0)

    def _wait_for_server(self, what: str, since: float, why: str, error: Exception) -> None:
        """Say what is waited for; an error once patience is at its end."""
        waited = time.monotonic() - since
        if waited > PATIENCE_S:
            raise BrokerError(
                f"waited {waited:.0f} s for the server ({what}): {why} ({error})"
            ) from None
        log.warning("waiting for the server", what=what, why=why, since_s=round(waited, 1),
                    error=str(error))  # fmt: skip

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
            return _entries(reply)

        result: list[Entry] = await self.persist(read, f"reading {stream}")
        return result

    async def _pending(self, stream: str, consumer: str) -> list[Entry]:
        """What this consumer holds already, asked at the start and after each lost connection."""
        seen = self.disconnects
        if self._read_at.get(stream, -1) == seen:
            return []
        reply = await self.client.xreadgroup("workers", consumer, {self.key(stream): "0"})
        self._read_at[stream] = seen
        return _entries(reply)

    async def claim_prompts(self, version: str, consumer: str, count: int) -> list[Entry]:
        """Prompts for a generator that holds the published version; none for any other."""
        pending: list[Entry] = await self.persist(
            lambda: self._pending(PROMPTS, consumer), "reading prompts"
        )
        if pending:
            return pending
        keys = [self.key("published"), self.key(PROMPTS)]
        reply = await self.script("claim", keys, [version, consumer, count])
        return [Entry(item[0].decode(), _field(item[1])) for item in reply or []]

    async def unclaimed(self) -> set[str]:
        """Groups whose prompts nobody has claimed, as of about now."""
        key = self.key(PROMPTS)

        async def read() -> set[str]:
            groups = await self.client.xinfo_groups(key)
            if not groups:
                raise ResponseError(f"NOGROUP of {key}")
            last = groups[0]["last-delivered-id"].decode()
            waiting: Any = await self.client.xrange(key, min=f"({last}")
            return {fields[b"g"].decode() for _, fields in waiting if b"g" in fields}

        found: set[str] = await self.persist(read, "looking for unclaimed prompts")
        return found

    async def reclaim(self, stream: str, consumer: str, count: int) -> list[Entry]:
        """Entries of consumers whose lease has expired, now this consumer's."""
        reply = await self.script(
            "reclaim", [self.key(stream)], [consumer, self.key("lease", ""), count]
        )
        return [Entry(item[0].decode(), _field(item[1])) for item in reply or []]

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
        reply = await self.script("advance", keys, [entry, consumer, attempt, *step, record])
        return int(reply) == 1

    async def release(self, stream: str, entry: str, consumer: str) -> None:
        """Give a claim back for another worker."""
        await self.script("release", [self.key(stream)], [entry, consumer])

    async def bury(self, stream: str, entry: Entry, reason: str) -> None:
        """Move an entry that cannot be read to the dead letters."""
        log.error("dead letter", stream=stream, entry=entry.id, reason=reason)
        args = [entry.id, reason, stream, entry.data]
        await self.script("bury", [self.key(stream), self.key("dead")], args)

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
        return current is not None and int(current) == attempt

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
        keys = [self.key("fence"), self.key("published"), self.key(PROMPTS)]
        waiting = await self.script("publish", keys, [fence, version])
        return [gid.decode() for gid in waiting]

    async def published(self) -> str | None:
        """The published version as the server knows it; None if there is none."""
        version = await self.persist(
            lambda: self.client.get(self.key("published")), "asking for the published version"
        )
        return version.decode() if version else None

    # --- weight rounds --------------------------------------------------------------------------

    async def say(self, message: Message) -> None:
        """Learner: speak on the control stream. Saying a thing twice is harmless."""
        await self.script("say", [self.key("control")], [dumps(message)])

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
            entries = _entries(reply)
            return entries[-1].id if entries else after, [loads(e.data) for e in entries]

        heard: tuple[str, list[Message]] = await self.persist(read, "listening")
        return heard

    async def answer(self, round_id: str, member: str, reply: Reply) -> None:
        await self.script("answer", [self.key("round", round_id)], [member, dumps(reply)])

    async def answers(self, round_id: str) -> dict[str, Reply]:
        key = self.key("round", round_id)
        raw = await self.persist(lambda: self.client.hgetall(key), "reading answers")
        return {name.decode(): _reply(data) for name, data in raw.items()}

    # --- status and the end ---------------------------------------------------------------------

    async def report(self, member: str, status: dict[str, Any]) -> None:
        """Best effort: a member's figures for `dapo status`, and nothing depends on them."""
        with contextlib.suppress(*_LOST, ResponseError):
            await in_time(self.client.hset(self.key("status"), member, json.dumps(status)))

    async def reports(self) -> dict[str, dict[str, Any]]:
        raw = await self.persist(lambda: self.client.hgetall(self.key("status")), "status")
        return {name.decode(): json.loads(data) for name, data in raw.items()}

    async def end(self, reason: str) -> None:
        """Tell every role that the run is over."""
        await self.persist(lambda: self.client.set(self.key("ended"), reason), "ending the run")

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
        value = json.dumps({"role": role, "pid": os.getpid(), **info})
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
        """PEXPIRE works on a full server; SET is needed only where the lease is gone."""
        ms = int(self.lease_s * 1000)
        try:
            if not await in_time(self.client.pexpire(key, ms)):
                await in_time(self.client.set(key, value, px=ms))
        except (*_LOST, ResponseError) as error:
            log.warning("lease not renewed", key=key, error=str(error))

    async def members(self, role: str) -> dict[str, dict[str, Any]]:
        """Living members of a role, by consumer name."""

        async def scan() -> dict[str, dict[str, Any]]:
            prefix = self.key("lease", "")
            found = {}
            async for key in self.client.scan_iter(match=_escape(prefix) + "*", count=200):
                value = await self.client.get(key)
                if value and (info := json.loads(value)).get("role") == role:
                    found[key.decode().removeprefix(prefix)] = info
            return found

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


def address(url: str) -> str:
    """host:port of an address, without the credentials."""
    parts = urlsplit(url)
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def password_help(where: str, error: Exception) -> str:
    return (
        f"the server at {where} refuses the credentials ({error}); put the password into the "
        "variable DAPO_REDIS_PASSWORD or a file named by redis.password_file"
    )


def _source(name: str) -> str:
    return (resources.files("common") / "scripts" / f"{name}.lua").read_text()


def _entries(reply: Any) -> list[Entry]:
    """Entries of one stream; those deleted while pending come with empty fields and are left."""
    batches = reply.values() if isinstance(reply, dict) else [b for _, b in reply or []]
    flat: list[Any] = []
    for batch in batches:
        # RESP3 wraps the entries of a stream once more
        flat += batch[0] if batch and isinstance(batch[0], list) else batch
    return [Entry(id_.decode(), _field(fields)) for id_, fields in flat if fields]


def _field(fields: Any) -> bytes:
    pairs = (
        fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    )
    value = pairs.get(b"r", b"")
    return value if isinstance(value, bytes) else b""


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
