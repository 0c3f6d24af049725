"""Writes that survive a crash at any operation, of the process or of the machine."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import disk
from common.errors import DiskError
from tests.unit.crashing_disk import Crash, CrashingDisk

OLD, NEW = b"old content " * 20, b"new and longer content " * 30


def crashes(root: Path, act: Callable[[], None]) -> Iterator[bool]:
    """Run `act` with a crash at each of its operations in turn, by kill and by loss of power, in
    several ways each. Yields after each crash; at last, True, after it has come to its end."""
    for seed in range(6):
        for fuse in range(100):
            made = CrashingDisk(root, random.Random(seed))
            made.fuse = fuse
            with made.installed():
                try:
                    act()
                    ended = True
                except Crash:
                    ended = False
            if seed:
                made.power_loss()
            made.forget()
            yield ended
            if ended:
                break


def test_a_file_that_is_replaced_has_its_old_or_its_new_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    seen = set()
    for ended in crashes(tmp_path, lambda: disk.replace_durable(path, NEW)):
        seen.add(path.read_bytes())
        assert seen <= {OLD, NEW}
        if ended:
            assert path.read_bytes() == NEW
            path.write_bytes(OLD)
    assert seen == {OLD, NEW}


def test_a_file_written_in_place_may_be_found_torn(tmp_path: Path) -> None:
    """The control: what the test above would find."""
    path = tmp_path / "file"
    seen = set()
    for _ in crashes(tmp_path, lambda: disk.write_durable(path, NEW)):
        seen.add(path.read_bytes() if path.exists() else b"")
        path.unlink(missing_ok=True)
    assert len(seen) > 2


def test_a_directory_that_was_made_is_there_after_a_loss_of_power(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    for ended in crashes(tmp_path, lambda: disk.make_dir(folder)):
        assert folder.is_dir() or not ended
        if ended:
            (tmp_path / "a").rename(tmp_path / "a.old")
            disk.remove_tree(tmp_path / "a.old")


def test_what_was_renamed_has_one_of_its_names(tmp_path: Path) -> None:
    source, target = tmp_path / "one" / "x", tmp_path / "two" / "x"
    for folder in (source, target.parent):
        folder.mkdir(parents=True)
    (source / "file").write_bytes(OLD)

    def move() -> None:
        if source.exists():
            disk.rename_durable(source, target)

    for ended in crashes(tmp_path, move):
        assert [(place / "file").exists() for place in (source, target)].count(True) == 1
        assert target.exists() or not ended
        if ended:
            target.rename(source)


def test_a_tree_that_is_removed_is_whole_or_under_another_name(tmp_path: Path) -> None:
    tree = tmp_path / "tree"

    def make() -> None:
        tree.mkdir()
        for name in ("a", "b"):
            (tree / name).write_bytes(OLD)

    make()
    for _ in crashes(tmp_path, lambda: disk.remove_tree(tree)):
        if tree.exists():
            assert sorted(path.name for path in tree.iterdir()) == ["a", "b"]
        else:
            make()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EIO, "device fails"),
        (errno.EPERM, "start the run again"),
    ],
)
def test_a_write_that_failed_names_the_file_the_reason_and_the_remedy(
    tmp_path: Path, number: int, remedy: str
) -> None:
    with pytest.raises(DiskError, match=remedy) as raised, disk.writing(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path / "file") in str(raised.value)
    assert os.strerror(number) in str(raised.value)


def test_bytes_that_the_system_does_not_take_at_once_are_written_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    disk.write_durable(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW
