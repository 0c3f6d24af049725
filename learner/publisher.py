"""Publication of weights in rounds (see `common.rounds` for the order of messages).

Invariants:
- Nobody waits in a collective for someone who has not answered: the group of a round is formed of
  members that said "ready".
- Only members that said "done" and whose probe agrees with the learner's own log-probs are
  published; everyone else gives its claims back and is served later.
- Any failure inside a round is a `RoundError` within the round's deadline; the survivors are
  served by the next round under a new prefix.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from common.broker import Broker
from common.config import Config
from common.errors import RoundError
from common.failpoints import failpoint
from common.log import get_logger
from common.messages import Version
from common.rounds import Call, Go, Publish, Reply, is_peers_fault
from learner.timeline import Timeline

POLL_S = 0.01
LIVING_S = 0.5
BACKOFF_S = (2.0, 60.0)
log = get_logger(__name__)


@dataclass
class Trouble:
    """A member that did not come through a round: when it is waited for again."""

    failures: int = 0
    until: float = 0.0


class Publisher:
    """The learner's conversation in weight rounds; the broadcast itself is the trainer's."""

    def __init__(self, config: Config, broker: Broker, timeline: Timeline, host: str) -> None:
        self.config, self.broker, self.timeline, self.host = config, broker, timeline, host
        self.members: set[str] = set()  # hold the published version
        self.ending = False
        """The learner is told to end: nobody is waited for any more."""
        self._trouble: dict[str, Trouble] = {}
        self._rounds = 0
        self._look_again = 0.0
        self._version = ""
        self._prefix = ""
        self._in_group: dict[str, int] = {}

    async def living(self) -> set[str]:
        """Generators with a lease."""
        return set(await self.broker.members("generator"))

    async def joiners(self) -> set[str]:
        """Living generators that do not hold the published version and are not backing off.

        All of them, if the server has lost what was published: nobody could claim any more.
        """
        living = await self.living()
        if self.members and await self.broker.published() != self._version:
            log.warning("the server lost the published version; it goes out again")
            self.members.clear()
        self.members &= living
        now = time.monotonic()
        for name in list(self._trouble):
            if name not in living:
                del self._trouble[name]
        return {
            name
            for name in living - self.members
            if name not in self._trouble or self._trouble[name].until <= now
        }

    async def call(self, version: Version) -> tuple[str, dict[str, Reply]]:
        """Ask who is there; returns the round's id and the members that are ready.

        Waits for every living generator that is not backing off, for `ready_timeout_s` at most,
        and for nobody who dies meanwhile.
        """
        self._rounds += 1
        round_id = f"{self.timeline.incarnation}.{self._rounds}"
        expected = self.members | await self.joiners()
        living = await self.living()
        expected &= living
        await self.broker.say(Call(round_id, str(version)))
        failpoint("round_called")
        now = time.monotonic()
        deadline, look_again = now + self.config.publish.ready_timeout_s, now + LIVING_S
        ready: dict[str, Reply] = {}
        while now < deadline and not self.ending:
            answers = await self.broker.answers(round_id)
            ready = {name: reply for name, reply in answers.items() if reply.status == "ready"}
            if expected & living <= set(ready):
                break
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            if now >= look_again:
                living, look_again = await self.living(), now + LIVING_S
        living = await self.living()
        for name in expected - set(ready):
            self._failed(name, self._why_missing(name in living, "not ready in time"))
        return round_id, {name: reply for name, reply in ready.items() if name in living}

    def plan(
        self,
        round_id: str,
        version: Version,
        ready: dict[str, Reply],
        manifest: list[tuple[str, tuple[int, ...]]],
        port: int,
        probe: list[int],
    ) -> Go:
        """The `go` message: ranks for the members, and whether a new group has to be formed."""
        ranks, rank = {}, 1
        for name in sorted(ready):
            ranks[name] = rank
            rank += ready[name].workers
        fresh = not self._prefix or ranks != self._in_group
        if fresh:
            self._prefix, self._in_group = f"round-{round_id}", ranks
        publish = self.config.publish
        return Go(
            round=round_id, version=str(version), prefix=self._prefix, fresh=fresh,
            host=self.host, port=port, backend=self._backend(ready), world=rank, ranks=ranks,
            manifest=[(name, list(shape)) for name, shape in manifest],
            dtype=self.config.model.dtype, bucket_bytes=int(publish.bucket_mib * 2**20),
            timeout_s=publish.round_timeout_s, probe=probe,
        )  # fmt: skip

    def _backend(self, ready: dict[str, Reply]) -> Literal["gloo", "nccl"]:
        wanted = self.config.publish.backend
        if wanted != "auto":
            return wanted
        return "nccl" if all(reply.device == "cuda" for reply in ready.values()) else "gloo"

    async def say(self, go: Go) -> None:
        await self.broker.say(go)
        failpoint("round_go_said")

    async def collect(
        self, go: Go, own: npt.NDArray[np.float32], deadline: float
    ) -> tuple[list[str], float]:
        """Wait for "done"; compare probes. Returns the members that came through, the worst gap."""
        waiting, done, worst = set(go.ranks), [], 0.0
        failed: dict[str, str] = {}
        while waiting and not self.ending and time.monotonic() < deadline:
            answers = await self.broker.answers(go.round)
            for name in sorted(waiting):
                reply = answers.get(name)
                if reply is None:  # the server was emptied meanwhile
                    continue
                if reply.status == "failed":
                    failed[name] = reply.error
                elif reply.status == "done":
                    gap = probe_gap(reply, own, self.config.generator.engine == "simulated")
                    worst = max(worst, gap)
                    if gap <= self.config.probe_tolerance:
                        done.append(name)
                    else:
                        failed[name] = (
                            f"its probe is off by {gap:.2g}, above publish.probe_tolerance = "
                            f"{self.config.probe_tolerance:g}"
                        )
                else:
                    continue
                waiting.discard(name)
            if waiting and not waiting & await self.living():
                break
            await asyncio.sleep(POLL_S)
        failpoint("round_collected")
        living = await self.living()
        for name in waiting:
            failed[name] = self._why_missing(name in living, "not done before the deadline")
        self._blame(failed)
        return sorted(done), worst

    def _blame(self, failed: dict[str, str]) -> None:
        """Who failed by itself backs off; who failed with it is served again at once.

        One that always fails would otherwise keep all others in step with itself for ever.
        """
        at_fault = {name for name, why in failed.items() if not is_peers_fault(why)}
        for name, why in failed.items():
            if name in at_fault or not at_fault:
                self._failed(name, why)
            else:
                self.members.discard(name)
                self.broken()
                log.warning("served again", member=name, why=why)

    async def publish(self, round_id: str, version: Version, members: list[str]) -> list[int]:
        """Make a version the published one. Returns the ordinals of prompts nobody has claimed."""
        self._version = str(version)
        waiting = await self.broker.publish(self.timeline.incarnation, self._version)
        failpoint("round_published")
        await self.broker.say(Publish(round_id, str(version), members))
        self.members = set(members)
        for name in members:
            self._trouble.pop(name, None)
        return [int(gid) for gid in waiting if gid.isdecimal()]

    async def require_living(self, go: Go) -> None:
        """Looked up now and then: raises RoundError once a member is dead, or this end is near."""
        if self.ending:
            raise RoundError("the weight group did not form: the learner ends")
        now = time.monotonic()
        if now < self._look_again:
            return
        self._look_again = now + LIVING_S
        if gone := go.ranks.keys() - await self.living():
            names = ", ".join(sorted(gone))
            raise RoundError(f"the weight group did not form: {names} died meanwhile")

    def broken(self) -> None:
        """The group of the last round is of no use: the next round forms a new one."""
        self._prefix = ""

    def _why_missing(self, alive: bool, slow: str) -> str:
        if self.ending:
            return "the learner ends"
        return slow if alive else "its lease expired"

    def _failed(self, name: str, why: str) -> None:
        """Note a member that did not come through; it backs off longer each time."""
        trouble = self._trouble.setdefault(name, Trouble())
        delay = min(BACKOFF_S[0] * 2**trouble.failures, BACKOFF_S[1])
        trouble.failures += 1
        trouble.until = time.monotonic() + delay
        self.members.discard(name)
        self.broken()
        log.warning("left out", member=name, why=why, again_in_s=delay)


def probe_gap(reply: Reply, own: npt.NDArray[np.float32], simulated: bool = False) -> float:
    """Mean |Δ log p| between a member's probe and the learner's own; inf if they do not fit.

    A simulated engine has no log-probs to send, which is right only in a `simulated` run.
    """
    if simulated and not reply.probe:
        return 0.0
    theirs: Any = np.asarray(reply.probe, dtype=np.float32)
    if theirs.shape != own.shape or not np.isfinite(theirs).all():
        return float("inf")
    return float(np.abs(theirs - own).mean())
