"""A run's own records, and waiting for something in them; never for a fixed time."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).parent / "tiny.toml"
ARITHMETIC = ROOT / "deploy" / "recipes" / "arithmetic.toml"
SMALL = {
    "algorithm.groups_per_batch": 4, "algorithm.group_size": 4, "generator.max_samples": 16,
    "generator.kv_cache_gib": 0.25, "checkpoint.every": 2, "eval.problems": 8, "eval.samples": 1,
}  # fmt: skip
"""Over the arithmetic recipe, so that two engines and a learner share two cores."""
LONG_S = 900.0


def need(*programs: str) -> None:
    """Skip where a program is missing, and say how to get it."""
    packages = {
        "systemd-analyze": "systemd", "systemd-nspawn": "systemd-container",
        "nsenter": "util-linux", "shellcheck": "shellcheck", "munged": "munge",
        "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm",
    }  # fmt: skip
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here; apt-get install {packages[program]}")


def batches(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of the batches trained so far."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if row["kind"] == "batch"]


def newest_checkpoint(run_dir: Path) -> int:
    """Its version; 0 if there is none."""
    saved = (run_dir / "checkpoints").glob("[0-9]*")
    return max((int(path.name) for path in saved if path.name.isdigit()), default=0)


def until(
    what: str, ready: Callable[[], Any], why: Callable[[], str], timeout_s: float = LONG_S
) -> Any:
    """The first true value of `ready`; fails with `why` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := ready():
            return value
        time.sleep(0.3)
    pytest.fail(f"{what}: not within {timeout_s:g} s\n{why()}")
