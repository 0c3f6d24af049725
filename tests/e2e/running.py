"""A `dapo run` in the background, and what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "deploy" / "recipes" / "arithmetic.toml"
SIMULATED = ROOT / "tests" / "chaos" / "simulated.toml"


class Run:
    """A `dapo run` in the background, of the arithmetic recipe if no other is given."""

    def __init__(
        self, folder: Path, name: str, *sets: str, recipe: Path = RECIPE, **environment: str
    ) -> None:
        self.dir = folder / name
        self.output = folder / f"{name}.txt"
        keys = [f"run.dir={folder}", f"run.name={name}", *sets]
        words = [part for key in keys for part in ("--set", key)]
        env = {key: value for key, value in os.environ.items() if not key.startswith("DAPO_")}
        env |= environment
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "common.cli", "run", str(recipe), *words],
                stdout=out, stderr=out, cwd=ROOT, env=env,
            )  # fmt: skip

    def rows(self, kind: str) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().splitlines()
        return [row for line in lines if line and (row := json.loads(line))["kind"] == kind]

    def until(self, what: str, ready: Callable[[], Any], timeout_s: float) -> Any:
        """Wait for something in the run's own records; never for a fixed time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := ready():
                return value
            if self.process.poll() is not None:
                pytest.fail(f"the run ended before {what}:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.1)
        pytest.fail(f"no {what} within {timeout_s} s:\n{self.output.read_text()[-3000:]}")

    def family(self) -> list[psutil.Process]:
        """Every process below the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def role(self, name: str) -> psutil.Process:
        """The process of a role, by its module in the command line."""
        for process in psutil.Process(self.process.pid).children():
            if name in process.cmdline():
                return process
        pytest.fail(f"no process of {name}")

    def finish(self, timeout_s: float) -> str:
        status = self.process.wait(timeout_s)
        said = self.output.read_text()
        assert status == 0, said[-3000:]
        return said

    def audit(self) -> dict[str, Any]:
        result = subprocess.run(
            [sys.executable, "-m", "common.cli", "audit", str(self.dir), "--json"],
            capture_output=True, text=True, cwd=ROOT,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        figures: dict[str, Any] = json.loads(result.stdout)
        return figures
