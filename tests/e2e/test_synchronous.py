"""With a staleness bound of 0 the pipeline is a synchronous loop: same groups, tokens, weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.batch_files import BatchFiles
from common.ledger import read_lines
from common.messages import Sample, decode
from tests.e2e.running import RECIPE, ROOT, Run

pytestmark = pytest.mark.slow

SETTINGS = (
    "run.batches=5",
    "admission.max_staleness=0",
    "algorithm.groups_per_batch=8",
    "algorithm.group_size=4",
    "algorithm.updates_per_batch=2",
    "sampling.max_tokens=64",
    "checkpoint.archive_batches=true",
    "eval.problems=1",
    "eval.samples=1",
)
TOLERANCE = 1e-6
"""Largest difference of a weight; five batches at these rates move weights by up to 2e-3."""
MOVED = 1e-4


@pytest.mark.timeout(900)
def test_with_staleness_0_a_run_trains_the_groups_tokens_and_weights_of_a_synchronous_loop(
    start: Callable[..., Run], arithmetic_base: Path, tmp_path: Path
) -> None:
    """The two run side by side and share nothing but the base.

    Which requests meet in a batch of the engine differs between them. Equal tokens need log-probs
    that do not depend on it: on the CPUs tried, vLLM's were equal to the bit whether samples ran
    alone or together (400 samples, 15,519 tokens). Where a CPU rounds otherwise, a token flips
    about as often as its sampling ties to 1e-6; `generator.max_samples=1` then tells such a flip
    from a fault.
    """
    loop = _start_loop(tmp_path / "loop")
    try:
        run = start("pipeline", *SETTINGS)
        run.finish(800)
        assert loop.wait(800) == 0, (tmp_path / "loop.txt").read_text()[-3000:]
    finally:
        loop.kill()
    expected = json.loads((tmp_path / "loop" / "trained.json").read_text())
    files = BatchFiles(run.dir)
    for version, groups in enumerate(expected["batches"], 1):
        trained = _trained(files, version)
        assert list(trained) == list(groups), f"batch {version} has other ordinals"
        for ordinal, samples in groups.items():
            assert trained[ordinal] == samples, f"batch {version}, group {ordinal}: other tokens"
    assert _filtered(run) == expected["filtered"] != []
    assert max(row["staleness_max"] for row in run.rows("batch")) == 0

    ours, theirs = _weights(run.dir / "export"), _weights(tmp_path / "loop" / "export")
    assert _distance(ours, theirs) < TOLERANCE
    assert _distance(ours, _weights(arithmetic_base / "model")) > MOVED, "nothing was trained"


def _start_loop(folder: Path) -> subprocess.Popen[bytes]:
    """The loop in a process of its own, with as many threads as a role of `dapo run` has."""
    command = [sys.executable, "-m", "tests.e2e.synchronous_loop", str(RECIPE), str(folder)]
    with folder.with_suffix(".txt").open("w") as out:
        return subprocess.Popen(
            [*command, *SETTINGS],
            stdout=out, stderr=out, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def _trained(files: BatchFiles, version: int) -> dict[str, Any]:
    """Token ids of every sample of a batch, by ordinal, in order of the ordinals."""
    return {
        str(group.ordinal): [decode(Sample, data).token_ids.tolist() for data in group.samples]
        for group in files.load(version)
    }


def _filtered(run: Run) -> list[int]:
    lines = read_lines(run.dir / "ledger.jsonl")
    return sorted(line.ordinal for line in lines if line.fate == "filtered")


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of any weight."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
