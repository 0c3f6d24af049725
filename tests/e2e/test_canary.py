"""The canary: at a learning rate of 0 the whole pipeline runs and nothing moves.

Whatever is not training (publication, in-flight updates, kept KV caches, importance weights)
then has to leave no trace, so a gap that grows here is a fault and not the policy's progress.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.running import Run

pytestmark = pytest.mark.slow

BATCHES = 20
SETTINGS = (
    f"run.batches={BATCHES}",
    "learner.learning_rate=0",
    "learner.weight_decay=0.1",
    "algorithm.groups_per_batch=6",
    "algorithm.group_size=4",
    "algorithm.updates_per_batch=2",
    "generator.keep_kv_cache=true",
    "eval.problems=1",
    "eval.samples=1",
)
GAP = 1e-6
"""Mean |Δ log p| between engine and learner in a batch, fp32: rounding alone, 4e-7 measured."""
GAP_FEW_TOKENS = 3e-6
"""The same for the tokens of one age, of which a batch may have a few only."""
TREND = 0.25
"""Between the means of the first and the second half of the batches, 4 % is noise."""
PROBE_GAP = 1e-5


@pytest.mark.timeout(600)
def test_at_learning_rate_0_weights_stay_to_the_bit_and_every_gap_stays_flat(
    start: Callable[..., Run], arithmetic_base: Path
) -> None:
    run = start("canary", *SETTINGS)
    run.finish(550)

    base = load_file(arithmetic_base / "model" / "model.safetensors")
    export = load_file(run.dir / "export" / "model.safetensors")
    assert export.keys() == base.keys()
    for name, tensor in base.items():
        assert tensor.view(torch.int32).equal(export[name].view(torch.int32)), name

    batches = run.rows("batch")
    assert [row["step"] for row in batches] == [*range(1, BATCHES + 1)]
    assert min(row["grad_norm"] for row in batches) > 0, "there was nothing to stand still against"
    assert {row["optimizer_steps"] for row in batches} == {2}
    assert max(max(row["gap_by_age"].values()) for row in batches) < GAP_FEW_TOKENS
    gaps = [_gap(row) for row in batches]
    assert max(gaps) < GAP
    early, late = mean(gaps[: BATCHES // 2]), mean(gaps[BATCHES // 2 :])
    assert abs(late - early) < TREND * early, gaps
    for row in batches:
        assert abs(row["ratio_mean"] - 1) < GAP and abs(row["importance_mean"] - 1) < GAP
        assert row["clip_lower"] == row["clip_upper"] == 0

    rounds = [row for row in run.rows("round") if row["members"]]
    assert {row["step"] for row in rounds} == {*range(BATCHES + 1)}
    assert len({row["probe_logprob"] for row in rounds}) == 1, "the learner's own probe moved"
    probes = [row["probe_gap"] for row in rounds]
    assert max(probes) < PROBE_GAP and max(probes) - min(probes) < GAP


def _gap(batch: dict[str, Any]) -> float:
    """Mean |Δ log p| over the tokens of both ages, of which the figures give each its mean."""
    current, tokens = batch["gap_tokens"], batch["tokens_trained"]
    ages = batch["gap_by_age"]
    assert ages.keys() <= {"0", "1"}
    return float(ages.get("0", 0.0) * current + ages.get("1", 0.0) * (tokens - current)) / tokens
