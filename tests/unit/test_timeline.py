"""Incarnations: which versions belong to the history that goes on, and who may write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import CheckpointError
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
    (tmp_path / "timeline.tmp").write_text("[0, 3, ")
    timeline = Timeline.open(tmp_path)
    assert timeline.incarnation == 2
    timeline.begin(3)
    assert Timeline.open(tmp_path).incarnation == 3


def test_a_second_learner_of_a_run_is_refused_and_told_what_to_do(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    code = (
        "from pathlib import Path; from learner.timeline import RunLock; "
        f"RunLock(Path({str(tmp_path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert other.returncode != 0
    assert f"another learner works in {tmp_path}" in other.stderr
    with pytest.raises(CheckpointError, match=r"run\.name"):
        RunLock(tmp_path)
    del lock


def test_the_lock_of_a_learner_that_was_killed_is_free(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from learner.timeline import RunLock; "
        f"lock = RunLock(Path({str(tmp_path)!r})); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    RunLock(tmp_path)
