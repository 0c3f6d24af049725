"""The end report of made-up runs."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from common.curves import smooth
from common.history import split_seconds
from common.report import summary, write_report
from tests.unit.synthetic_run import (
    append_rows,
    batch_row,
    eval_row,
    round_row,
    write_config,
    write_run,
)


def colours(path: Path) -> int:
    """Distinct colours of a picture: an empty one has very few."""
    return len(np.unique(imread(path).reshape(-1, 4), axis=0))


def test_the_summary_has_the_figures_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", batches=40)
    figures = summary(tmp_path / "demo")
    assert figures["run"] == "demo" and figures["complete"] and figures["balanced"]
    assert (figures["accuracy_before"], figures["accuracy_after"]) == (0.34, 0.81)
    assert (figures["batches"], figures["batches_planned"]) == (40, 40)
    assert figures["max_staleness"] == figures["staleness_bound"] == 2
    assert figures["batch_groups_min"] == figures["batch_groups_max"] == 16
    assert figures["fates"] == {"trained": 640, "filtered": 200, "stale": 40, "failed": 0}
    assert figures["filtered_groups"] == 200
    assert figures["multi_version_samples"] > 0
    assert 1e-3 < figures["logprob_gap_mean_max"] < 1e-2
    assert 3e-4 < figures["probe_gap_max"] < 2e-3
    assert figures["seconds"] > figures["seconds_training"] > 0
    # what a batch took is divided up without counting the publication twice
    total = sum(figures["phases_s"].values())
    assert total == pytest.approx(figures["seconds_training"], abs=0.01)
    assert sum(figures["samples_by_generator"].values()) == 40 * 128


def test_the_report_is_a_page_two_files_and_two_pictures_with_content(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, batches=30)
    folder = write_report(tmp_path)
    assert folder == tmp_path / "report"
    assert json.loads((folder / "summary.json").read_text()) == summary(tmp_path)
    assert (folder / "index.html").read_text().startswith("<!doctype html>")
    text = (folder / "report.txt").read_text()
    assert "30 of 30 batches" in text and "0.810 ± 0.020" in text
    curves, accuracy = imread(folder / "curves.png"), imread(folder / "accuracy.png")
    assert curves.shape[:2] == (1300, 1200) and accuracy.shape[:2] == (500, 900)
    assert colours(folder / "curves.png") > 500 and colours(folder / "accuracy.png") > 100


def test_a_run_without_a_batch_says_so(tmp_path: Path) -> None:
    write_config(tmp_path, batches=5)
    folder = write_report(tmp_path)
    figures = json.loads((folder / "summary.json").read_text())
    assert figures["batches"] == 0 and figures["accuracy_before"] is None
    assert figures["max_staleness"] is None and figures["logprob_gap_mean_max"] is None
    assert "No batch has been trained yet" in (folder / "report.txt").read_text()
    assert (folder / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("batches", [1, 2])
def test_a_run_of_few_batches_has_a_report(tmp_path: Path, batches: int) -> None:
    write_run(tmp_path, batches)
    assert summary(tmp_path)["batches"] == batches
    assert (write_report(tmp_path) / "accuracy.png").exists()


def test_figures_that_were_not_finite_are_left_out(tmp_path: Path) -> None:
    write_config(tmp_path, batches=3)
    draw = random.Random(0)
    holes = {"entropy": None, "gap_mean": None, "staleness_mean": None, "publish_s": None}
    append_rows(
        tmp_path,
        eval_row("before", 0, 1.0, 0.25),
        batch_row(1, 10.0, draw, **holes),
        batch_row(2, 20.0, draw, gap_mean=0.004),
        round_row(2, 2, 21.0, probe_gap=None),
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"time": 30.0, "kind": "bat')  # a crash inside the write
    folder = write_report(tmp_path)
    figures = json.loads((folder / "summary.json").read_text())
    assert figures["logprob_gap_mean_max"] == 0.004 and figures["probe_gap_max"] is None
    assert figures["accuracy_after"] is None and figures["batches"] == 2


def test_a_batch_without_a_token_of_its_version_has_no_gap(tmp_path: Path) -> None:
    draw = random.Random(0)
    append_rows(tmp_path, batch_row(1, 1.0, draw, gap_mean=0.0, gap_tokens=0.0))
    assert summary(tmp_path)["logprob_gap_mean_max"] is None


def test_a_batch_that_was_trained_again_replaces_the_lost_ones(tmp_path: Path) -> None:
    draw = random.Random(0)
    steps = [1, 2, 3, 2]
    append_rows(tmp_path, *(batch_row(v, 10.0 * i, draw) for i, v in enumerate(steps)))
    figures = summary(tmp_path)
    assert figures["batches"] == 2
    assert sum(figures["samples_by_generator"].values()) == 2 * 128


def test_waiting_does_not_count_the_publication_whichever_way_it_was_measured() -> None:
    both = {"train_s": 3.0, "publish_s": 1.0, "wait_s": 5.0}
    assert split_seconds(both, 8.0) == (4.0, 3.0, 1.0)
    apart = both | {"wait_s": 4.0}
    assert split_seconds(apart, 8.0) == (4.0, 3.0, 1.0)
    after_a_pause = split_seconds(apart, 500.0)
    assert after_a_pause == (4.0, 3.0, 1.0)


def test_smoothing_keeps_a_constant_and_leaves_out_what_is_missing() -> None:
    assert smooth([2.0, 2.0, math.nan, 2.0], 3).tolist() == [2.0, 2.0, 2.0, 2.0]
    assert math.isnan(smooth([math.nan, 1.0, 1.0], 1)[0])


def test_the_report_needs_neither_torch_nor_pyplot(tmp_path: Path) -> None:
    write_run(tmp_path, batches=2)
    code = (
        "import sys; from pathlib import Path; from common.report import write_report; "
        f"write_report(Path({str(tmp_path)!r})); "
        "print([m for m in ('torch', 'vllm', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
