"""Writes that survive a crash: what the ledger, batch files and checkpoints are built on.

A byte counts once its file was fsynced, a name once its directory was; a rename is atomic. That is
POSIX, and what ext4, xfs, btrfs and NFS keep; `DiskError` is what a write that failed becomes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.errors import DiskError

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space, then start the run again; what it had made "
    "durable is whole",
    errno.EDQUOT: "the quota is used up: raise it or free space, then start the run again",
    errno.EFBIG: "the file would be larger than the limit (ulimit -f): raise it",
    errno.EROFS: "the disk is read-only: look at the kernel's log for why",
    errno.EIO: "the device fails: look at the kernel's log, and move the run elsewhere",
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what a write that failed was about, and what to do.

    Raises:
        DiskError: instead of an OSError of the block.
    """
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "mend it, then start the run again")
        raise DiskError(f"{path} cannot be written ({error.strerror}); {remedy}") from error


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: the system may take fewer at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_durable(path: Path, data: bytes) -> None:
    """Write a whole file, fsynced; its name is not durable yet (`fsync_dir`).

    Raises:
        DiskError: the disk is full or fails.
    """
    with writing(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)


def replace_durable(path: Path, data: bytes) -> None:
    """Give a file new content: whoever reads it, after a crash too, finds the old or the new."""
    temporary = path.with_name(path.name + ".tmp")
    write_durable(temporary, data)
    rename_durable(temporary, path)


def rename_durable(source: Path, target: Path) -> None:
    """Rename within one file system, and make the new name durable before the old one's end."""
    with writing(target):
        os.rename(source, target)
    fsync_dir(target.parent)
    if source.parent != target.parent:
        fsync_dir(source.parent)


def make_dir(path: Path) -> None:
    """Make a directory and those above it, durable where they are new."""
    if path.is_dir():
        return
    make_dir(path.parent)
    with writing(path):
        path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory; a crash leaves it whole or under a name that ends in `.tmp`."""
    doomed = path.with_name(path.name + ".tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    with writing(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
