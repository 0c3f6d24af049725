"""Incarnations: which versions belong to the history that goes on, and who may write."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError, FencedError
from common.ledger import Ledger, Line
from common.messages import Version
from learner.timeline import RunLock, Timeline


def history(run_dir: Path, *starts: int) -> Timeline:
    for number in starts:
        Timeline.open(run_dir).begin(number)
    return Timeline.open(run_dir)


def test_each_start_is_an_incarnation_counted_from_one(tmp_path: Path) -> None:
    assert Timeline.open(tmp_path).incarnation == 0
    assert history(tmp_path, 0, 4).incarnation == 2


def test_versions_that_a_later_incarnation_went_back_behind_are_lost(tmp_path: Path) -> None:
    timeline = history(tmp_path, 0, 5, 9, 6)
    lost = [Version(1, 6), Version(1, 9), Version(2, 7), Version(2, 9), Version(3, 10)]
    kept = [
        Version(1, 0),
        Version(1, 5),
        Version(2, 5),
        Version(2, 6),
        Version(3, 6),
        Version(4, 20),
    ]
    assert [version for version in lost + kept if timeline.lost(version)] == lost


def test_the_weights_before_the_first_incarnation_are_never_lost(tmp_path: Path) -> None:
    assert not history(tmp_path, 0, 0).lost(Version(0, 0))


def test_a_crash_inside_the_write_leaves_the_old_history(tmp_path: Path) -> None:
    history(tmp_path, 0, 3)
    (tmp_path / "timeline.json.tmp").write_text("[0, 3, ")
    timeline = Timeline.open(tmp_path)
    assert timeline.incarnation == 2
    timeline.begin(3)
    assert Timeline.open(tmp_path).incarnation == 3


def test_an_older_incarnation_makes_nothing_durable_any_more(tmp_path: Path) -> None:
    """As after a lock that a file server has dropped: two learners, and both believe in it."""
    older = Timeline.open(tmp_path)
    older.begin(0)
    ledger = Ledger(tmp_path / "ledger.jsonl", older.require_current)
    ledger.record([Line(0, 0, "filtered", "all_wrong")])
    Timeline.open(tmp_path).begin(0)
    with pytest.raises(FencedError, match="another learner has taken over.*this one stops"):
        ledger.record([Line(1, 0, "filtered", "all_wrong")])
    with pytest.raises(FencedError):
        older.begin(0)
    assert older.incarnation == 1
    assert Timeline.open(tmp_path).incarnation == 2
    assert list(Ledger(tmp_path / "ledger.jsonl").fates) == [0]


@pytest.mark.parametrize("text", ["[0, 3", '{"a": 1}', '["0"]', "\x00\x00"])
def test_a_damaged_history_is_an_error_and_no_first_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"timeline\.json .*backup"):
        Timeline.open(tmp_path)


def test_a_second_learner_of_a_run_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    code = (
        "from pathlib import Path; from learner.timeline import RunLock; "
        f"RunLock(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert other.returncode != 0
    assert f"another learner (process {os.getpid()} on " in other.stderr
    assert f") works in {tmp_path}; stop it" in other.stderr
    with pytest.raises(CheckpointError, match=r"run\.name"):
        RunLock(tmp_path)
    del lock


def test_a_file_system_without_locks_is_refused_and_not_taken_for_another_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CheckpointError, match=r"has no locks \(No locks available\).*run\.dir"):
        RunLock(tmp_path)


def test_the_lock_is_given_to_no_child_that_would_outlive_the_learner(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    del lock
    RunLock(tmp_path)
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_the_lock_of_a_learner_that_was_killed_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from learner.timeline import RunLock; "
        f"lock = RunLock(Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    RunLock(tmp_path)
