"""Batch files: complete or not there, and the same groups in the same order for a replay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.batch_files import BatchFiles, StoredGroup
from common.errors import CheckpointError, DiskError
from common.ledger import Line
from tests.unit.records import a_stored_group


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    return BatchFiles(tmp_path)


def write(files: BatchFiles, version: int, parts: list[list[StoredGroup]]) -> None:
    files.begin(version)
    for rank, groups in enumerate(parts):
        files.write_part(version, rank, groups)
    files.commit(version, len(parts))


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
    with pytest.raises(DiskError, match="000001 cannot be written"):
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
    with pytest.raises(CheckpointError, match=r"part-1 is (missing|damaged).* from a backup"):
        files.load(1)


def test_a_batch_is_not_committed_without_the_part_of_every_rank(files: BatchFiles) -> None:
    files.begin(1)
    files.write_part(1, 0, [a_stored_group(1)])
    with pytest.raises(CheckpointError, match="part-1 is missing"):
        files.commit(1, parts=2)
    assert files.versions() == []


def test_a_part_that_is_left_over_from_more_ranks_is_no_part_of_the_batch(
    files: BatchFiles,
) -> None:
    files.begin(1)
    for rank in (0, 1, 2):
        files.write_part(1, rank, [a_stored_group(rank)])
    files.commit(1, parts=2)
    assert files.groups_of(1) == [(0, 0), (1, 0)]


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


def test_archived_batches_leave_the_run_and_replay_it_in_order(
    files: BatchFiles, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        write(files, version, [[a_stored_group(10 - version)], [a_stored_group(20 + version)]])
    files.remove([1, 2], keep=True)
    assert files.versions() == [3]
    assert (tmp_path / "archive" / "000001").is_dir()
    replayed = [[group.ordinal for group in files.load(v)] for v in files.after(0, folded=2)]
    assert replayed == [[9, 21], [8, 22], [7, 23]]
    assert files.load(2) == [a_stored_group(8), a_stored_group(22)]


def test_archiving_what_is_archived_already_removes_the_copy(files: BatchFiles) -> None:
    write(files, 1, [[a_stored_group(1)]])
    shutil.copytree(files.path(1), files.archive / "000001")
    files.remove([1], keep=True)
    assert files.versions() == []
    assert files.load(1) == [a_stored_group(1)]


def test_what_is_trained_again_are_the_batches_after_the_checkpoint(files: BatchFiles) -> None:
    for version in (3, 4, 5):
        write(files, version, [[a_stored_group(version)]])
    assert files.after(3, folded=2) == [4, 5]
    assert files.after(2, folded=2) == [3, 4, 5]
    assert files.after(5, folded=2) == []
    assert BatchFiles(files.root / "new").after(0) == []


@pytest.mark.parametrize(
    ("there", "checkpoint", "folded", "message"),
    [
        ([5, 6], 3, 3, "batch 4 would have to be trained again"),
        ([4, 6], 3, 3, "batch 5 would have to be trained again"),
        ([], 0, 12, "batches 1, 2, 3, 4, 5, 6, 7, 8, … would have to be trained again"),
        ([], 2, 4, "batches 3, 4 would have to be trained again"),
    ],
)
def test_a_batch_that_is_lost_is_an_error_and_no_run_from_older_weights(
    files: BatchFiles, there: list[int], checkpoint: int, folded: int, message: str
) -> None:
    for version in there:
        write(files, version, [[a_stored_group(version)]])
    with pytest.raises(CheckpointError, match=message):
        files.after(checkpoint, folded)


def test_a_checkpoint_of_batches_that_nobody_knows_is_an_error(files: BatchFiles) -> None:
    write(files, 6, [[a_stored_group(6)]])
    assert files.after(6, folded=5) == []
    with pytest.raises(CheckpointError, match=r"checkpoint of batch 7 is newer .* end at batch 6"):
        files.after(7, folded=5)


def test_batch_files_say_what_they_are_as_lines_of_the_ledger(files: BatchFiles) -> None:
    write(files, 4, [[a_stored_group(8, attempt=1)], [a_stored_group(3)]])
    assert files.fates([4]) == [Line(3, 0, "trained", "", 4), Line(8, 1, "trained", "", 4)]
    assert files.fates([]) == []


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_batch(
    files: BatchFiles,
) -> None:
    write(files, 1, [[a_stored_group(1)]])
    files.begin(2)
    (files.root / "000002.tmp" / "part-0").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"000002\.tmp/part-0 .*disk is full.*start the run again"):
        files.write_part(2, 0, [a_stored_group(2)])
    files.clean()
    assert files.versions() == [1]
    assert files.load(1) == [a_stored_group(1)]


def test_a_deletion_that_a_crash_interrupted_leaves_no_batch_file(files: BatchFiles) -> None:
    write(files, 1, [[a_stored_group(1)]])
    files.path(1).rename(files.root / "000001.tmp")  # as far as `remove` gets before it deletes
    assert files.versions() == []
    files.clean()
    assert list(files.root.iterdir()) == []
