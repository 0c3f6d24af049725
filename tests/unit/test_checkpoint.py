"""Checkpoints: valid by their manifest or skipped; the oldest go, the newest stay."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.errors import DiskError
from learner import checkpoint
from learner.checkpoint import MANIFEST, Checkpoints, saving


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, keep_last=2)


def save(checkpoints: Checkpoints, version: int) -> Path:
    checkpoints.begin(version)
    folder = checkpoints.unfinished(version)
    (folder / "state").mkdir()
    (folder / "state" / "rank0.pt").write_bytes(b"weights" * version)
    (folder / "latest").write_text(str(version))
    checkpoints.commit(version, {"world": 1})
    return checkpoints.path(version)


def test_a_run_without_checkpoints_has_no_newest_one(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest_valid() is None


def test_the_manifest_lists_every_file_with_size_and_hash(checkpoints: Checkpoints) -> None:
    folder = save(checkpoints, 5)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["version"] == 5
    assert manifest["world"] == 1
    assert {name: size for name, (size, _) in manifest["files"].items()} == {
        "latest": 1,
        "state/rank0.pt": 35,
    }
    assert checkpoints.fault(5) is None


def test_only_the_last_ones_are_kept(checkpoints: Checkpoints) -> None:
    for version in (9, 10, 11):
        save(checkpoints, version)
    assert checkpoints.versions() == [10, 11]
    assert checkpoints.newest_valid() == 11


@pytest.mark.parametrize(
    "damage", ["missing", "shorter", "flipped", "no manifest", "torn manifest"]
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    checkpoints: Checkpoints, damage: str
) -> None:
    save(checkpoints, 1)
    folder = save(checkpoints, 2)
    state = folder / "state" / "rank0.pt"
    if damage == "missing":
        state.unlink()
    elif damage == "shorter":
        state.write_bytes(state.read_bytes()[:-1])
    elif damage == "flipped":
        state.write_bytes(b"W" + state.read_bytes()[1:])
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        (folder / MANIFEST).write_text('{"version": 2, "fil')
    assert checkpoints.fault(2)
    assert checkpoints.newest_valid() == 1


def test_a_half_written_checkpoint_does_not_exist_and_is_cleaned_away(
    checkpoints: Checkpoints,
) -> None:
    checkpoints.begin(3)
    (checkpoints.unfinished(3) / "state.pt").write_bytes(b"half")
    assert checkpoints.newest_valid() is None
    assert checkpoints.recover() is None
    assert list(checkpoints.root.iterdir()) == []


def test_a_damaged_checkpoint_is_set_aside_does_not_count_and_can_be_written_again(
    checkpoints: Checkpoints,
) -> None:
    for version in (2, 3, 4):
        save(checkpoints, version)
    (checkpoints.path(4) / "latest").write_text("damaged")
    with capture_logs() as logs:
        assert checkpoints.recover() == 3
    assert [line["event"] for line in logs] == ["checkpoint skipped"]
    assert logs[0]["checkpoint"].endswith("000004") and "latest has 7 bytes" in logs[0]["why"]
    assert checkpoints.versions() == [3]
    assert (checkpoints.root / "000004.damaged").is_dir()
    assert checkpoints.contained() == 0
    save(checkpoints, 4)
    assert checkpoints.newest_valid() == 4
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["000003", "000004"]


def test_without_a_valid_checkpoint_all_are_set_aside(checkpoints: Checkpoints) -> None:
    for version in (2, 3):
        (save(checkpoints, version) / MANIFEST).unlink()
    with capture_logs():
        assert checkpoints.recover() is None
    assert checkpoints.versions() == []


def test_what_every_kept_checkpoint_contains_is_nothing_until_enough_are_kept(
    checkpoints: Checkpoints,
) -> None:
    """The base model counts as one of those kept: else the first of them has no other way back."""
    contained = []
    for version in (3, 6, 9):
        save(checkpoints, version)
        contained.append(checkpoints.contained())
    assert contained == [0, 3, 6]


def test_a_checkpoint_under_another_ones_name_is_not_taken_for_it(
    checkpoints: Checkpoints,
) -> None:
    save(checkpoints, 4).rename(checkpoints.path(7))
    assert checkpoints.fault(7) == "manifest.json is of version 4"


def test_a_large_checkpoint_is_checked_by_several_threads_with_the_same_result(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = checkpoints.facts(int(save(checkpoints, 2).name))["files"]
    monkeypatch.setattr(checkpoint, "THREADS_ABOVE", 0)
    assert checkpoints.facts(int(save(checkpoints, 3).name))["files"].keys() == expected.keys()
    assert checkpoints.fault(2) is None and checkpoints.fault(3) is None
    state = checkpoints.path(3) / "state" / "rank0.pt"
    state.write_bytes(b"W" + state.read_bytes()[1:])
    assert checkpoints.fault(3) == "state/rank0.pt does not match its hash"


def test_every_file_and_directory_is_synced_before_the_checkpoint_has_its_name(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def watch(fd: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        order.append("named" if checkpoints.path(5).exists() else "not named")

    monkeypatch.setattr(os, "fsync", watch)
    save(checkpoints, 5)
    before = order[: order.index("named") - 1]
    assert {"latest", "rank0.pt", MANIFEST, "state", "000005.tmp"} <= set(before)
    assert order[-2:] == ["checkpoints", "named"]


def test_a_full_disk_under_torch_is_an_error_that_says_so(tmp_path: Path) -> None:
    """torch says only that a position is unexpected."""
    with pytest.raises(DiskError, match=r"GiB left: free space"), saving(tmp_path):
        torch.save({"weights": torch.zeros(100_000)}, "/dev/full")
    with pytest.raises(RuntimeError, match="something else"), saving(tmp_path):
        raise RuntimeError("something else")


@pytest.mark.parametrize("step", ["fsync of a file", "manifest", "rename"])
def test_a_full_disk_is_an_error_and_the_older_checkpoint_stays(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(checkpoints, 1)
    name = {"fsync of a file": "fsync", "manifest": "write", "rename": "rename"}[step]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, full)
        with pytest.raises(DiskError, match="disk is full"):
            save(checkpoints, 2)
    assert checkpoints.recover() == 1
    assert sorted(path.name for path in checkpoints.root.iterdir()) == ["000001"]
    save(checkpoints, 2)
    assert checkpoints.newest_valid() == 2
