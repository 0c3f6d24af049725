"""What the deployments share: the base model of the tiny recipe."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.config import load_config
from common.startup import base_dir
from tests.deploy.waiting import ROOT, TINY


@pytest.fixture(scope="session")
def base() -> Path:
    """Folder of the tiny recipe's base, relative to where roles are started; made in ROOT/cache."""
    made = subprocess.run(
        [sys.executable, "-m", "common.cli", "model", str(TINY)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    folder = base_dir(load_config(TINY))
    assert folder is not None
    return folder
