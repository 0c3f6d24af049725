"""Figures of a run: one call, `Metrics.log`, and every exporter behind it.

`metrics.jsonl` is written first; each line is `{"time", "kind", "step", …}`. The others
(`common.exporters`, `common.prometheus`) get the same rows. `common.catalog` explains each figure.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from common.exporters import Exporter

TAIL_BYTES = 2**18


class Metrics:
    """The open `metrics.jsonl` of a run, and whoever else wants its rows."""

    def __init__(self, run_dir: Path, exporters: Sequence[Exporter] = ()) -> None:
        self._exporters = exporters
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        self._file = path.open("a", buffering=1)
        if _is_torn(path):  # by a crash; the next row gets a line of its own
            self._file.write("\n")

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Record figures; `kind` is batch, eval or round, `step` the policy version."""
        row = {"time": round(time.time(), 3), "kind": kind, "step": step}
        row |= {key: _plain(value) for key, value in values.items()}
        self._file.write(json.dumps(row) + "\n")
        for exporter in self._exporters:
            exporter.log(kind, step, values)

    def close(self) -> None:
        self._file.close()
        for exporter in self._exporters:
            exporter.close()


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read() not in (b"", b"\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN: a figure that is not finite becomes null."""
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def read_metrics(run_dir: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; a torn last line is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if kind is None or row.get("kind") == kind:
                yield row


def last_row(run_dir: Path, kind: str) -> dict[str, Any] | None:
    """The newest row of a kind, looked for in the last TAIL_BYTES of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
        file.seek(start)
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row.get("kind") == kind:
                return row
    return None
