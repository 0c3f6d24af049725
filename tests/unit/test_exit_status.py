"""How a role ends tells a service manager whether to start it again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import dump_toml
from common.errors import PASSING, RunTakenError
from common.server import free_port
from common.startup import redis_url
from learner.timeline import RunLock
from tests.conftest import MakeConfig


def status_of(*words: str) -> int:
    """Of a process of its own: a role sets the logs of its process up."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DAPO_")}
    command = [sys.executable, "-m", "common.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True).returncode


def test_a_role_whose_server_stays_away_asks_to_be_started_again(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_toml(make_config(redis={"url": url, "patience_s": 0.1})))
    assert status_of("verifier", str(recipe)) == PASSING


def test_a_recipe_that_a_person_has_to_mend_does_not(tmp_path: Path) -> None:
    assert status_of("verifier", str(tmp_path / "missing.toml")) == 2


def test_a_run_that_another_learner_holds_may_be_free_later(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    with pytest.raises(RunTakenError) as refused:
        RunLock(tmp_path)
    assert held and refused.value.status == PASSING


def test_the_password_may_come_from_a_file_that_the_service_manager_names(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("opensesame\n")
    monkeypatch.delenv("DAPO_REDIS_PASSWORD", raising=False)
    monkeypatch.setenv("DAPO_REDIS_URL", "redis://127.0.0.1:7/0")
    monkeypatch.setenv("DAPO_REDIS_PASSWORD_FILE", str(secret))
    assert ":opensesame@" in redis_url(make_config())
