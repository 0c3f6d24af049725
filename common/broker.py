"""The Redis-protocol server as this project uses it: streams with consumer groups, leases.

Invariants:
- Every key is scoped to the run and shares its hash tag; nothing is ever flushed.
- A worker's result and its acknowledgement are one script; a late result of a worker that was
  presumed dead changes nothing (compare-and-set on the group's state and attempt).
- Entries change hands only when the lease of their owner has expired.
- Calls are repeated after a lost connection (`common.calls`); after each one the next `claim` first
  reads what is pending for this consumer already.
- On a full server only payloads wait for room. Whatever leads to their end, and what the learner
  and the leases need, is written by scripts with `allow-oom`; admission bounds how much that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from redis.exceptions import ResponseError

from common.calls import LOST, Calls, in_time
from common.entry import (
    NAME_BYTES,
    PROMPTS,
    ROLLOUTS,
    VERDICTS,
    Entry,
    read_entries,
    read_entry,
)
from common.errors import MessageError
from common.log import get_logger
from common.messages import DEAD_LETTER, Rollout, Verdict, encode, ordinal_of
from common.rounds import Message, Reply, dumps, loads

STATE_BEFORE = {PROMPTS: "dispatched", ROLLOUTS: "generated", VERDICTS: "judged"}
"""The state of a group whose entry lies in a stream."""
FAILURE_TO = {PROMPTS: ROLLOUTS, ROLLOUTS: VERDICTS, VERDICTS: VERDICTS}
"""Where the failure of a group goes whose entry is a dead letter: to its next worker, as every
result, so that each role writes to one stream only."""
log = get_logger(__name__)
_dead_letters = 0


class Broker(Calls):
    """What the roles say to each other, as calls: groups, samples, rounds, leases."""

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
            return read_entries(reply, consumer)

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
        return [read_entry(item, consumer) for item in reply]

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
        return [read_entry(item, consumer) for item in reply or []]

    async def unclaimed(self) -> set[str]:
        """Groups whose prompts nobody has claimed, as of about now."""
        key = self.key(PROMPTS)

        async def read() -> set[str]:
            groups = await self.client.xinfo_groups(key)
            if not groups:
                raise ResponseError(f"NOGROUP of {key}")
            last = groups[0]["last-delivered-id"].decode()
            waiting: Any = await self.client.xrange(key, min=f"({last}")
            return {read_entry(item, "").group for item in waiting if b"g" in item[1]}

        found: set[str] = await self.persist(read, "looking for unclaimed prompts")
        return found

    async def reclaim(self, stream: str, consumer: str, count: int) -> list[Entry]:
        """Entries of consumers whose lease has expired, now this consumer's."""
        reply = await self.script(
            "reclaim", [self.key(stream)], [consumer, self.key("lease", ""), count]
        )
        return [read_entry(item, consumer) for item in reply or []]

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
        _count_dead_letters(int(await self.script("bury", keys, [*args, failure, group])))

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
            entries = read_entries(reply, "")
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
        with contextlib.suppress(*LOST, ResponseError):
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
            with contextlib.suppress(*LOST, ResponseError):
                await in_time(self.client.unlink(key))

    async def _keep(self, key: str, value: str) -> None:
        while True:
            await asyncio.sleep(self.lease_s / 3)
            await self._renew(key, value)

    async def _renew(self, key: str, value: str) -> None:
        arguments = [value, str(int(self.lease_s * 1000))]
        try:
            await in_time(self._scripts["lease"](keys=[key], args=arguments))
        except (*LOST, ResponseError) as error:
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


def dead_letters_so_far() -> int:
    """How many entries this process has moved to the dead letters."""
    return _dead_letters


def _count_dead_letters(more: int) -> None:
    global _dead_letters
    _dead_letters += more


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
