"""The worked example of docs/own-task.md: its checker, its data and its recipe fit together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load_config
from common.startup import base_dir

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "own_task"
CHECKER = f"{EXAMPLE.relative_to(ROOT)}/short_sentence.py:check"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """A command in the project's folder, as the page has it."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290)


def test_the_checker_agrees_with_every_labelled_response() -> None:
    labelled = EXAMPLE / "labelled.jsonl"
    done = run("-m", "common.cli", "verify", labelled, "--checker", CHECKER, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert result["agree"] == result["n"] == len(labelled.read_text().splitlines())
    assert result["no_answer"] > 0


def test_data_recipe_and_checker_pass_the_dry_run(tmp_path: Path) -> None:
    recipe = EXAMPLE / "recipe.toml"
    base = base_dir(load_config(recipe))
    if not (ROOT / str(base) / "model" / "config.json").exists():
        pytest.skip(f"SmolLM2 is not here: `dapo model {recipe}` makes {base}")
    assert run(EXAMPLE / "make_data.py", tmp_path).returncode == 0
    done = run(
        "-m", "common.cli", "run", recipe, "--dry-run",
        "--set", f'data.train=["{tmp_path}/train.jsonl"]',
        "--set", f"data.heldout={tmp_path}/heldout.jsonl",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"ok    checkers: short_sentence is {ROOT / CHECKER}" in done.stdout
    assert "ok    rows: 264 to train on" in done.stdout
