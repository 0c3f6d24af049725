"""`kill -9` of each role at each failpoint: the run ends, and keeps every promise.

Each failpoint of a run kills one process once; the supervisor starts it again. `docs/failures.md`
says what is at stake at each. The runs of `FULL` take minutes and belong to `make chaos`, which
sets DAPO_FULL_MATRIX; `make test` keeps to `SHORT`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.checks import faults
from tests.e2e.running import ROOT, SIMULATED, Run

pytestmark = pytest.mark.slow

WORKERS = (
    "generator_idle", "generator_claimed", "generator_sample_written", "generator_payload_written",
    "generator_before_ready", "generator_after_ready", "generator_in_round", "bucket_received",
    "generator_before_done", "verifier_claimed", "verifier_judged",
)  # fmt: skip
ROUNDS = ("round_called", "round_go_said", "bucket_sent", "round_collected", "round_published")
BATCHES = (
    "batch_parts_written", "batch_file_written", "batch_acknowledged", "batch_trained",
    "batch_replayed",
)  # fmt: skip
DISK = ("ledger_recorded", "checkpoint_half_written", "checkpoint_written", "batches_folded")

SHORT = {"workers": WORKERS, "learner": ("bucket_sent", "batch_acknowledged")}
FULL = {"rounds": ROUNDS, "batches": BATCHES, "disk": DISK}
LONG = pytest.mark.skipif(
    "DAPO_FULL_MATRIX" not in os.environ, reason="minutes of restarts: part of `make chaos`"
)
RUNS = [
    *(pytest.param(points, id=name) for name, points in SHORT.items()),
    *(pytest.param(points, id=name, marks=LONG) for name, points in FULL.items()),
]
SMALL = (
    "run.batches=6", "generator.count=3", "verifier.count=2", "checkpoint.every=2",
    "checkpoint.keep_last=1",
)  # fmt: skip


def test_every_failpoint_is_in_the_matrix_and_in_the_documentation() -> None:
    found: set[str] = set()
    for role in ("common", "learner", "generator", "verifier"):
        for path in (ROOT / role).rglob("*.py"):
            found |= set(re.findall(r'^\s+failpoint\("(\w+)"\)', path.read_text(), re.MULTILINE))
    assert found == {*WORKERS, *ROUNDS, *BATCHES, *DISK}
    table = (ROOT / "docs" / "failures.md").read_text()
    assert found == set(re.findall(r"^\| \w+ \| `(\w+)`", table, re.MULTILINE))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("points", RUNS)
def test_a_run_whose_processes_are_killed_at_failpoints_keeps_every_promise(
    start: Callable[..., Run], tmp_path: Path, points: tuple[str, ...]
) -> None:
    markers = tmp_path / "fired"
    markers.mkdir()
    run = start(
        "killed", *SMALL, recipe=SIMULATED,
        DAPO_FAILPOINT=",".join(points), DAPO_FAILPOINT_DIR=str(markers),
    )  # fmt: skip
    said = run.finish(1100)
    assert {marker.name for marker in markers.iterdir()} == set(points)
    assert said.count("ended with status -9") == len(points)
    assert faults(run.dir) == []
