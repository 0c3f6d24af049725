"""Rollouts kept to be read: `RUN/rollouts/000013.jsonl`, one group to a line.

A file holds groups of the batch that made its version, and groups that were filtered or failed
while that batch was filled. Nothing depends on them: a line that a crash cut off is left out, and
once all together are above a limit, files in between are deleted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Group = dict[str, Any]
"""version, fate, reason, group, ordinal, attempt, row, prompt, gold, checker, verifier, samples."""
FOLDER = "rollouts"


class RolloutLog:
    """The writer of a run's rollouts. Whatever writes raises OSError if the disk refuses."""

    def __init__(self, run_dir: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = run_dir / FOLDER, max_bytes
        self._sizes = {v: _path(run_dir, v).stat().st_size for v in kept_versions(run_dir)}

    def write(self, group: Group) -> None:
        """Append a group to the file of its version; delete what is too much."""
        version = int(group["version"])
        self.folder.mkdir(parents=True, exist_ok=True)
        line = json.dumps(group, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        with _path(self.folder.parent, version).open("ab") as file:
            file.write(line)
        self._sizes[version] = self._sizes.get(version, 0) + len(line)
        for doomed in surplus(self._sizes, self.max_bytes):
            _path(self.folder.parent, doomed).unlink(missing_ok=True)
            del self._sizes[doomed]


def surplus(sizes: Mapping[int, int], limit: int) -> list[int]:
    """Versions whose files have to go, so that the rest is at most `limit` bytes.

    Version 1 + n goes before 1 + m if n is divisible by two less often, so that what stays is
    spread evenly over the run, whenever and however often this is asked. The newest never goes.
    """

    def weight(version: int) -> tuple[float, int]:
        since = version - 1
        return (since & -since) or math.inf, version

    total, doomed = sum(sizes.values()), []
    for version in sorted(sorted(sizes)[:-1], key=weight):
        if total <= limit:
            break
        total -= sizes[version]
        doomed.append(version)
    return doomed


def kept_versions(run_dir: Path) -> list[int]:
    """Versions of which rollouts are kept, in order."""
    stems = (path.stem for path in (run_dir / FOLDER).glob("*.jsonl"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def read_rollouts(run_dir: Path, version: int | None = None) -> Iterator[Group]:
    """Groups kept of a version, or of all from the newest on; a file may go while they are read."""
    versions = kept_versions(run_dir) if version is None else [version]
    for number in reversed(versions):
        try:
            lines = _path(run_dir, number).read_text(errors="replace").split("\n")
        except FileNotFoundError:
            continue
        yield from filter(None, map(_parsed, lines))


def _parsed(line: str) -> Group | None:
    try:
        group = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(group, dict) and isinstance(group.get("samples"), list)
    return group if whole else None


def _path(run_dir: Path, version: int) -> Path:
    return run_dir / FOLDER / f"{version:06d}.jsonl"
