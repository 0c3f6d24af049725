"""The fate of every prompt group, on the learner's disk.

Invariants:
- A fate is a line of `ledger.jsonl` that was fsynced before anyone was told of it; `trained`
  may also be a complete batch file (`batches/`) that is folded into the ledger later.
- One ordinal has one fate. Recording the same one again is a no-op; another one is an error.
- A torn last line, left by a crash inside a write, is cut at the next start: what it said was
  never acknowledged to anyone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from common.errors import CheckpointError

Fate = Literal["trained", "filtered", "stale", "failed"]
FATES: tuple[Fate, ...] = ("trained", "filtered", "stale", "failed")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the ledger. `batch` is the version that a trained group helped to make."""

    ordinal: int
    attempt: int
    fate: Fate
    reason: str
    batch: int | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The complete lines of a ledger; a torn last one is left out.

    Raises:
        CheckpointError: a line in the middle cannot be read, so the file was damaged.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                yield Line(**json.loads(raw))
            except (ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{path}, line {number} cannot be read ({error}); restore the file from a "
                    "backup, or start the run again under another run.name"
                ) from None


class Ledger:
    """The fates known so far, and the open file behind them."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.fates: dict[int, Line] = {line.ordinal: line for line in read_lines(path)}
        self._counts: Counter[str] = Counter(line.fate for line in self.fates.values())
        _cut_torn_line(path)
        self._file = path.open("ab")
        fsync_dir(path.parent)

    def record(self, lines: Iterable[Line]) -> list[Line]:
        """Make fates durable with one fsync; returns those that were new.

        Raises:
            CheckpointError: an ordinal has another fate already. That is a broken invariant.
        """
        new: dict[int, Line] = {}
        for line in lines:
            known = self.fates.get(line.ordinal) or new.setdefault(line.ordinal, line)
            if (known.fate, known.batch) != (line.fate, line.batch):
                raise CheckpointError(
                    f"group {line.ordinal} is {known.fate} (batch {known.batch}) and cannot become "
                    f"{line.fate} (batch {line.batch}); run `dapo audit` and report this"
                )
        if new:
            rows = [json.dumps(asdict(line)).encode() + b"\n" for line in new.values()]
            self._file.write(b"".join(rows))
            self._file.flush()
            os.fsync(self._file.fileno())
        # only now: another thread that reads `fates` must not be told of what is not durable
        self.fates.update(new)
        self._counts.update(line.fate for line in new.values())
        return list(new.values())

    def counts(self) -> Counter[str]:
        """Groups by fate. Counted as they come: a thread may be recording meanwhile."""
        return self._counts.copy()

    def close(self) -> None:
        self._file.close()


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        end = data.rfind(b"\n") + 1
        if end != len(data):
            file.truncate(end)
            file.flush()
            os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durable(path: Path, data: bytes) -> None:
    """Write a whole file, fsynced; the caller renames and fsyncs the directory."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
