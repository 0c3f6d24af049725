"""Figures of a run: one call, `Metrics.log`, and every exporter behind it.

`metrics.jsonl` is the first exporter; each line is `{"time", "kind", "step", …}`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Metrics:
    """The open `metrics.jsonl` of a run."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        self._file = path.open("a", buffering=1)
        if _is_torn(path):  # by a crash; the next row gets a line of its own
            self._file.write("\n")

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Record figures; `kind` is batch, eval, round or status, `step` the policy version."""
        row = {"time": round(time.time(), 3), "kind": kind, "step": step}
        row |= {key: _plain(value) for key, value in values.items()}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()


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
