"""The dispatcher's calls to the server: prompts out, groups forgotten, what is known there.

Every call is idempotent and repeated until the server answers (`Broker.persist`), and every one
that changes a group carries the fencing number.
"""

from __future__ import annotations

from typing import Any

from common.broker import Broker
from common.config import Config
from common.data import Row
from common.entry import PROMPTS, ROLLOUTS, VERDICTS
from common.messages import Prompt, Version, encode
from learner.groups import OnServer
from learner.timeline import Timeline


class Streams:
    """One learner's groups on the server."""

    def __init__(self, config: Config, broker: Broker, timeline: Timeline) -> None:
        self.config, self.broker, self.timeline = config, broker, timeline

    def prompt(
        self, gid: str, ordinal: int, attempt: int, index: int, row: Row, published: int
    ) -> Prompt:
        """The record of a prompt; negative ordinals are problems of an evaluation."""
        evaluation, settings, sampling = ordinal < 0, self.config.eval, self.config.sampling
        return Prompt(
            group=gid, ordinal=ordinal, attempt=attempt, evaluation=evaluation, row=index,
            samples=settings.samples if evaluation else self.config.algorithm.group_size,
            least=Version(self.timeline.incarnation, published),
            token_ids=row.token_ids, seed=(self.config.run.seed * 1_000_003 + ordinal) % 2**53,
            temperature=settings.temperature if evaluation else sampling.temperature,
            top_p=settings.top_p if evaluation else sampling.top_p,
            max_tokens=sampling.max_tokens,
            gold=row.gold, checker=row.checker, boxed=row.boxed, text=row.text,
        )  # fmt: skip

    async def put(self, prompt: Prompt) -> None:
        """Bring a group into the world, or give it another attempt."""
        key = self.broker.key
        keys = [key("fence"), key("open"), key("group", prompt.group), key(PROMPTS)]
        prefix = key("sample", prompt.group, "")
        fence = self.timeline.incarnation
        args = [fence, prompt.group, prompt.attempt, str(prompt.least), encode(prompt)]
        await self.broker.script("dispatch", keys, [*args, prompt.samples, prefix])

    async def settle(self, gid: str, entry: str = "") -> None:
        """Forget a group whose fate is durable, and acknowledge its verdict."""
        key = self.broker.key
        keys = [key("fence"), key("open"), key("group", gid), key(VERDICTS)]
        samples = max(self.config.algorithm.group_size, self.config.eval.samples)
        args = [self.timeline.incarnation, gid, entry, samples, key("sample", gid, "")]
        await self.broker.script("settle", keys, args)

    async def acknowledge(self, entry: str) -> None:
        """Acknowledge a verdict that changes nothing."""
        keys = [self.broker.key("fence"), self.broker.key(VERDICTS)]
        await self.broker.script("acknowledge", keys, [self.timeline.incarnation, entry])

    async def known(self) -> dict[str, OnServer]:
        """Groups on the server, by id."""
        client, key = self.broker.client, self.broker.key

        async def read() -> dict[str, OnServer]:
            gids: Any = await client.smembers(key("open"))
            pipe = client.pipeline(transaction=False)
            for gid in gids:
                pipe.hmget(key("group", gid.decode()), "state", "attempt", "least")
            found = zip(gids, await pipe.execute() if gids else [], strict=True)
            return {gid.decode(): _on_server(*fields) for gid, fields in found if fields[0]}

        result: dict[str, OnServer] = await self.broker.persist(read, "reading open groups")
        return result

    async def depths(self) -> dict[str, int]:
        """Entries in each stream."""
        client, key = self.broker.client, self.broker.key

        async def ask() -> dict[str, int]:
            return {name: await client.xlen(key(name)) for name in (PROMPTS, ROLLOUTS, VERDICTS)}

        result: dict[str, int] = await self.broker.persist(ask, "queue depths")
        return result


def _on_server(state: bytes, attempt: bytes, least: bytes) -> OnServer:
    return OnServer(state.decode(), int(attempt), Version.parse(least.decode()).number)
