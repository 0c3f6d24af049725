"""`dapo eval` for real: engines, verifiers and the examiner as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.results import read_results
from tests.e2e.running import RECIPE, ROOT

pytestmark = pytest.mark.slow
SIMULATED = ("--set", "generator.engine=simulated", "--max-tokens", 80)


def start_eval(out: Path, *words: object) -> subprocess.Popen[str]:
    """A `dapo eval` with its output on pipes."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("DAPO_")}
    command = [sys.executable, "-m", "common.cli", "eval", *map(str, words)]
    return subprocess.Popen(
        [*command, "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env,
    )  # fmt: skip


@pytest.mark.timeout(400)
def test_the_base_of_the_demo_is_evaluated_on_two_files_with_the_weights_it_has(
    arithmetic_base: Path, tmp_path: Path
) -> None:
    lines = (arithmetic_base / "heldout.jsonl").read_text().splitlines(keepends=True)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(lines[40:44]))
    out = tmp_path / "found"
    process = start_eval(
        out, arithmetic_base / "model", arithmetic_base / "heldout.jsonl", few,
        "--recipe", RECIPE, "--k", 4, "--problems", 32, "--top-p", 0.9, "--json",
    )  # fmt: skip
    said, progress = process.communicate(timeout=350)
    assert process.returncode == 0, progress
    result: dict[str, Any] = json.loads(said)
    assert result == json.loads((out / "result.json").read_text())
    assert result["complete"] and result["planned"] == {"heldout": 32, "few": 4}
    found = result["files"]["heldout"]
    assert (found["problems"], found["failed"], found["samples"]) == (32, 0, 128)
    assert 0.25 < found["accuracy"] < 0.75, "it is right on a little under half of its samples"
    assert found["accuracy"] == found["pass_at"]["1"] < found["pass_at"]["4"]
    low, high = found["accuracy_interval"]
    assert low < found["accuracy"] < high
    assert found["versions"] == [0]
    records = read_results(out / "problems.jsonl")
    assert [record.file for record in records] == ["heldout"] * 32 + ["few"] * 4
    assert [record.gold for record in records[32:]] == [
        json.loads(line)["answer"] for line in lines[40:44]
    ]
    assert not (out / "server").exists()


@pytest.mark.timeout(200)
def test_ctrl_c_keeps_the_problems_that_are_done_and_says_that_it_is_partial(
    arithmetic_base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found"
    slow = ("simulated_tokens_per_second=60", "max_samples=8")
    process = start_eval(
        out, arithmetic_base / "model", arithmetic_base / "heldout.jsonl", "--k", 4, "--show", 1,
        *SIMULATED, *(word for key in slow for word in ("--set", f"generator.{key}")),
    )  # fmt: skip
    records = out / "problems.jsonl"
    deadline = time.monotonic() + 150
    while not records.exists() or records.read_text().count("\n") < 3:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    said, progress = process.communicate(timeout=30)
    assert process.returncode == 1, progress
    assert not psutil.wait_procs(family, timeout=2)[1], "a process outlived the evaluation"
    kept = read_results(records)
    assert 3 <= len(kept) < 256
    assert f"heldout: {len(kept)} of 256 problems × 4 samples" in said
    assert "PARTIAL" in said and "SIMULATED" in said and "hardest problems" in said
    assert "the problems that are done are kept" in progress


def test_results_are_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    process = start_eval(tmp_path, tmp_path, tmp_path / "problems.jsonl")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert "is not empty; choose another --out" in error and "Traceback" not in error
