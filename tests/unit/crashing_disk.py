"""A disk that crashes: real files in a folder, and a model of what of them would survive.

While `installed`, the system calls that change files count down a fuse and raise `Crash` where it
ends, in the middle of a write too. After the crash of a process everything that was written is
there. After a loss of power (`power_loss`) only this is certain: the bytes of a file at its last
fsync and the names in a directory at its last fsync. Of what came later each piece is there or
not: names one by one, the unsynced end of a file whole, cut anywhere, or with a hole of zeros.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PAGE = 64
"""Bytes of a hole. Small, because the files are."""

_fsync, _write = os.fsync, os.write
Tree = dict[str, Any]
"""Names to bytes or to another tree."""


class Crash(BaseException):
    """The process or the machine ends here. No handler of the code under test takes it."""


class CrashingDisk:
    """The files below `root`."""

    def __init__(self, root: Path, dice: random.Random) -> None:
        self.root, self.dice = root, dice
        self.fuse: int | None = None
        """Operations until the crash; None: there is none."""
        self.operations = 0
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._pins: dict[int, int] = {}  # open, so that the number of an inode is never used again
        self._settle(root)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Take the place of the system calls."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self._synced)
            patch.setattr(os, "write", self._written)
            for name in ("rename", "mkdir", "unlink", "rmdir", "ftruncate"):
                patch.setattr(os, name, self._counted(getattr(os, name)))
            yield

    def tick(self) -> None:
        """One more operation, perhaps the one at which it crashes."""
        self.operations += 1
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Crash

    def _counted(self, call: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            self.tick()
            return call(*args, **options)

        return counted

    def _written(self, fd: int, data: Any) -> int:
        try:
            self.tick()
        except Crash:
            _write(fd, bytes(data)[: self.dice.randrange(len(data) + 1)])
            raise
        return _write(fd, data)

    def _synced(self, fd: int) -> None:
        self.tick()
        self._sync(fd)

    def _sync(self, fd: int) -> None:
        facts = os.fstat(fd)
        if facts.st_ino not in self._pins:
            self._pins[facts.st_ino] = os.dup(fd)
        if not stat.S_ISDIR(facts.st_mode):
            self._files[facts.st_ino] = _content(fd)
            return
        names = {}
        with os.scandir(fd) as entries:
            for entry in entries:
                names[entry.name] = entry.inode()
                if entry.inode() not in self._pins:
                    self._pins[entry.inode()] = os.open(entry.name, os.O_RDONLY, dir_fd=fd)
        self._folders[facts.st_ino] = dict(sorted(names.items()))

    # --- loss of power --------------------------------------------------------------------------

    def power_loss(self) -> None:
        """Leave in the folder what a machine would find after it lost its power."""
        tree = self._survivors(self.root, self._not_moved())
        for path in self.root.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _build(self.root, tree)
        self.forget()
        self._settle(self.root)

    def forget(self) -> None:
        """Close what keeps the inodes."""
        for fd in self._pins.values():
            os.close(fd)
        self._pins, self._files, self._folders = {}, {}, {}

    def _settle(self, folder: Path) -> None:
        """Everything in a folder is durable."""
        for path in [folder, *folder.rglob("*")]:
            fd = os.open(path, os.O_RDONLY)
            self._sync(fd)
            os.close(fd)

    def _not_moved(self) -> dict[int, bool]:
        """Of what has another name now than it had: whether it is found under the old one.

        A rename is atomic, and where the new name is durable, the old one is gone.
        """
        then: dict[int, set[tuple[int, str]]] = {}
        for folder, names in self._folders.items():
            for name, inode in names.items():
                then.setdefault(inode, set()).add((folder, name))
        paths = self.root.rglob("*")
        now = {path.stat().st_ino: (path.parent.stat().st_ino, path.name) for path in paths}
        return {
            inode: now[inode] not in places and self.dice.random() < 0.5
            for inode, places in then.items()
            if inode in now and places != {now[inode]}
        }

    def _survivors(self, folder: Path, stays: dict[int, bool]) -> Tree:
        now = {entry.name: entry.inode() for entry in os.scandir(folder)}
        then = self._folders.get(folder.stat().st_ino, {})
        share = self.dice.choice([0.0, 0.5, 1.0])
        tree: Tree = {}
        for name in sorted(now | then):
            old, new = then.get(name), now.get(name)
            chosen = new if old == new or self.dice.random() < share else old
            for inode in (old, new):
                if old != new and inode in stays:
                    chosen = old if stays[inode] else new
            if chosen is None:
                continue
            if chosen == new:
                path = folder / name
                tree[name] = self._survivors(path, stays) if path.is_dir() else self._bytes(path)
            else:
                tree[name] = self._ghost(chosen)
        return tree

    def _ghost(self, inode: int) -> Tree | bytes:
        """What has no name any more, but has one after the crash."""
        if inode in self._folders:
            return {name: self._ghost(child) for name, child in self._folders[inode].items()}
        if stat.S_ISDIR(os.fstat(self._pins[inode]).st_mode):
            return {}
        return self._mixed(self._files.get(inode, b""), _content(self._pins[inode]))

    def _bytes(self, path: Path) -> bytes:
        return self._mixed(self._files.get(path.stat().st_ino, b""), path.read_bytes())

    def _mixed(self, then: bytes, now: bytes) -> bytes:
        """Of a file's content at its last fsync and now, one that may be found."""
        if then == now or not now.startswith(then):
            return self.dice.choice([then, now])
        tail = bytearray(now[len(then) :])
        if self.dice.random() < 0.3:
            page = self.dice.randrange(0, len(tail), PAGE) if len(tail) > PAGE else 0
            tail[page : page + PAGE] = bytes(len(tail[page : page + PAGE]))
        end = self.dice.choice([0, self.dice.randrange(len(tail) + 1), len(tail)])
        return then + bytes(tail[:end])

    def flip(self, path: Path) -> None:
        """A bit of a durable file goes wrong."""
        data = bytearray(path.read_bytes())
        data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        path.write_bytes(data)


def _content(fd: int) -> bytes:
    with open(f"/proc/self/fd/{fd}", "rb") as file:
        return file.read()


def _build(folder: Path, tree: Tree) -> None:
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            (folder / name).mkdir()
            _build(folder / name, node)
