"""Incarnations of the learner: which policy versions belong to the history that goes on.

Each start of the learner is an incarnation with the batch number from which it goes on. A version
(i, n) is lost if a later incarnation went on from a number below n: its weights were never part
of what the checkpoint and the batch files led to. The incarnation is the fencing number too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from common.disk import make_dir, replace_durable, writing
from common.errors import CheckpointError, FencedError, RunTakenError
from common.messages import Version

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class RunLock:
    """An exclusive lock on a run directory, held as long as the process lives.

    It is flock(2): bound to the open file, so that it goes with the process however that ends.
    On NFS the Linux client makes it a lock of the whole file at the server, which holds between
    nodes unless the mount says `nolock` or `local_lock`; Lustre needs the mount option `flock`.
    A lock that the server drops (a node that was away for longer than its lease) is not noticed:
    then the incarnation is what stops this learner, on the server by every script and on the disk
    by `Timeline.require_current`.

    Raises:
        RunTakenError: another learner holds it.
        CheckpointError: the file system has no locks.
    """

    def __init__(self, run_dir: Path) -> None:
        make_dir(run_dir)
        path = run_dir / "lock"
        with writing(path):
            self._file = path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise CheckpointError(
                    f"the file system of {run_dir} has no locks ({error.strerror}), and without "
                    "one two learners could work there at once; mount it with locks (NFS without "
                    "nolock, Lustre with flock), or set run.dir to another one"
                ) from None
            raise RunTakenError(
                f"another learner{self._holder()} works in {run_dir}; stop it, or choose another "
                "run.name"
            ) from None
        with writing(path):
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()

    def _holder(self) -> str:
        with contextlib.suppress(OSError):
            self._file.seek(0)
            if text := self._file.read(200).strip():
                return f" ({text})"
        return ""


class Timeline:
    """The incarnations so far; `incarnation` is this process's, counted from 1.

    Raises:
        CheckpointError: the file cannot be read.
    """

    def __init__(self, path: Path, starts: list[int]) -> None:
        self._path = path
        self._starts = starts

    @classmethod
    def open(cls, run_dir: Path) -> Timeline:
        path = run_dir / "timeline.json"
        return cls(path, _read(path))

    @property
    def incarnation(self) -> int:
        return len(self._starts)

    def begin(self, number: int) -> None:
        """Durably begin an incarnation that goes on from batch `number`."""
        self.require_current()
        starts = [*self._starts, number]
        replace_durable(self._path, json.dumps(starts).encode())
        self._starts = starts

    def require_current(self) -> None:
        """Called before what this learner makes durable.

        Raises:
            FencedError: another learner has begun an incarnation in this run directory.
        """
        begun = len(_read(self._path))
        if begun != self.incarnation:
            raise FencedError(
                f"another learner has taken over {self._path.parent} (incarnation {begun}, this "
                f"one is {self.incarnation}); this one stops and writes nothing more"
            )

    def lost(self, version: Version) -> bool:
        """Whether a version was left behind by a later incarnation."""
        later = self._starts[version.incarnation :] if version.incarnation else []
        return any(version.number > start for start in later)


def _read(path: Path) -> list[int]:
    try:
        starts = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); restore it from a backup"
        ) from None
    if not isinstance(starts, list) or not all(isinstance(number, int) for number in starts):
        raise CheckpointError(f"{path} is no list of batch numbers; restore it from a backup")
    return starts
