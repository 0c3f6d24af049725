"""Batch files: complete or not there, and the same groups in the same order for a replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.batch_files import BatchFiles, StoredGroup
from common.errors import CheckpointError
from tests.unit.records import a_stored_group


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    return BatchFiles(tmp_path)


def write(files: BatchFiles, version: int, parts: list[list[StoredGroup]]) -> None:
    files.begin(version)
    for rank, groups in enumerate(parts):
        files.write_part(version, rank, groups)
    files.commit(version)


def test_the_parts_of_all_ranks_come_back_ordered_by_ordinal(files: BatchFiles) -> None:
    groups = [a_stored_group(n, attempt=n % 2) for n in (7, 2, 9, 4)]
    write(files, 3, [groups[:3], [], groups[3:]])
    assert files.versions() == [3]
    assert files.groups_of(3) == [(2, 0), (4, 0), (7, 1), (9, 1)]
    assert files.load(3) == sorted(groups, key=lambda group: group.ordinal)


def test_a_batch_without_its_manifest_does_not_exist_and_is_cleaned_away(files: BatchFiles) -> None:
    files.begin(1)
    files.write_part(1, 0, [a_stored_group(1)])
    assert files.versions() == []
    files.clean()
    assert list(files.root.iterdir()) == []


def test_a_batch_that_was_begun_before_a_crash_is_begun_anew(files: BatchFiles) -> None:
    files.begin(1)
    files.write_part(1, 1, [a_stored_group(5)])
    write(files, 1, [[a_stored_group(6)]])
    assert files.groups_of(1) == [(6, 0)]


def test_committing_twice_is_not_possible(files: BatchFiles) -> None:
    write(files, 1, [[a_stored_group(1)]])
    with pytest.raises(OSError, match="000001"):
        write(files, 1, [[a_stored_group(2)]])
    assert files.groups_of(1) == [(1, 0)]


@pytest.mark.parametrize("damage", ["missing", "shorter", "flipped"])
def test_a_part_that_is_missing_or_damaged_is_an_error_that_names_it(
    files: BatchFiles, damage: str
) -> None:
    write(files, 1, [[a_stored_group(1)], [a_stored_group(2)]])
    part = files.path(1) / "part-1"
    data = part.read_bytes()
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(data[:-1] if damage == "shorter" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"part-1 is missing or damaged"):
        files.load(1)


def test_a_manifest_that_cannot_be_read_is_an_error_that_names_it(files: BatchFiles) -> None:
    write(files, 1, [[a_stored_group(1)]])
    (files.path(1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        files.groups_of(1)


def test_removed_batches_are_gone_and_the_others_stay_in_order(files: BatchFiles) -> None:
    for version in (1, 2, 10):
        write(files, version, [[a_stored_group(version)]])
    files.remove([1, 2], keep=False)
    assert files.versions() == [10]
    assert sorted(path.name for path in files.root.iterdir()) == ["000010"]


def test_archived_batches_leave_the_run_and_can_still_be_read(
    files: BatchFiles, tmp_path: Path
) -> None:
    write(files, 1, [[a_stored_group(1)]])
    files.remove([1], keep=True)
    assert files.versions() == []
    assert (tmp_path / "archive" / "000001" / "manifest.json").exists()


def test_a_deletion_that_a_crash_interrupted_leaves_no_batch_file(files: BatchFiles) -> None:
    write(files, 1, [[a_stored_group(1)]])
    files.path(1).rename(files.root / "000001.tmp")  # as far as `remove` gets before it deletes
    assert files.versions() == []
    files.clean()
    assert list(files.root.iterdir()) == []
