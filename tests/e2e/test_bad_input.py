"""What a newcomer gets wrong: one clear message, status 2, no traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import DapoError, ServerLostError
from common.server import EmbeddedServer

ROOT = Path(__file__).parents[2]


def dapo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("DAPO_")}
    return subprocess.run(
        [sys.executable, "-m", "common.cli", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env | environment,
        timeout=120,
    )


def refused(
    result: subprocess.CompletedProcess[str], *parts: str, status: int = DapoError.status
) -> None:
    said = result.stderr + result.stdout
    assert result.returncode == status, said
    assert "Traceback" not in said, said
    for part in parts:
        assert part in said, f"{part!r} is not in: {said}"


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    text = f"""
[run]
name = "bad"
dir = "{tmp_path}/runs"
batches = 1
[model]
path = "{tiny_model}"
dtype = "float32"
max_length = 64
[data]
train = ["{tmp_path}/train.jsonl"]
[sampling]
max_tokens = 32
[algorithm]
group_size = 2
groups_per_batch = 2
"""
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return path


def test_an_unknown_key_is_named_with_a_suggestion(recipe: Path) -> None:
    result = dapo("run", str(recipe), "--set", "algorithm.group_sise=8")
    refused(result, "algorithm.group_sise", "group_size")


def test_a_missing_recipe_is_named() -> None:
    refused(dapo("run", "nowhere.toml"), "nowhere.toml", "deploy/recipes")


def test_a_missing_model_folder_is_named_with_the_remedy(recipe: Path) -> None:
    result = dapo("run", str(recipe), "--set", "model.path=no/such/model")
    refused(result, "no/such/model", "model.path")


def _train_on(recipe: Path, row: dict[str, object]) -> subprocess.CompletedProcess[str]:
    (recipe.parent / "train.jsonl").write_text(json.dumps(row) + "\n")
    return dapo("run", str(recipe))


def test_a_row_without_a_gold_is_named(recipe: Path) -> None:
    refused(_train_on(recipe, {"prompt": "1+1="}), "train.jsonl, row 1", "no gold")


def test_an_unreadable_gold_is_named(recipe: Path) -> None:
    row: dict[str, object] = {"prompt": "1+1=", "answer": "two apples or three"}
    refused(_train_on(recipe, row), "train.jsonl, row 1", "gold")


def test_a_file_whose_prompts_are_all_longer_than_the_context_is_named(recipe: Path) -> None:
    result = _train_on(recipe, {"prompt": "1+" * 40 + "1=", "answer": "41"})
    refused(result, "no row of", "train.jsonl", "model.max_length")


def test_a_server_that_needs_a_password_says_where_to_put_it(recipe: Path, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server")
    url = server.start()
    try:
        open_url = "redis://" + url.rpartition("@")[2]
        result = dapo("verifier", str(recipe), "--set", f"redis.url={open_url}")
        refused(result, "credentials", "DAPO_REDIS_PASSWORD")
        result = dapo("run", str(recipe), "--set", f"redis.url={open_url}")
        refused(result, "credentials", "DAPO_REDIS_PASSWORD")
    finally:
        server.stop()


def test_a_server_that_is_not_there_is_named(recipe: Path) -> None:
    server = "redis.url=redis://127.0.0.1:9/0"
    result = dapo("verifier", str(recipe), "--set", server, "--set", "redis.patience_s=0.5")
    refused(result, "127.0.0.1:9", "redis.url", "redis.patience_s", status=ServerLostError.status)


def test_a_port_in_use_is_named(recipe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = dapo("run", str(recipe), "--set", f"redis.port={port}")
        refused(result, f"port {port} is in use", "redis.port")


def test_a_role_without_a_server_says_what_to_set(recipe: Path) -> None:
    refused(dapo("generator", str(recipe)), "redis.url")


def test_a_dry_run_prints_the_configuration_and_its_checks(recipe: Path) -> None:
    result = dapo("run", str(recipe), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "groups_per_batch = 2" in result.stdout
    assert "ok    model" in result.stdout


def test_a_dry_run_refuses_a_context_that_the_model_does_not_have(recipe: Path) -> None:
    result = dapo("run", str(recipe), "--dry-run", "--set", "model.max_length=100000")
    refused(result, "model.max_length", "max_position_embeddings")
