"""Checkpoints: valid by their manifest or skipped; the oldest go, the newest stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner.checkpoint import MANIFEST, Checkpoints


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
    checkpoints.clean()
    assert list(checkpoints.root.iterdir()) == []


def test_a_checkpoint_written_again_replaces_the_old_one_whole(checkpoints: Checkpoints) -> None:
    (save(checkpoints, 4) / "latest").write_text("damaged")
    assert checkpoints.newest_valid() is None
    save(checkpoints, 4)
    assert checkpoints.newest_valid() == 4
