"""The fate of every prompt group, on the learner's disk.

Invariants:
- A fate is a line of `ledger.jsonl` that was fsynced before anyone was told of it; `trained`
  may also be a complete batch file (`batches/`) that is folded into the ledger later.
- One ordinal has one fate. Recording the same one again is a no-op; another one is an error.
- What a crash left of a write that was under way is cut at the next start: nobody was told of
  it. Each line carries `at`, the length of the file that was durable before its write, so that a
  torn write (its first page may be lost and its second not) is told from damage to older lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from common.disk import fsync_dir, make_dir, write_all, writing
from common.errors import CheckpointError, DiskError

Fate = Literal["trained", "filtered", "stale", "failed"]
FATES: tuple[Fate, ...] = get_args(Fate)


_read_json = json.JSONDecoder().raw_decode


class Line(NamedTuple):
    """One line of the ledger. `batch` is the version that a trained group helped to make."""

    ordinal: int
    attempt: int
    fate: Fate
    reason: str
    batch: int | None = None


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a ledger; a torn write at its end is left out.

    Raises:
        CheckpointError: a line that was durable cannot be read, so the file was damaged.
    """
    for line, _ in _whole_lines(path):
        yield line


class Ledger:
    """The fates known so far, and the open file behind them. One process writes it.

    Raises:
        CheckpointError: the file was damaged.
        DiskError: it cannot be written.
    """

    def __init__(self, path: Path, still_mine: Callable[[], None] = lambda: None) -> None:
        """`still_mine` raises if another learner has taken the run over; asked before a write."""
        self.path = path
        self._still_mine = still_mine
        self.fates: dict[int, Line] = {}
        self._end = 0
        self._torn = False
        make_dir(path.parent)
        with writing(path):
            self._file = path.open("ab", buffering=0)
        for line, self._end in _whole_lines(path):
            self.fates.setdefault(line.ordinal, line)
        self._counts: Counter[str] = Counter(line.fate for line in self.fates.values())
        with writing(path):
            os.ftruncate(self._file.fileno(), self._end)
            # a line that a killed process wrote and did not sync is a fate from here on
            os.fsync(self._file.fileno())
        fsync_dir(path.parent)

    def record(self, lines: Iterable[Line]) -> list[Line]:
        """Make fates durable with one fsync; returns those that were new.

        Raises:
            CheckpointError: an ordinal has another fate already. That is a broken invariant.
            DiskError: nothing was recorded, and nobody may be told of these fates.
            FencedError: another learner has taken the run over.
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
            self._still_mine()
            self._append(new.values())
        # only now: another thread that reads `fates` must not be told of what is not durable
        self.fates.update(new)
        self._counts.update(line.fate for line in new.values())
        return list(new.values())

    def _append(self, lines: Iterable[Line]) -> None:
        data = b"".join(_dump(line, self._end) for line in lines)
        if self._torn:
            raise DiskError(f"{self.path} is torn by a write that failed; start the run again")
        try:
            with writing(self.path):
                write_all(self._file.fileno(), data)
                os.fsync(self._file.fileno())
        except DiskError:
            self._cut()
            raise
        self._end += len(data)

    def _cut(self) -> None:
        """Take back what a write that failed has left, or leave that to the next start."""
        self._torn = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._file.fileno(), self._end)
            os.fsync(self._file.fileno())
            self._torn = False

    def counts(self) -> Counter[str]:
        """Groups by fate. Counted as they come: a thread may be recording meanwhile."""
        return self._counts.copy()

    def close(self) -> None:
        self._file.close()


def _dump(line: Line, at: int) -> bytes:
    row = {
        "ordinal": line.ordinal, "attempt": line.attempt, "fate": line.fate,
        "reason": line.reason, "batch": line.batch, "at": at,
    }  # fmt: skip
    return json.dumps(row).encode() + b"\n"


def _load(raw: bytes) -> tuple[Line, int | None]:
    """A line and what was durable before it; None in files that do not say.

    Raises:
        ValueError: it is none, or not whole.
    """
    text = raw.decode()
    row, end = _read_json(text)
    try:
        # a million lines share a few words
        fate, reason = sys.intern(row["fate"]), sys.intern(row["reason"])
        line = Line(row["ordinal"], row["attempt"], cast(Fate, fate), reason, row["batch"])
        at = row.get("at")
    except (KeyError, TypeError) as error:
        raise ValueError(f"no line of a ledger: {error!r}") from None
    if fate not in FATES or text[end:] != "\n":
        raise ValueError("no line of a ledger, or not the whole of it")
    return line, at


def _whole_lines(path: Path) -> Iterator[tuple[Line, int]]:
    """Each line and where it ends, up to a torn write."""
    if not path.exists():
        return
    end = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line, _ = _load(raw)
            except ValueError as error:
                if any(at is None or at > end for at in _marks(file)):
                    raise CheckpointError(
                        f"{path}, line {number} cannot be read ({error}), though it was durable "
                        "before the next one was written; restore the file from a backup, or "
                        "start the run again under another run.name"
                    ) from None
                return
            end += len(raw)
            yield line, end


def _marks(lines: Iterable[bytes]) -> Iterator[int | None]:
    """`at` of the lines that can be read."""
    for raw in lines:
        with contextlib.suppress(ValueError):
            yield _load(raw)[1]
