"""The audit of a run: whether every prompt group has exactly one fate, from the disk alone.

Invariants that it checks:
- A group has one fate: a line of the ledger, or its place in a batch file. The same batch in both
  is the moment between folding a batch file and deleting it, and counts once.
- The ordinals of the data's sequence have no hole: below the highest one known, each has a fate
  or is on its way.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.batch_files import BatchFiles
from common.data import RECYCLE, base_ordinal
from common.errors import CheckpointError, ConfigError
from common.ledger import FATES, read_lines
from common.metrics import read_metrics

EXAMPLES = 8
"""How many ordinals a reason names."""

Record = tuple[str, int | None]
"""A fate and, for `trained`, its batch."""


@dataclass
class Audit:
    """The balance of a run's groups. `reasons` says in words what is off or still open."""

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
    records = _records(run_dir)
    result = Audit(complete=_complete(run_dir, settings, records))
    counts = Counter(fate for fates in records.values() for fate, _ in fates)
    for fate in FATES:
        setattr(result, fate, counts[fate])
    twice = sorted(ordinal for ordinal, fates in records.items() if len(fates) > 1)
    result.duplicates = len(twice)
    result.reasons += [_two_fates(ordinal, records[ordinal]) for ordinal in twice[:EXAMPLES]]

    known = set(records) | (server_groups or set())
    end = max(map(base_ordinal, known), default=-1) + 1
    returned = {ordinal for ordinal in known if ordinal >= RECYCLE}
    result.dispatched = end + len(returned)
    without = set(range(end)) | returned
    without -= set(records)
    _place(result, without, server_groups)
    return result


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


def _records(run_dir: Path) -> dict[int, set[Record]]:
    """What the disk says of each ordinal.

    Batch files first: a learner at work folds them into the ledger before it deletes them.
    """
    records: dict[int, set[Record]] = {}
    if (run_dir / "batches").is_dir():
        files = BatchFiles(run_dir)
        for version in files.versions():
            try:
                groups = files.groups_of(version)
            except CheckpointError:
                if files.path(version).exists():
                    raise
                continue
            for ordinal, _ in groups:
                records.setdefault(ordinal, set()).add(("trained", version))
    for line in read_lines(run_dir / "ledger.jsonl"):
        records.setdefault(line.ordinal, set()).add((line.fate, line.batch))
    return records


def _complete(
    run_dir: Path, settings: dict[str, dict[str, Any]], records: dict[int, set[Record]]
) -> bool:
    """Whether as many batches are trained as the configuration asks for."""
    total = settings.get("run", {}).get("batches")
    if total is None:
        return False
    batches = {batch for fates in records.values() for _, batch in fates if batch is not None}
    batches |= {int(row["step"]) for row in read_metrics(run_dir, "batch")}
    return max(batches, default=0) >= int(total)


def _place(result: Audit, without: set[int], server_groups: set[int] | None) -> None:
    """Sort the ordinals without a fate into those in flight and those missing."""
    on_server = without & (server_groups or set())
    rest = sorted(without - on_server)
    result.in_flight = len(on_server)
    if not rest:
        return
    if result.complete:
        result.missing = len(rest)
        result.reasons.append(
            f"{_groups(rest)} without a fate, though the run is complete: start the run again to "
            "close what was in flight, and report this if it stays"
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


def _two_fates(ordinal: int, fates: set[Record]) -> str:
    parts = [fate if batch is None else f"{fate} in batch {batch}" for fate, batch in fates]
    return f"group {ordinal} is {' and '.join(sorted(parts))}: one fate is right, report this"
