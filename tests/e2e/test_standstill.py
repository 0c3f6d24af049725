"""Whoever stands still, the log names it; once it goes on, so does the run. And how each role ends.

`make chaos` sets DAPO_FULL_MATRIX for what is too long for `make test`.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.stopping import CLOSE_S
from tests.chaos.checks import faults
from tests.e2e.running import SIMULATED, Run

LONG = pytest.mark.skipif(
    "DAPO_FULL_MATRIX" not in os.environ, reason="minutes of restarts: part of `make chaos`"
)
pytestmark = [pytest.mark.slow, LONG]
END_S = 90.0


def lines(run: Run, role: str, event: str) -> list[dict[str, Any]]:
    path = run.dir / "logs" / f"{role}.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return [row for line in rows if event in line and (row := json.loads(line))["event"] == event]


def named(process: psutil.Process) -> str:
    try:
        return process.environ().get("DAPO_LOG_NAME", "") or process.name()
    except psutil.Error:
        return ""


def processes(run: Run, name: str) -> list[psutil.Process]:
    """Processes of a role, or of the server; of the learner each rank."""
    return [
        process
        for process in run.family()
        if named(process).startswith(name) and process.status() != psutil.STATUS_ZOMBIE
    ]


def rank(run: Run, number: int) -> psutil.Process:
    for process in processes(run, "learner"):
        if process.environ().get("RANK") == str(number):
            return process
    raise AssertionError(f"no rank {number}")


@contextmanager
def standing_still(targets: list[psutil.Process]) -> Iterator[None]:
    assert targets
    for process in targets:
        process.send_signal(signal.SIGSTOP)
    yield
    for process in targets:
        process.send_signal(signal.SIGCONT)


@pytest.mark.timeout(1200)
def test_whoever_stands_still_is_named_and_the_run_goes_on(start: Callable[..., Run]) -> None:
    run = start(
        "still", "run.batches=100000", "run.stall_s=8", "learner.ranks=2", "generator.count=2",
        "verifier.count=1", "redis.lease_s=4", recipe=SIMULATED,
    )  # fmt: skip

    def next_batch() -> None:
        seen = len(run.rows("batch"))
        run.until("a batch", lambda: len(run.rows("batch")) > seen, 300)

    def complaint(words: str) -> Callable[[], bool]:
        def said() -> bool:
            return any(words in row["waiting_for"] for row in lines(run, "learner", "no progress"))

        return said

    next_batch()
    cases: list[tuple[list[psutil.Process], str]] = [
        (processes(run, "generator"), "a generator: none holds a lease"),
        (processes(run, "verifier"), "a verifier: none holds a lease"),
        ([rank(run, 1)], "rank 1 of the learner: no sign of life"),
    ]
    for targets, words in cases:
        with standing_still(targets):
            run.until(words, complaint(words), 300)
        next_batch()
    with standing_still(processes(run, "valkey")):
        run.until(
            "the server's name in the log",
            lambda: lines(run, "learner", "waiting for the server"), 300,
        )  # fmt: skip
    next_batch()
    run.process.send_signal(signal.SIGINT)
    run.process.wait(60)


@pytest.mark.timeout(1200)
def test_a_member_that_hangs_in_the_broadcast_is_left_behind_and_started_again(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    markers = tmp_path / "halted"
    markers.mkdir()
    run = start(
        "hangs", "run.batches=30", "generator.count=2", "publish.round_timeout_s=3",
        recipe=SIMULATED, DAPO_FAILPOINT="bucket_received", DAPO_FAILPOINT_HALT_S="3600",
        DAPO_FAILPOINT_DIR=str(markers),
    )  # fmt: skip
    run.finish(1100)
    assert [marker.name for marker in markers.iterdir()] == ["bucket_received"]
    assert any("not done" in row["why"] for row in lines(run, "learner", "left out"))
    assert [text for text in faults(run.dir) if "EngineDead" not in text] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("role", "point", "halt_s"),
    [
        ("generator", "generator_idle", "2"), ("generator", "generator_sample_written", "2"),
        ("generator", "bucket_received", "2"), ("verifier", "verifier_claimed", "2"),
        ("learner", "round_called", "2"), ("learner", "bucket_sent", "2"),
        ("learner", "batch_acknowledged", "2"), ("learner", "checkpoint_half_written", "2"),
        ("generator", "generator_in_round", "3600"), ("verifier", "verifier_claimed", "3600"),
        ("learner", "bucket_sent", "3600"),
    ],
)  # fmt: skip
def test_a_role_that_is_told_to_end_is_gone_by_its_deadline(
    start: Callable[..., Run], tmp_path: Path, role: str, point: str, halt_s: str
) -> None:
    """SIGTERM while it stands at the failpoint: for a moment, or for ever."""
    run = start(
        "ending", "run.batches=100000", "generator.count=1", "verifier.count=1",
        "learner.stop_s=20", "verifier.slow_deadline_s=5", "checkpoint.every=1", recipe=SIMULATED,
        DAPO_FAILPOINT=point, DAPO_FAILPOINT_HALT_S=halt_s, DAPO_FAILPOINT_DIR=str(tmp_path),
    )  # fmt: skip
    run.until(point, (tmp_path / point).exists, 300)
    (process,) = processes(run, role)
    process.terminate()
    process.wait(END_S)
    (told,) = lines(run, "learner" if role == "learner" else f"{role}-0", "told to end")
    assert told["signal"] == "SIGTERM" and told["within_s"] + CLOSE_S <= END_S
    out = run.dir / "logs" / ("learner.out" if role == "learner" else f"{role}-0.out")
    assert ("Timeout (" in out.read_text()) == (halt_s == "3600"), "where it hung is said"
    if role == "learner" and halt_s == "2":
        assert run.process.wait(END_S) == 1, "a run whose learner was told to end is not complete"
