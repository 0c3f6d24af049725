"""The real thing, shortened: `dapo run` with real vLLM, DeepSpeed, server and collectives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from common.results import read_results
from tests.e2e.running import ROOT, Run

pytestmark = pytest.mark.slow


def _gone(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that are still alive after a while."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


SHORT = ("eval.problems=32", "eval.samples=2", "algorithm.groups_per_batch=16")


@pytest.mark.timeout(600)
def test_a_run_survives_kills_of_generator_and_learner_and_keeps_its_promises(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    """The learner dies in the middle of its second checkpoint, the generator between two looks."""
    run = start(
        "kills", *SHORT, "run.batches=8", "checkpoint.every=3", "generator.count=2",
        DAPO_FAILPOINT="checkpoint_half_written:2", DAPO_FAILPOINT_DIR=str(tmp_path),
    )  # fmt: skip
    run.until("second batch", lambda: len(run.rows("batch")) >= 2, 400)

    generator = run.role("generator")
    engine = generator.children(recursive=True)
    generator.kill()
    assert engine and not _gone(engine, 5.0), "an engine outlived its generator"
    seen = len(run.rows("batch"))
    run.until("batch after the generator's death", lambda: len(run.rows("batch")) > seen, 120)

    run.finish(300)

    log = (run.dir / "logs" / "learner.jsonl").read_text()
    resumed = [line for line in map(json.loads, log.splitlines()) if line["event"] == "resumed"]
    assert [(line["checkpoint"], line["replayed"]) for line in resumed] == [
        (None, []),
        (3, [4, 5, 6]),
    ]
    at_6 = [row["probe_logprob"] for row in run.rows("round") if row["step"] == 6]
    assert len(at_6) >= 2 and max(at_6) - min(at_6) < 1e-4, "a replay led to other weights"
    batches = run.rows("batch")
    assert batches[-1]["step"] == 8
    assert {row["groups"] for row in batches} == {16}
    assert max(row["staleness_max"] for row in batches) <= 1
    assert max(row["gap_mean"] for row in batches if row["gap_tokens"]) < 1e-3
    rounds = [row for row in run.rows("round") if row.get("members")]
    assert max(row["probe_gap"] for row in rounds) < 1e-3
    audit = run.audit()
    assert audit["trained"] == 8 * 16
    assert audit["balanced"] and not audit["duplicates"] and not audit["missing"]
    summary = json.loads((run.dir / "report" / "summary.json").read_text())
    assert summary["batch_groups_min"] == summary["batch_groups_max"] == 16
    assert (run.dir / "report" / "curves.png").stat().st_size > 10_000
    assert [row["label"] for row in run.rows("eval")] == ["before", "after"]
    for label in ("before", "after"):  # and the result of each problem
        assert len(read_results(run.dir / "evaluations" / f"{label}.jsonl")) == 32


@pytest.mark.timeout(400)
def test_two_ranks_under_zero_3_train_and_the_export_is_what_was_published(
    start: Callable[..., Run],
) -> None:
    run = start(
        "ranks", *SHORT, "run.batches=3", "learner.ranks=2", "learner.zero_stage=3"
    )  # fmt: skip
    run.finish(350)
    assert run.rows("batch")[-1]["step"] == 3
    assert run.audit()["trained"] == 3 * 16
    rounds = [row for row in run.rows("round") if row.get("members")]
    assert rounds[-1]["step"] == 3 and rounds[-1]["probe_gap"] < 1e-3

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.dir / "export")
    tokenizer = AutoTokenizer.from_pretrained(run.dir / "export")
    ids = tokenizer("1+2+3+4=?\n", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()

    folder = run.dir.parent / "exported"
    words = ["-m", "common.cli", "export", str(run.dir), str(folder)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)
    exported = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.equal(exported[name]), name


@pytest.mark.timeout(400)
def test_ctrl_c_saves_a_checkpoint_and_leaves_no_process_within_20_seconds(
    start: Callable[..., Run],
) -> None:
    run = start("stopped", *SHORT, "run.batches=50")
    run.until("first batch", lambda: run.rows("batch"), 300)
    family = run.family()
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    run.process.wait(20)
    assert time.monotonic() - began < 20
    assert not _gone(family, 1.0), "a process outlived the run"
    assert list((run.dir / "checkpoints").iterdir()), run.output.read_text()[-2000:]
    assert run.audit()["balanced"]
