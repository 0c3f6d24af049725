"""Checkpoints: written beside their final name, complete or not there at all.

`checkpoints/000020/` holds the engine's state and `manifest.json`, which lists every file with
its size and SHA-256. The manifest is written last, then the directory gets its name. One that is
found damaged at a start is set aside as `000020.damaged` until the next one is written: it must
not count among those kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.disk import fsync_dir, make_dir, remove_tree, rename_durable, write_durable, writing
from common.errors import DiskError
from common.failpoints import failpoint
from common.log import get_logger

MANIFEST = "manifest.json"
DAMAGED = ".damaged"
READERS = 4
"""Files hashed at a time; hashing runs outside of Python's lock."""
THREADS_ABOVE = 2**24
"""Bytes of a checkpoint from which threads are worth their start."""
log = get_logger(__name__)


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Say of a write by torch that failed what it was about: of a full disk torch says only that
    a position is unexpected.

    Raises:
        DiskError: instead of what torch raises.
    """
    try:
        with writing(folder):
            yield
    except RuntimeError as error:
        if "inline_container" not in str(error):
            raise
        free = shutil.disk_usage(folder).free / 2**30
        raise DiskError(
            f"{folder} cannot be written ({error}); its disk has {free:.1f} GiB left: free space, "
            "then start the run again; the older checkpoints are whole"
        ) from error


class Checkpoints:
    """The directory `checkpoints/` of a run."""

    def __init__(self, run_dir: Path, keep_last: int) -> None:
        self.root = run_dir / "checkpoints"
        self.keep_last = keep_last
        make_dir(self.root)

    def path(self, version: int) -> Path:
        return self.root / f"{version:06d}"

    def unfinished(self, version: int) -> Path:
        return self.root / f"{version:06d}.tmp"

    # --- writing --------------------------------------------------------------------------------

    def begin(self, version: int) -> None:
        """Rank 0, before any rank writes."""
        with writing(self.unfinished(version)):
            shutil.rmtree(self.unfinished(version), ignore_errors=True)
            self.unfinished(version).mkdir()

    def commit(self, version: int, facts: dict[str, Any]) -> None:
        """Rank 0, after every rank has written: seal, rename, and drop the oldest.

        Raises:
            DiskError: the disk does not take it; the older checkpoints stay.
        """
        folder = self.unfinished(version)
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        with writing(folder):
            marks = _digests(paths, seal=True)
        files = {str(p.relative_to(folder)): mark for p, mark in zip(paths, marks, strict=True)}
        failpoint("checkpoint_half_written")
        manifest = {"version": version, "files": files, **facts}
        write_durable(folder / MANIFEST, json.dumps(manifest).encode())
        for directory in {folder, *(p for p in folder.rglob("*") if p.is_dir())}:
            fsync_dir(directory)
        rename_durable(folder, self.path(version))
        failpoint("checkpoint_written")
        for old in [*map(self.path, self.versions()[: -self.keep_last]), *self._damaged()]:
            remove_tree(old)

    # --- reading --------------------------------------------------------------------------------

    def recover(self) -> int | None:
        """At a start: remove what is half written, set damaged ones aside; the newest valid one."""
        for folder in self.root.glob("*.tmp"):
            shutil.rmtree(folder)
        newest = self.newest_valid()
        for version in self.versions():
            if newest is None or version > newest:
                aside = self.path(version).with_suffix(DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(self.path(version), aside)
        fsync_dir(self.root)
        return newest

    def _damaged(self) -> list[Path]:
        return sorted(self.root.glob(f"*{DAMAGED}"))

    def versions(self) -> list[int]:
        return sorted(int(p.name) for p in self.root.iterdir() if p.name.isdigit())

    def contained(self) -> int:
        """The newest version that every kept checkpoint contains.

        While there are fewer than `keep_last`, the base model is one of those kept: 0.
        """
        versions = self.versions()
        return versions[-self.keep_last] if len(versions) >= self.keep_last else 0

    def newest_valid(self) -> int | None:
        """The newest checkpoint whose every file is as its manifest says; others are skipped."""
        for version in reversed(self.versions()):
            fault = self.fault(version)
            if fault is None:
                return version
            log.error("checkpoint skipped", checkpoint=str(self.path(version)), why=fault)
        return None

    def facts(self, version: int) -> dict[str, Any]:
        """The manifest of a valid checkpoint."""
        manifest: dict[str, Any] = json.loads((self.path(version) / MANIFEST).read_text())
        return manifest

    def fault(self, version: int) -> str | None:
        """What is wrong with a checkpoint; None if nothing."""
        folder = self.path(version)
        try:
            manifest = self.facts(version)
            if manifest["version"] != version:
                return f"{MANIFEST} is of version {manifest['version']}"
            wanted = manifest["files"]
            for name, (size, _) in wanted.items():  # first: it takes no time
                found = (folder / name).stat().st_size
                if found != size:
                    return f"{name} has {found} bytes instead of {size}"
            digests = _digests(folder / name for name in wanted)
            for (name, mark), digest in zip(wanted.items(), digests, strict=True):
                if mark != digest:
                    return f"{name} does not match its hash"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def _digests(paths: Iterable[Path], seal: bool = False) -> list[list[int | str]]:
    """Size and hash of each file; with `seal`, each is made durable too."""
    every = list(paths)
    if sum(path.stat().st_size for path in every) < THREADS_ABOVE:
        return [_digest(path, seal) for path in every]
    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(lambda path: _digest(path, seal), every))


def _digest(path: Path, seal: bool) -> list[int | str]:
    with path.open("rb") as file:
        if seal:
            os.fsync(file.fileno())
        mark = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), mark]
