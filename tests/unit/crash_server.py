"""The server of a run that crashes: its scripts for the learner, and workers behind it."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

from common.messages import Version, encode
from learner.groups import OnServer
from learner.streams import Streams
from tests.unit.crashing_disk import CrashingDisk
from tests.unit.records import a_judgement, a_verdict

SAMPLES = 2


class Breach(AssertionError):
    """A promise is broken."""


def require(truth: bool, what: str) -> None:
    if not truth:
        raise Breach(what)


@dataclass
class OpenOnServer:
    prompt: bytes
    attempt: int
    least: Version
    state: str = "dispatched"
    verdict: bytes = b""
    samples: list[bytes] = field(default_factory=list)


Snapshot = tuple[dict[str, OpenOnServer], dict[str, bytes], int]
"""What a server has saved."""


class Server:
    """The learner's side of the server, as its scripts are written, and workers behind it."""

    def __init__(self, disk: CrashingDisk, dice: random.Random) -> None:
        self.disk, self.dice = disk, dice
        self.open: dict[str, OpenOnServer] = {}
        self.verdicts: dict[str, bytes] = {}
        self.fence, self.published = 0, Version(0, 0)
        self.forgotten: set[int] = set()
        self._entries = 0

    def key(self, *parts: object) -> str:
        return ":".join(map(str, parts))

    async def script(self, name: str, keys: list[str], args: list[Any]) -> None:
        self.disk.tick()  # the call is lost, or below: its answer is
        require(args[0] >= self.fence, "an older incarnation came through")
        self.fence, gid = args[0], args[1]
        known = self.open.get(gid)
        if name == "settle":
            self.forgotten.add(int(gid))
            self.open.pop(gid, None)
            self.verdicts.pop(args[2], None)
        elif known is None or known.attempt < args[2]:
            self.open[gid] = OpenOnServer(args[4], args[2], Version.parse(args[3]))
        self.disk.tick()

    async def publish(self, fence: int, version: str) -> list[str]:
        require(fence >= self.fence, "an older incarnation came through")
        self.fence = fence
        if version:
            self.published = Version.parse(version)
        return []

    async def unclaimed(self) -> set[str]:
        return set()

    async def have_samples(self, group: str, attempt: int, count: int) -> list[bool]:
        return [False] * count

    # --- generators and verifiers ---------------------------------------------------------------

    def work(self) -> None:
        """One group gets its verdict."""
        waiting = [gid for gid, group in self.open.items() if group.state == "dispatched"]
        if not waiting:
            return
        gid = self.dice.choice(waiting)
        group = self.open[gid]
        number = self.dice.randint(min(group.least.number, self.published.number),
                                   self.published.number)  # fmt: skip
        fate: Any = self.dice.choices(["accepted", "filtered", "failed"], [6, 2, 1])[0]
        verdict = a_verdict(int(gid), group.attempt, fate, "mixed", ("correct", "wrong"))
        version = Version(self.published.incarnation, number)
        verdict.samples[:] = [a_judgement(s.outcome, 3, version) for s in verdict.samples]
        group.state, group.verdict = "judged", encode(verdict)
        group.samples = [b"sample"] * SAMPLES
        self.deliver(group.verdict)

    def deliver(self, verdict: bytes) -> None:
        self._entries += 1
        self.verdicts[str(self._entries)] = verdict

    def snapshot(self) -> Snapshot:
        return copy.deepcopy((self.open, self.verdicts, self.fence))

    def mishap(self, earlier: list[Snapshot]) -> None:
        """What may happen to a server while nobody looks."""
        event = self.dice.choice(["none", "none", "emptied", "put back", "repeated"])
        if event == "emptied":
            self.open, self.verdicts, self.fence = {}, {}, 0
        elif event == "put back" and earlier:
            self.open, self.verdicts, self.fence = copy.deepcopy(self.dice.choice(earlier))
        elif event == "repeated":
            for verdict in list(self.verdicts.values()):
                self.deliver(verdict)


class DirectStreams(Streams):
    """Streams whose reads need no connection."""

    async def known(self) -> dict[str, OnServer]:
        server: Any = self.broker
        return {
            gid: OnServer(group.state, group.attempt, group.least.number)
            for gid, group in server.open.items()
        }

    async def acknowledge(self, entry: str) -> None:
        server: Any = self.broker
        server.verdicts.pop(entry, None)
        server.disk.tick()
