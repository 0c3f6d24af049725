"""What must be true of a run after whatever was done to it."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from common.audit import audit
from common.ledger import read_lines
from common.metrics import read_metrics
from common.server import EmbeddedServer

SAME_WEIGHTS = 1e-4
"""Largest difference of the probe's mean log-prob between two rounds of one version."""


def faults(run_dir: Path) -> list[str]:
    """Broken promises in words; empty if there are none. The run must be over."""
    settings = tomllib.loads((run_dir / "config.toml").read_text())
    return [
        *_balance(run_dir, settings),
        *_batches(run_dir, settings),
        *_weights(run_dir),
        *_tracebacks(run_dir),
        *_left_on_server(run_dir, settings["run"]["name"]),
    ]


def _balance(run_dir: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Every group has one fate, and as many are trained as the batches hold."""
    result = audit(run_dir, None)
    wanted = settings["run"]["batches"] * settings["algorithm"]["groups_per_batch"]
    if not result.balanced or not result.complete or result.in_flight:
        yield f"the audit does not balance:\n{result.as_text()}"
    if result.trained != wanted:
        yield f"{result.trained} groups trained, not {wanted}"


def _batches(run_dir: Path, settings: dict[str, Any]) -> Iterator[str]:
    """Each batch is there, exactly full, and within the bound."""
    rows = list(read_metrics(run_dir, "batch"))
    bound = settings["admission"]["max_staleness"]
    size = settings["algorithm"]["groups_per_batch"]
    for row in rows:
        if row["staleness_max"] > bound:
            yield f"batch {row['step']} has staleness {row['staleness_max']}, above {bound}"
        if row["groups"] != size:
            yield f"batch {row['step']} has {row['groups']} groups, not {size}"


def _weights(run_dir: Path) -> Iterator[str]:
    """A batch that was replayed after a crash led to the same weights."""
    by_version: dict[int, list[float]] = {}
    for row in read_metrics(run_dir, "round"):
        if row.get("probe_logprob") is not None:
            by_version.setdefault(row["step"], []).append(row["probe_logprob"])
    for version, values in by_version.items():
        if max(values) - min(values) > SAME_WEIGHTS:
            yield f"version {version} went out with different weights: probes {values}"


def _tracebacks(run_dir: Path) -> Iterator[str]:
    """A killed process says nothing: an exception that ended one is a fault of its own."""
    for path in sorted((run_dir / "logs").glob("*.out")):
        text = path.read_text(errors="replace")
        ends = re.findall(r"^Traceback .*?^(\S[^\n]*)$", text, re.MULTILINE | re.DOTALL)
        for last, count in Counter(ends).items():
            yield f"{path.name}: {count} × {last}"
    for path in sorted((run_dir / "logs").glob("*.jsonl")):
        raised = Counter(
            row["exception"].strip().splitlines()[-1]
            for line in path.read_text(errors="replace").splitlines()
            if '"exception"' in line and (row := json.loads(line))
        )
        for last, count in raised.items():
            yield f"{path.name}: {count} × {last}"


def _left_on_server(run_dir: Path, name: str) -> Iterator[str]:
    """Nothing of a group that has its fate is left behind."""
    server = EmbeddedServer(run_dir / "server")
    with redis.Redis.from_url(server.start(), decode_responses=True) as client:
        keys = [key.partition("}:")[2] for key in client.scan_iter(f"{{{name}}}:*", count=1000)]
    server.stop()
    left = sorted(key for key in keys if key.startswith(("group:", "sample:")))
    if left:
        yield f"{len(left)} keys left on the server: {', '.join(left[:8])}"


def dead_letters(run_dir: Path) -> int:
    """Entries that went to the dead letters, as the logs tell."""
    paths = (run_dir / "logs").glob("*.jsonl")
    return sum(path.read_text(errors="replace").count('"dead letter"') for path in paths)


def failures(run_dir: Path) -> Counter[str]:
    """Why groups became failed or stale."""
    lines = read_lines(run_dir / "ledger.jsonl")
    return Counter(f"{x.fate}: {x.reason}" for x in lines if x.fate in ("failed", "stale"))
