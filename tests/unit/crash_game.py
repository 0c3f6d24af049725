"""A run that crashes: the real dispatcher, ledger, batch files and checkpoints, the rest in small.

`Game` plays a schedule from a seed: a learner works until the fuse of its disk burns through, in
the middle of any operation on the disk or the server; process or machine dies; what is left may be
damaged, the server emptied or put back to an older state; the next learner starts from that. The
weights of this learner are the list of the batches it was trained on.

The game keeps its own books of what was trained and of what the server was told to forget, and
raises `Breach` where a promise is broken.
"""

from __future__ import annotations

import json
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from common.audit import audit, mark_ended
from common.batch_files import BatchFiles, StoredGroup
from common.config import Config, parse_config
from common.entry import Entry
from common.errors import DapoError
from common.ledger import Fate, Ledger, Line, read_lines
from common.messages import Version
from learner.checkpoint import Checkpoints
from learner.dispatcher import Dispatcher
from learner.groups import Chosen
from learner.resume import frontier, plan_resume
from learner.timeline import Timeline
from tests.integration.pretend import rows
from tests.unit.crash_server import SAMPLES, Breach, DirectStreams, Server, Snapshot, require
from tests.unit.crashing_disk import Crash, CrashingDisk

BATCHES, GROUPS = 3, 2
LIVES = 5
"""Learners of one run; the last one is left in peace."""
ROWS = rows(40)
Batch = list[tuple[int, int]]
"""(ordinal, attempt) of its groups, in order."""


def done(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits for anything."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    work.close()
    raise AssertionError("it waits")


def make_config(folder: Path, every: int, keep: int, archive: bool) -> Config:
    tree = {
        "run": {"dir": str(folder), "name": "run", "batches": BATCHES},
        "model": {"path": "model", "max_length": 64},
        "data": {"train": ["train.jsonl"]},
        "sampling": {"max_tokens": 32},
        "algorithm": {"group_size": SAMPLES, "groups_per_batch": GROUPS},
        "admission": {"attempts": 3, "recycles": 1},
        "checkpoint": {"every": every, "keep_last": keep, "archive_batches": archive},
        "rollouts": {"per_batch": 0},  # payloads are read through a client, and there is none
    }
    return parse_config(tree, "game")


class DirectDispatcher(Dispatcher):
    """The dispatcher without its loops and threads."""

    def __init__(self, game: Game, ledger: Ledger, timeline: Timeline) -> None:
        super().__init__(game.config, game.server, ledger, timeline, ROWS)  # type: ignore[arg-type]
        self.streams = DirectStreams(game.config, game.server, timeline)  # type: ignore[arg-type]

    async def _record(self, lines: list[Line]) -> None:
        self.ledger.record(lines)

    def step(self, entries: list[Entry]) -> None:
        done(self._take(entries))
        done(self._lose())
        done(self._dispatch())


class Learner:
    """Rank 0 in the order of `learner.trainer` and `learner.lead`, alone and without an engine."""

    def __init__(self, game: Game) -> None:
        self.game, self.config = game, game.config
        folder = self.config.run_dir
        self.timeline = Timeline.open(folder)
        self.ledger = Ledger(folder / "ledger.jsonl", self.timeline.require_current)
        self.files = BatchFiles(folder)
        self.checkpoints = Checkpoints(folder, self.config.checkpoint.keep_last)
        self.dispatcher = DirectDispatcher(game, self.ledger, self.timeline)
        self.weights: list[Batch] = []
        self._seen: set[str] = set()
        self.resume()

    @property
    def version(self) -> int:
        return len(self.weights)

    def resume(self) -> None:
        plan = plan_resume(self.checkpoints, self.files, self.ledger)
        self.saved = plan.checkpoint or 0
        if plan.checkpoint is not None:
            text = (self.checkpoints.path(plan.checkpoint) / "state" / "weights.json").read_text()
            self.weights = [[(o, a) for o, a in batch] for batch in json.loads(text)]
        for batch in plan.batches:
            self.step([(group.ordinal, group.attempt) for group in self.files.load(batch)])
        self.timeline.begin(self.version)
        in_files = [group for v in self.files.versions() for group in self.files.groups_of(v)]
        done(self.dispatcher.start(self.version, in_files))
        self.publish()

    def publish(self) -> None:
        version = Version(self.timeline.incarnation, self.version)
        done(self.game.server.publish(version.incarnation, str(version)))
        self.dispatcher.admission.publish(version.number, [])
        self.dispatcher.may_dispatch = True
        self.game.published(self.version)

    def step(self, batch: Batch) -> None:
        self.weights.append(batch)
        self.game.trained(self.version, batch)

    def run(self) -> None:
        """Train to the end."""
        while self.version < BATCHES:
            for _ in range(3):
                self.game.server.work()
            self.dispatcher.step(self.entries())
            if batch := done(self.dispatcher.choose_batch()):
                self.train(batch)
        if self.version > self.saved:
            self.checkpoint()
        done(self.dispatcher.end())
        mark_ended(self.config.run_dir, self.version)

    def entries(self) -> list[Entry]:
        """Verdicts that this learner has not read yet."""
        fresh = {k: v for k, v in self.game.server.verdicts.items() if k not in self._seen}
        self._seen |= fresh.keys()
        return [Entry(entry, data) for entry, data in fresh.items()]

    def train(self, chosen: list[Chosen]) -> None:
        stored = [self.fetch(item) for item in chosen]
        missing = [item.ordinal for item, group in zip(chosen, stored, strict=True) if not group]
        if missing:
            done(self.dispatcher.not_committed(missing, "payload missing"))
            return
        groups = [group for group in stored if group]
        self.commit(groups, chosen)
        self.step(sorted((group.ordinal, group.attempt) for group in groups))
        done(self.dispatcher.trained_batch())
        self.publish()
        if self.version % self.config.checkpoint.every == 0:
            self.checkpoint()

    def fetch(self, item: Chosen) -> StoredGroup | None:
        group = self.game.server.open.get(str(item.ordinal))
        if group is None or group.attempt != item.attempt or not group.samples:
            return None
        return StoredGroup(item.ordinal, item.attempt, group.prompt, group.verdict, group.samples)

    def commit(self, groups: list[StoredGroup], chosen: list[Chosen]) -> None:
        self.files.begin(self.version + 1)
        self.files.write_part(self.version + 1, 0, groups)
        self.timeline.require_current()
        self.files.commit(self.version + 1)
        done(self.dispatcher.committed(chosen))

    def checkpoint(self) -> None:
        folder = self.checkpoints.unfinished(self.version)
        self.checkpoints.begin(self.version)
        (folder / "state").mkdir()
        (folder / "state" / "weights.json").write_text(json.dumps(self.weights))
        (folder / "random_0.pt").write_bytes(b"random")
        self.checkpoints.commit(self.version, frontier(self.ledger, self.dispatcher.trained))
        self.saved = self.version
        self.fold()

    def fold(self) -> None:
        """As `Lead.checkpointed`."""
        done_now = [v for v in self.files.versions() if v <= self.checkpoints.contained()]
        done(self.dispatcher.fold(self.files.fates(done_now)))
        self.files.remove(done_now, keep=self.config.checkpoint.archive_batches)


class Game:
    """One schedule."""

    def __init__(self, folder: Path, seed: int, learner: type[Learner] = Learner) -> None:
        self.dice = random.Random(seed)
        self.make_learner = learner
        every, keep = self.dice.choice([(1, 1), (1, 2), (2, 1), (2, 2), (BATCHES, 1)])
        self.config = make_config(folder, every, keep, archive=self.dice.random() < 0.3)
        self.config.run_dir.mkdir(parents=True)
        (self.config.run_dir / "config.toml").write_text(f"[run]\nbatches = {BATCHES}\n")
        self.disk = CrashingDisk(folder, self.dice)
        self.server = Server(self.disk, self.dice)
        self.history: dict[int, Batch] = {}
        self.batch_of: dict[int, int] = {}
        self.known: dict[int, Fate] = {}
        self.newest = 0
        self.flipped = False
        self.crashes = 0

    # --- the books ------------------------------------------------------------------------------

    def trained(self, version: int, batch: Batch) -> None:
        before = self.history.setdefault(version, batch)
        require(before == batch, f"batch {version} was {before} and is now {batch}")
        for ordinal, _ in batch:
            where = self.batch_of.setdefault(ordinal, version)
            require(where == version, f"group {ordinal} is trained in {where} and {version}")

    def published(self, version: int) -> None:
        require(version >= self.newest, f"version {version} after {self.newest}")
        self.newest = version

    def check_disk(self) -> None:
        """Balanced, and every fate that was acted on is still what it was."""
        run_dir = self.config.run_dir
        result = audit(run_dir, {int(gid) for gid in self.server.open})
        require(result.balanced, result.as_text())
        fates: dict[int, Fate] = {}
        files = BatchFiles(run_dir)
        for line in [*files.fates(files.versions()), *read_lines(run_dir / "ledger.jsonl")]:
            fates[line.ordinal] = line.fate
        lost = self.server.forgotten - fates.keys()
        require(not lost, f"groups {lost} were forgotten on the server and have no fate")
        for ordinal in self.server.forgotten:
            fate = self.known.setdefault(ordinal, fates[ordinal])
            require(fates[ordinal] == fate, f"{ordinal} was {fate} and is {fates[ordinal]}")

    # --- the schedule ---------------------------------------------------------------------------

    def play(self) -> None:
        """Every life of the run, and the accounts at its end."""
        earlier: list[Snapshot] = []
        try:
            with self.disk.installed():
                for life in range(LIVES):
                    last = life == LIVES - 1
                    self.disk.fuse = None if last else int(2 ** self.dice.uniform(0, 8.5))
                    if self._live():
                        break
                    self.disk.fuse = None
                    self._between(earlier)
                self.disk.fuse = None
                self._end()
        except (DapoError, ValueError) as error:
            raise Breach(f"it cannot go on: {error}") from error
        finally:
            self.disk.forget()

    def _live(self) -> bool:
        """Whether the learner came to the end of the run."""
        try:
            self.make_learner(self).run()
        except Crash:
            self.crashes += 1
            return False
        return True

    def _between(self, earlier: list[Snapshot]) -> None:
        if self.dice.random() < 0.6:
            self.disk.power_loss()
        if self.dice.random() < 0.3:
            self._damage()
        snapshot = self.server.snapshot()
        self.server.mishap(earlier)
        earlier.append(snapshot)
        if (self.config.run_dir / "ledger.jsonl").exists():
            self.check_disk()

    def _damage(self) -> None:
        """A flipped bit in the newest checkpoint, where another way back is kept."""
        checkpoints = Checkpoints(self.config.run_dir, self.config.checkpoint.keep_last)
        spare = self.config.checkpoint.keep_last > 1 or self.config.checkpoint.archive_batches
        if not checkpoints.versions() or not spare or self.flipped:
            return
        self.flipped = True
        folder = checkpoints.path(checkpoints.versions()[-1])
        self.disk.flip(self.dice.choice([p for p in sorted(folder.rglob("*")) if p.is_file()]))

    def _end(self) -> None:
        self.check_disk()
        run_dir = self.config.run_dir
        result = audit(run_dir, {int(gid) for gid in self.server.open})
        require(result.complete and not result.in_flight, result.as_text())
        require(result.trained == BATCHES * GROUPS == len(self.batch_of), result.as_text())
        require(sorted(self.history) == list(range(1, BATCHES + 1)), "a batch is missing")
        if self.config.checkpoint.archive_batches:
            files = BatchFiles(run_dir)
            for version, batch in self.history.items():
                groups = [(group.ordinal, group.attempt) for group in files.load(version)]
                require(groups == batch, f"the archive has another batch {version}")
