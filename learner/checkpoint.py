"""Checkpoints: written beside their final name, complete or not there at all.

`checkpoints/000020/` holds the engine's state and `manifest.json`, which lists every file with
its size and SHA-256. The manifest is written last, then the directory gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from common.failpoints import failpoint
from common.ledger import fsync_dir, write_durable
from common.log import get_logger

MANIFEST = "manifest.json"
log = get_logger(__name__)


class Checkpoints:
    """The directory `checkpoints/` of a run."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.root = run_dir / "checkpoints"
        self.keep_last = keep_last
        self.root.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        return self.root / f"{version:06d}"

    def unfinished(self, version: int) -> Path:
        return self.root / f"{version:06d}.tmp"

    def begin(self, version: int) -> None:
        """Rank 0, before any rank writes."""
        shutil.rmtree(self.unfinished(version), ignore_errors=True)
        self.unfinished(version).mkdir()

    def commit(self, version: int, facts: dict[str, Any]) -> None:
        """Rank 0, after every rank has written: seal, rename, and drop the oldest."""
        folder = self.unfinished(version)
        files = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            with path.open("rb+") as file:
                mark = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
            files[str(path.relative_to(folder))] = [path.stat().st_size, mark]
        failpoint("checkpoint_half_written")
        manifest = {"version": version, "files": files, **facts}
        write_durable(folder / MANIFEST, json.dumps(manifest).encode())
        for directory in {folder, *(p for p in folder.rglob("*") if p.is_dir())}:
            fsync_dir(directory)
        shutil.rmtree(self.path(version), ignore_errors=True)
        folder.rename(self.path(version))
        fsync_dir(self.root)
        failpoint("checkpoint_written")
        for old in self.versions()[: -self.keep_last]:
            shutil.rmtree(self.path(old))

    def clean(self) -> None:
        """Remove what a crash left half written."""
        for folder in self.root.glob("*.tmp"):
            shutil.rmtree(folder)

    def versions(self) -> list[int]:
        return sorted(int(p.name) for p in self.root.iterdir() if p.name.isdigit())

    def newest_valid(self) -> int | None:
        """The newest checkpoint whose every file is as its manifest says; others are skipped."""
        for version in reversed(self.versions()):
            fault = self.fault(version)
            if fault is None:
                return version
            log.error("checkpoint skipped", checkpoint=str(self.path(version)), why=fault)
        return None

    def fault(self, version: int) -> str | None:
        """What is wrong with a checkpoint; None if nothing."""
        folder = self.path(version)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            for name, (size, mark) in manifest["files"].items():
                path = folder / name
                if path.stat().st_size != size:
                    return f"{name} has {path.stat().st_size} bytes instead of {size}"
                with path.open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != mark:
                        return f"{name} does not match its hash"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return None
