"""The protocol of the learner's disk under thousands of crashes, and what goes wrong without it.

Every schedule kills the process or cuts the power up to four times, anywhere: between and inside
writes, between a rename and its fsync, in a half-written batch or checkpoint, between the ledger
and the server. The controls break one rule each, and the same schedules find them out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common import batch_files, disk
from common.batch_files import StoredGroup
from common.ledger import Ledger, Line
from learner.checkpoint import Checkpoints
from learner.groups import Chosen
from tests.unit.crash_game import Game, Learner, done
from tests.unit.crash_server import Breach

SCHEDULES, PARTS = 2000, 4
CONTROLS = 100
"""Schedules in which a broken rule has to be found out; about every second one does."""
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # it crashed


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: the disk is a model anyway."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    made = Path(tempfile.mkdtemp(dir=memory if usable else None))
    yield made
    shutil.rmtree(made)


def play(folder: Path, seed: int, learner: type[Learner] = Learner) -> Game:
    game = Game(folder / str(seed), seed, learner)
    with capture_logs():
        game.play()
    shutil.rmtree(folder / str(seed))
    return game


def breach(folder: Path, learner: type[Learner] = Learner) -> Breach:
    """How a promise is broken; the first of the schedules that finds it out."""
    for seed in range(CONTROLS):
        try:
            play(folder, seed, learner)
        except Breach as found:
            return found
    raise AssertionError("nothing went wrong")


@pytest.mark.parametrize("part", range(PARTS))
def test_every_group_has_one_fate_and_every_batch_stays_what_it_was(
    folder: Path, part: int
) -> None:
    crashes = 0
    for seed in range(part, SCHEDULES, PARTS):
        try:
            crashes += play(folder, seed).crashes
        except Breach as found:
            raise AssertionError(f"schedule {seed}: {found}") from found
    assert crashes > 2 * SCHEDULES / PARTS


class AcknowledgesAtTheCheckpoint(Learner):
    """The obvious alternative: no batch files; groups are trained once a checkpoint holds them."""

    def __init__(self, game: Game) -> None:
        self.waiting: list[tuple[int, list[Chosen]]] = []
        super().__init__(game)

    def commit(self, groups: list[StoredGroup], chosen: list[Chosen]) -> None:
        self.waiting.append((self.version + 1, chosen))
        self.dispatcher.admission.begin([item.ordinal for item in chosen])
        self.dispatcher._chosen.clear()
        for item in chosen:
            self.dispatcher.open.pop(item.ordinal)

    def fold(self) -> None:
        for version, chosen in self.waiting:
            lines = [Line(item.ordinal, item.attempt, "trained", "", version) for item in chosen]
            done(self.dispatcher.fold(lines))
            for item in chosen:
                done(self.dispatcher.streams.settle(str(item.ordinal)))
        self.waiting = []


class FoldsBeforeTheCheckpoint(Learner):
    def checkpoint(self) -> None:
        versions = self.files.versions()
        done(self.dispatcher.fold(self.files.fates(versions)))
        self.files.remove(versions, keep=False)
        super().checkpoint()


class TrainsBeforeTheBatchFile(Learner):
    def commit(self, groups: list[StoredGroup], chosen: list[Chosen]) -> None:
        self.game.trained(self.version + 1, [(g.ordinal, g.attempt) for g in groups])
        super().commit(groups, chosen)


@pytest.mark.parametrize(
    "learner", [AcknowledgesAtTheCheckpoint, FoldsBeforeTheCheckpoint, TrainsBeforeTheBatchFile]
)
def test_another_order_of_things_breaks_a_promise(folder: Path, learner: type[Learner]) -> None:
    assert breach(folder, learner)


def test_batch_files_that_are_not_synced_before_they_have_their_name_break_a_promise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_files, "write_durable", Path.write_bytes)
    assert breach(folder)


def test_names_of_batches_that_are_not_synced_break_a_promise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "fsync_dir", lambda path: None)
    assert breach(folder)


def test_ledger_lines_that_are_not_synced_break_a_promise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(ledger: Ledger, lines: list[Line]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            synced(ledger, lines)

    synced = Ledger._append
    monkeypatch.setattr(Ledger, "_append", append)
    assert breach(folder)


def test_checkpoints_that_are_not_checked_break_a_promise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "fault", lambda checkpoints, version: None)
    assert breach(folder)
