"""A short piece of `make chaos`: a few kills of generators, verifiers and the server."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.chaos.chaos import disturbed

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_a_run_under_a_few_blows_keeps_every_promise(tmp_path: Path) -> None:
    options = argparse.Namespace(
        engine="simulated", seed=5, kills=4, minutes=None, batches=10, empty=False,
        spare=["learner", "supervisor"], set=["generator.count=2", "eval.problems=2"],
    )  # fmt: skip
    outcome = disturbed(options, tmp_path)
    assert outcome.faults == []
    assert outcome.kills > 1
