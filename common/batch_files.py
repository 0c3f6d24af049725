"""Batch files: the durable fate `trained`, and what a restarted learner trains again.

`batches/000013/` makes version 13. Each rank writes its part, rank 0 the manifest; then the
directory gets its final name. A directory without that name does not exist for a reader. Once
their groups are in the ledger, batch files are deleted, or moved to `archive/`.
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

from common.disk import fsync_dir, make_dir, remove_tree, rename_durable, write_durable, writing
from common.errors import CheckpointError
from common.ledger import Line


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """One group of a batch: its records as they were on the wire."""

    ordinal: int
    attempt: int
    prompt: bytes
    verdict: bytes
    samples: list[bytes]


class BatchFiles:
    """The directory `batches/` of a run. Whatever writes raises DiskError if the disk refuses."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir / "batches"
        self.archive = run_dir / "archive"
        make_dir(self.root)

    def path(self, version: int) -> Path:
        return self.root / f"{version:06d}"

    def _archived(self, version: int) -> Path:
        return self.archive / f"{version:06d}"

    def _where(self, version: int) -> Path:
        """The folder of a complete batch, archived or not."""
        folder = self.path(version)
        return folder if folder.exists() else self._archived(version)

    def _unfinished(self, version: int) -> Path:
        return self.root / f"{version:06d}.tmp"

    # --- writing --------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Rank 0: make room for the parts of a batch."""
        folder = self._unfinished(version)
        with writing(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def write_part(self, version: int, rank: int, groups: list[StoredGroup]) -> None:
        """Each rank: its own groups."""
        rows = [[g.ordinal, g.attempt, g.prompt, g.verdict, g.samples] for g in groups]
        write_durable(self._unfinished(version) / f"part-{rank}", msgpack.packb(rows))

    def commit(self, version: int, parts: int = 1) -> None:
        """Rank 0, after the parts of so many ranks: from here on the groups are trained.

        Raises:
            CheckpointError: a part is not there.
        """
        folder = self._unfinished(version)
        data = {f"part-{rank}": _read(folder / f"part-{rank}") for rank in range(parts)}
        groups = [group for part in data.values() for group in _unpack(part)]
        manifest = {
            "version": version,
            "parts": {name: hashlib.sha256(part).hexdigest() for name, part in data.items()},
            "groups": sorted([group.ordinal, group.attempt] for group in groups),
        }
        write_durable(folder / "manifest.json", json.dumps(manifest).encode())
        fsync_dir(folder)
        rename_durable(folder, self.path(version))

    def remove(self, versions: Iterable[int], keep: bool) -> None:
        """Delete batch files whose fates are in the ledger, or move them to the archive."""
        if keep:
            make_dir(self.archive)
        for version in versions:
            if keep and not self._archived(version).exists():
                rename_durable(self.path(version), self._archived(version))
            else:
                remove_tree(self.path(version))
        fsync_dir(self.root)

    def clean(self) -> None:
        """Before anything is read: remove what a crash left half written.

        A name that a killed process had not synced is durable from here on.
        """
        if self.archive.exists():
            fsync_dir(self.archive)  # first: what was being moved must have one of its names
        for folder in self.root.glob("*.tmp"):
            shutil.rmtree(folder)
        fsync_dir(self.root)

    # --- reading --------------------------------------------------------------------------------

    def versions(self) -> list[int]:
        """Versions with a complete batch file that is not archived, in order."""
        return sorted(int(p.name) for p in self.root.iterdir() if p.name.isdigit())

    def after(self, checkpoint: int, folded: int = 0) -> list[int]:
        """The batches that lead on from a checkpoint, in order; `folded` is the ledger's newest.

        Archived ones count: they replay a run from a checkpoint that is older than its ledger.

        Raises:
            CheckpointError: a batch that was trained is not there, so its weights cannot be made
                again; or nothing is known of batches that the checkpoint holds.
        """
        newest = max([folded, *self.versions()])
        if newest < checkpoint:
            raise CheckpointError(
                f"the checkpoint of batch {checkpoint} is newer than {self.root} and the ledger, "
                f"which end at batch {newest}: groups would be trained again. Restore both from a "
                "backup, or `dapo export` the run and start a new one from there"
            )
        wanted = range(checkpoint + 1, newest + 1)
        gone = [version for version in wanted if not self._where(version).exists()]
        if gone:
            raise CheckpointError(
                f"batches up to {newest} were trained, and the newest valid checkpoint is of batch "
                f"{checkpoint}: {_names(gone)} would have to be trained again and are neither in "
                f"{self.root} nor in {self.archive}. Restore a newer checkpoint from a backup "
                "(checkpoint.keep_last keeps more of them, checkpoint.archive_batches every batch)"
            )
        return list(wanted)

    def groups_of(self, version: int) -> list[tuple[int, int]]:
        """(ordinal, attempt) of a batch, from its manifest."""
        manifest = self._manifest(version)
        return [(int(o), int(a)) for o, a in manifest["groups"]]

    def fates(self, versions: Iterable[int]) -> list[Line]:
        """What batch files say, as lines of the ledger."""
        return [
            Line(ordinal, attempt, "trained", "", version)
            for version in versions
            for ordinal, attempt in self.groups_of(version)
        ]

    def load(self, version: int) -> list[StoredGroup]:
        """Every group of a batch, ordered by ordinal; also of an archived one.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        folder, groups = self._where(version), []
        for name, wanted in self._manifest(version)["parts"].items():
            data = _read(folder / name)
            if hashlib.sha256(data).hexdigest() != wanted:
                raise CheckpointError(f"{folder / name} is damaged; restore it from a backup")
            groups += _unpack(data)
        return sorted(groups, key=lambda group: group.ordinal)

    def _manifest(self, version: int) -> dict[str, Any]:
        path = self._where(version) / "manifest.json"
        try:
            manifest: dict[str, Any] = json.loads(path.read_text())
            return manifest
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); restore it from a backup"
            ) from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path} is missing or cannot be read ({error.strerror}); restore it from a backup"
        ) from None


def _unpack(part: bytes) -> list[StoredGroup]:
    return [StoredGroup(*row) for row in msgpack.unpackb(part)]


def _names(versions: list[int]) -> str:
    first = ", ".join(map(str, versions[:8]))
    return f"batch{'es' * (len(versions) > 1)} {first}{', …' if len(versions) > 8 else ''}"
