"""Incarnations of the learner: which policy versions belong to the history that goes on.

Each start of the learner is an incarnation with the batch number from which it goes on. A version
(i, n) is lost if a later incarnation went on from a number below n: its weights were never part
of what the checkpoint and the batch files led to. The incarnation is the fencing number too.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from common.errors import CheckpointError
from common.ledger import fsync_dir, write_durable
from common.messages import Version


class RunLock:
    """An exclusive lock on a run directory, held as long as the process lives."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "lock").open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"another learner works in {run_dir}; stop it, or choose another run.name"
            ) from None
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()


class Timeline:
    """The incarnations so far; `incarnation` is this process's, counted from 1."""

    def __init__(self, path: Path, starts: list[int]) -> None:
        self._path = path
        self._starts = starts

    @classmethod
    def open(cls, run_dir: Path) -> Timeline:
        path = run_dir / "timeline.json"
        starts = json.loads(path.read_text()) if path.exists() else []
        return cls(path, starts)

    @property
    def incarnation(self) -> int:
        return len(self._starts)

    def begin(self, number: int) -> None:
        """Durably begin an incarnation that goes on from batch `number`."""
        self._starts.append(number)
        temporary = self._path.with_suffix(".tmp")
        write_durable(temporary, json.dumps(self._starts).encode())
        temporary.rename(self._path)
        fsync_dir(self._path.parent)

    def lost(self, version: Version) -> bool:
        """Whether a version was left behind by a later incarnation."""
        later = self._starts[version.incarnation :] if version.incarnation else []
        return any(version.number > start for start in later)
