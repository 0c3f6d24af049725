"""Calls to the Redis-protocol server that outlast a lost connection, and the scripts.

A call is never retried inside the client library: a reply that was lost may have had an effect.
What is repeated here has to be idempotent, as all the scripts are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Self

import redis.asyncio as redis_asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, OutOfMemoryError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from common.address import address
from common.entry import STREAMS
from common.errors import FencedError
from common.patience import Patience, Wait
from common.refusal import forbidden, is_forbidden, refused

SCRIPTS = (
    *("dispatch", "publish", "settle", "acknowledge", "say", "end"),  # the learner's, fenced
    *("claim", "held", "put_sample", "advance", "reclaim", "release", "bury"),
    *("answer", "lease", "report"),
)
SOCKET_TIMEOUT_S = 5.0
"""Limit of one call; above every block of a read, so that an idle stream is no error."""
CONNECTIONS = 16
PATIENCE_S = 120.0
"""How long a server may be away before a call gives up; [redis] may say otherwise."""
LOST = (RedisConnectionError, RedisTimeoutError, OSError)
"""What a lost connection raises."""


class Calls:
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
    ) -> Self:
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
        calls = cls(client, run, lease_s, patience_s, address(url))
        try:
            await in_time(client.ping())
            await in_time(calls.ensure_streams())
        except (*LOST, ResponseError) as error:
            await client.aclose()
            raise await asyncio.to_thread(refused, url, error) from None
        return calls

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
            except LOST as error:
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
        with contextlib.suppress(*LOST):  # the call that is repeated will find it out
            await in_time(self.ensure_streams())

    async def script(self, name: str, keys: list[str], args: list[Any]) -> Any:
        """Run one of the scripts, again after a lost connection."""
        return await self.persist(lambda: self._scripts[name](keys=keys, args=args), name)


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


def _source(name: str) -> str:
    return (resources.files("common") / "scripts" / f"{name}.lua").read_text()
