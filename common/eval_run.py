"""`dapo eval`: find the weights, start an examiner with generators and verifiers, wait, report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from common.config import Config
from common.errors import ConfigError, DapoError
from common.eval_settings import Weights, Wish, find_weights, settings
from common.process import die_with_parent
from common.startup import URL_VARIABLE, write_config
from common.status import read_status
from common.supervisor import RoleFailed, Supervisor, evaluation_roles

REFRESH_S = 1.0
LINE_S = 10.0
"""Between two lines of progress where there is no terminal."""
FAILED_GRACE_S = 2.0


def evaluate(model: Path, wish: Wish, out: Path | None) -> tuple[Path, dict[str, Any]]:
    """Evaluate MODEL; the folder of the results, and `result.json` in it.

    Progress goes to standard error. Ctrl-C ends it with the problems that are done.

    Raises:
        DapoError: it cannot be started, a role failed for good, or it was stopped before any
            problem was done.
    """
    console = Console(stderr=True, markup=False, highlight=False)
    weights = find_weights(model)
    out = out or _default_out(weights)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another --out")
    folder = weights.folder or _export(model, out / "model")
    config = settings(wish, weights, folder, out)
    console.print(f"evaluation in {out}")
    write_config(config)
    _supervise(config, str(weights.version), console)
    path = out / "result.json"
    if not path.exists():
        raise DapoError(f"the evaluation was stopped before it began; see {out / 'logs'}")
    result: dict[str, Any] = json.loads(path.read_text())
    return out, result


def _default_out(weights: Weights) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", weights.name).strip("-.")
    return Path("runs") / f"eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _export(run_dir: Path, folder: Path) -> Path:
    """Write the newest checkpoint as a folder, in a process of its own: this one has no torch."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = ["-m", "common.cli", "export", str(run_dir), str(folder)]
    made = subprocess.run(
        [sys.executable, *words], stdout=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    if made.returncode:
        raise DapoError(f"the newest checkpoint of {run_dir} could not be exported; see above")
    return folder


def _supervise(config: Config, version: str, console: Console) -> None:
    """Run the roles until the examiner has ended, on a server of their own."""
    os.environ.pop(URL_VARIABLE, None)
    supervisor = Supervisor(
        config, lambda text: console.print(text, style="yellow", soft_wrap=True),
        evaluation_roles(config, version), "the problems that are done are kept",
    )  # fmt: skip
    progress = Progress(config, supervisor, console)
    try:
        supervisor.start()
        with progress:
            supervisor.run(progress.tick)
    except RoleFailed:
        supervisor.grace_s = FAILED_GRACE_S  # there is nothing to save any more
        raise
    finally:
        supervisor.end()
        shutil.rmtree(config.run_dir / "server", ignore_errors=True)


class Progress:
    """One line that says how far the evaluation is: kept up to date, or printed now and then."""

    def __init__(self, config: Config, supervisor: Supervisor, console: Console) -> None:
        self.config, self.supervisor, self.console = config, supervisor, console
        self._status = console.status("starting") if console.is_terminal else None
        self._began = self._due = time.monotonic()
        self._said = ""

    def __enter__(self) -> Progress:
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + (REFRESH_S if self._status else LINE_S)
        text = progress_text(read_status(self.supervisor.url, self.config.run.name))
        if self._status:
            self._status.update(f"{text}, {now - self._began:.0f} s")
        elif text != self._said:
            self._said = text
            self.console.print(f"{text}, {now - self._began:.0f} s")


def progress_text(status: dict[str, Any]) -> str:
    """How far an evaluation is, from what its roles have reported."""
    reports = status.get("reports", {})
    examiner = reports.get("examiner")
    if examiner is None:
        return "reading the problems"
    if not examiner["generators"]:
        return f"{examiner['problems']} problems; waiting for an engine"
    so_far = f"{examiner['done']} of {examiner['problems']} problems, {examiner['samples']} samples"
    if examiner["done"] == examiner["problems"]:
        return so_far
    living = [reports[name] for name in status["members"] if name in reports]
    generators = [report for report in living if report.get("role") == "generator"]
    rate = sum(report["tokens_per_second"] for report in generators)
    by = f"{len(generators)} generator" + "s" * (len(generators) != 1)
    return f"{so_far}, {rate:.0f} tokens/s by {by}"
