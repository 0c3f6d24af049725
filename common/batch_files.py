"""Batch files: the durable fate `trained`, and what a restarted learner trains again.

`batches/000013/` makes version 13. Each rank writes its part, rank 0 the manifest; then the
directory gets its final name. A directory without that name does not exist for a reader.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from common.errors import CheckpointError
from common.ledger import fsync_dir, write_durable


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One group of a batch: its records as they were on the wire."""

    ordinal: int
    attempt: int
    prompt: bytes
    verdict: bytes
    samples: list[bytes]


class BatchFiles:
    """The directory `batches/` of a run."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "batches"
        self.archive = run_dir / "archive"
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        return self.root / f"{version:06d}"

    def _unfinished(self, version: int) -> Path:
        return self.root / f"{version:06d}.tmp"

    def begin(self, version: int) -> None:
        """Rank 0: make room for the parts of a batch."""
        folder = self._unfinished(version)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def write_part(self, version: int, rank: int, groups: list[StoredGroup]) -> None:
        """Each rank: its own groups."""
        rows = [[g.ordinal, g.attempt, g.prompt, g.verdict, g.samples] for g in groups]
        write_durable(self._unfinished(version) / f"part-{rank}", msgpack.packb(rows))

    def commit(self, version: int) -> None:
        """Rank 0, after every part: from here on the groups are trained."""
        folder = self._unfinished(version)
        parts = sorted(folder.glob("part-*"))
        manifest = {
            "version": version,
            "parts": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in parts},
            "groups": sorted([g.ordinal, g.attempt] for p in parts for g in _read_part(p)),
        }
        write_durable(folder / "manifest.json", json.dumps(manifest).encode())
        fsync_dir(folder)
        folder.rename(self.path(version))
        fsync_dir(self.root)

    def versions(self) -> list[int]:
        """Versions with a complete batch file, in order."""
        return sorted(int(p.name) for p in self.root.iterdir() if p.name.isdigit())

    def groups_of(self, version: int) -> list[tuple[int, int]]:
        """(ordinal, attempt) of a batch, from its manifest."""
        manifest = self._manifest(version)
        return [(int(o), int(a)) for o, a in manifest["groups"]]

    def load(self, version: int) -> list[StoredGroup]:
        """Every group of a batch, ordered by ordinal.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        folder, groups = self.path(version), []
        for name, wanted in self._manifest(version)["parts"].items():
            data = (folder / name).read_bytes() if (folder / name).exists() else b""
            if hashlib.sha256(data).hexdigest() != wanted:
                raise CheckpointError(
                    f"{folder / name} is missing or damaged; restore it from a backup"
                )
            groups += _read_part(folder / name)
        return sorted(groups, key=lambda group: group.ordinal)

    def remove(self, versions: Iterable[int], keep: bool) -> None:
        """Delete batch files whose fates are in the ledger, or move them to the archive."""
        for version in versions:
            if keep:
                self.archive.mkdir(exist_ok=True)
                self.path(version).rename(self.archive / f"{version:06d}")
            else:
                # the manifest goes first: a half-deleted directory is no batch file
                doomed = self.root / f"{version:06d}.tmp"
                shutil.rmtree(doomed, ignore_errors=True)
                self.path(version).rename(doomed)
                shutil.rmtree(doomed)
        fsync_dir(self.root)

    def clean(self) -> None:
        """Remove what a crash left half written."""
        for folder in self.root.glob("*.tmp"):
            shutil.rmtree(folder)

    def _manifest(self, version: int) -> dict[str, Any]:
        path = self.path(version) / "manifest.json"
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            return manifest
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def _read_part(path: Path) -> list[StoredGroup]:
    return [StoredGroup(*row) for row in msgpack.unpackb(path.read_bytes())]
