"""What the end-to-end tests share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.config import load_config
from common.startup import base_dir
from tests.e2e.running import RECIPE, ROOT, Run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random character-level Qwen2 with its tokenizer, as the arithmetic recipe makes it."""
    from learner.warmup import character_model, character_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    character_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    return folder


@pytest.fixture(scope="session")
def arithmetic_base() -> Path:
    """The base of the arithmetic recipe, made where it is missing: `model` and the data files."""
    command = [sys.executable, "-m", "common.cli", "model", str(RECIPE)]
    subprocess.run(command, cwd=ROOT, check=True)
    folder = base_dir(load_config(RECIPE))
    assert folder is not None
    return ROOT / folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs; whatever is left of them at the end is killed and reported."""
    runs: list[Run] = []

    def begin(name: str, *sets: str, **environment: str) -> Run:
        runs.append(Run(tmp_path, name, *sets, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            left = run.family()
            run.process.kill()
            psutil.wait_procs(left, timeout=10)
