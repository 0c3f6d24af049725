"""The audit of a run: whether every prompt group has exactly one fate, from the disk alone.

Invariants that it checks:
- A group has one fate: a line of the ledger, or its place in a batch file. The same batch in both
  is the moment between folding a batch file and deleting it, and counts once.
- The ordinals of the data's sequence have no hole: below the highest one known, each has a fate
  or is on its way.

`dapo audit RUN --json` prints the fields of `Audit` and `balanced`. A group is **in flight** while
the run goes on and nothing on the disk says what became of it: the server holds it, or has lost it
and it is dispatched again at the next start. It is **missing** once the run has ended, because the
end closes every open group. A **duplicate** has two fates, or two places in batches.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.batch_files import BatchFiles
from common.disk import fsync_dir, replace_durable
from common.errors import CheckpointError, ConfigError
from common.ledger import FATES, read_lines
from common.metrics import read_metrics
from common.order import RECYCLE, base_ordinal

EXAMPLES = 8
"""How many ordinals a reason names."""

Record = tuple[str, int | None]
"""A fate and, for `trained`, its batch."""


ENDED = "ended.json"
"""In a run directory: how many batches it had trained when every open group was closed, and why
if that was before all were trained."""


@dataclass
class Audit:
    """The balance of a run's groups. `reasons` says in words what is off or still open.

    `complete`: as many batches are trained as the configuration asks for, and nothing is open.
    """

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    in_flight: int = 0
    duplicates: int = 0
    missing: int = 0
    complete: bool = False
    reasons: list[str] = field(default_factory=list)

    @property
    def fates(self) -> dict[str, int]:
        """Groups by fate."""
        return {fate: getattr(self, fate) for fate in FATES}

    @property
    def balanced(self) -> bool:
        """No group has two fates, none has got lost, and the sum is what was dispatched."""
        total = sum(self.fates.values()) + self.in_flight
        return not self.duplicates and not self.missing and self.dispatched == total

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"balanced": self.balanced}

    def as_text(self) -> str:
        """A small table, the verdict, and the reasons."""
        names = ["dispatched", *FATES, "in_flight", "duplicates", "missing"]
        rows = [f"{name.replace('_', ' '):<12}{getattr(self, name):>10,}" for name in names]
        verdict = "balanced" if self.balanced else "NOT balanced"
        state = "the run is complete" if self.complete else "the run is not complete"
        return "\n".join([*rows, f"{verdict}; {state}", *(f"- {why}" for why in self.reasons)])


def audit(run_dir: Path, server_groups: set[int] | None) -> Audit:
    """Check the ledger and the batch files of a run.

    `server_groups` are the ordinals of the groups that the server holds, asked for before this
    call; None if there is no server to ask.

    Raises:
        CheckpointError: the ledger or a batch file is damaged.
        ConfigError: the run directory is missing, or its config.toml cannot be read.
    """
    settings = run_settings(run_dir)
    records, doubles = _records(run_dir)
    result = Audit(duplicates=len(doubles))
    for fate, groups in Counter(fate for fate, _ in records.values()).items():
        setattr(result, fate, groups)
    result.reasons += [_doubled(o, records[o], doubles[o]) for o in sorted(doubles)[:EXAMPLES]]

    known = records.keys() | (server_groups or set())
    end = max(map(base_ordinal, known), default=-1) + 1
    returned = {ordinal for ordinal in known if ordinal >= RECYCLE}
    result.dispatched = end + len(returned)
    without = {ordinal for ordinal in range(end) if ordinal not in records}
    without |= returned - records.keys()
    total = settings.get("run", {}).get("batches", math.inf)
    batches, early = _ended(run_dir)
    _place(result, without, server_groups, bool(early) or batches >= total)
    done = bool(early) or _trained(run_dir, records) >= total
    result.complete = done and not without
    if early:
        result.reasons.append(f"the run ended early, after {batches} batches: {early}")
    return result


def mark_ended(run_dir: Path, batches: int, early: str = "") -> None:
    """Say, durably, that the run has ended: from now on a group without a fate is missing.

    `early` is why it has ended before all its batches were trained.
    """
    text = json.dumps({"batches": batches, "early": early})
    replace_durable(run_dir / ENDED, text.encode())


def forget_end(run_dir: Path) -> None:
    """A run that goes on after its end has groups in flight again."""
    if (run_dir / ENDED).exists():
        (run_dir / ENDED).unlink()
        fsync_dir(run_dir)


def run_settings(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's config.toml as plain values; empty if it has none yet.

    Read without the models of `common.config`, so that a run of another version can be examined.

    Raises:
        ConfigError: there is no such directory, or the file is no TOML.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {run_dir} does not exist; see the folders in runs/")
    path = run_dir / "config.toml"
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _records(run_dir: Path) -> tuple[dict[int, Record], dict[int, list[Record]]]:
    """What the disk says of each ordinal, and whatever else it says of those with more.

    Batch files first: a learner at work folds them into the ledger before it deletes them.
    """
    records: dict[int, Record] = {}
    doubles: dict[int, list[Record]] = {}
    for version, ordinals in _batches(run_dir):
        record: Record = ("trained", version)
        for ordinal in ordinals:
            if ordinal in records:
                doubles.setdefault(ordinal, []).append(record)
            else:
                records[ordinal] = record
    shared: dict[Record, Record] = {}  # a million lines say a few things
    for line in read_lines(run_dir / "ledger.jsonl"):
        record = (line.fate, line.batch)
        if records.setdefault(line.ordinal, shared.setdefault(record, record)) != record:
            doubles.setdefault(line.ordinal, []).append(record)
    return records, doubles


def _batches(run_dir: Path) -> Iterator[tuple[int, list[int]]]:
    """Version and ordinals of each batch file. One may go while they are read."""
    if not (run_dir / "batches").is_dir():
        return
    files = BatchFiles(run_dir)
    for version in files.versions():
        try:
            groups = files.groups_of(version)
        except CheckpointError:
            if files.path(version).exists():
                raise
            continue
        yield version, [ordinal for ordinal, _ in groups]


def _trained(run_dir: Path, records: dict[int, Record]) -> int:
    """How many batches are trained."""
    in_records = max((batch or 0 for _, batch in records.values()), default=0)
    return max([in_records, *(int(row["step"]) for row in read_metrics(run_dir, "batch"))])


def has_ended(run_dir: Path) -> bool:
    """Whether the run was closed, every group with its fate."""
    return _ended(run_dir)[0] >= 0


def _ended(run_dir: Path) -> tuple[int, str]:
    """How many batches the run had when it ended, -1 if it has not, and why if that was early."""
    try:
        ended = json.loads((run_dir / ENDED).read_text())
        return int(ended["batches"]), str(ended.get("early", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return -1, ""


def _place(result: Audit, without: set[int], server_groups: set[int] | None, ended: bool) -> None:
    """Sort the ordinals without a fate into those in flight and those missing."""
    on_server = without & (server_groups or set())
    rest = sorted(without - on_server)
    result.in_flight = len(on_server)
    if not rest:
        return
    if ended:
        result.missing = len(rest)
        result.reasons.append(
            f"{_groups(rest)} without a fate, though the run has ended: start the run again to "
            "close what is open, and report this"
        )
        return
    result.in_flight += len(rest)
    place = "in flight" if server_groups is None else "in flight and not on the server"
    result.reasons.append(
        f"{_groups(rest)} {place}: what the server has lost is dispatched again at the next start"
    )


def _groups(ordinals: list[int]) -> str:
    names = ", ".join(map(str, ordinals[:EXAMPLES]))
    more = ", …" if len(ordinals) > EXAMPLES else ""
    return f"{len(ordinals)} group{'s' * (len(ordinals) > 1)} ({names}{more})"


def _doubled(ordinal: int, first: Record, others: list[Record]) -> str:
    parts = [
        fate if batch is None else f"{fate} in batch {batch}" for fate, batch in (first, *others)
    ]
    return f"group {ordinal} is {' and '.join(sorted(parts))}: one fate is right, report this"
