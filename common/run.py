"""`dapo run`: prepare, start, watch, report."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from common.audit import has_ended
from common.checks import require_sound
from common.config import Config
from common.errors import DapoError
from common.live import LiveView
from common.process import die_with_parent
from common.report import write_report
from common.startup import base_dir, require_model, write_config
from common.status import read_status
from common.supervisor import RoleFailed, Supervisor, link_latest

REFRESH_S = 1.0
FAILED_GRACE_S = 2.0


def run_all(config: Config) -> bool:
    """Run all roles to the end; True if the run is complete.

    Raises:
        DapoError: it cannot be started, or a role failed for good.
    """
    # no markup: what roles say has brackets of its own
    console = Console(markup=False)
    console.print(f"run {config.run.name} in {config.run_dir}", style="bold")
    path = write_config(config)
    _prepare(config, path)
    require_model(config)
    require_sound(config)
    link_latest(config.run_dir)
    supervisor = Supervisor(
        config, lambda text: console.print(text, style="yellow", soft_wrap=True)
    )
    try:
        supervisor.start()
        complete = _watch(supervisor, config, console)
        if complete and not has_ended(config.run_dir):
            console.print("the learner was told to end; the same command goes on", style="yellow")
            complete = False
    except RoleFailed:
        supervisor.grace_s = FAILED_GRACE_S  # there is nothing to save any more
        raise
    finally:
        supervisor.end()
    if (config.run_dir / "metrics.jsonl").exists():
        folder = write_report(config.run_dir)
        console.print((folder / "report.txt").read_text(), highlight=False)
        console.print(f"report: {folder}")
    return complete


def _prepare(config: Config, path: Path) -> None:
    """Make the base in a process of its own, so that this one never loads torch."""
    folder = base_dir(config)
    if folder is None or (folder / "base.json").exists():
        return
    made = subprocess.run(
        [sys.executable, "-m", "common.cli", "model", str(path)], preexec_fn=die_with_parent
    )
    if made.returncode:
        raise DapoError(f"the base model in {folder} could not be made; see above")


def _watch(supervisor: Supervisor, config: Config, console: Console) -> bool:
    """Show what happens until the end: a live view on a terminal, lines elsewhere."""
    view = LiveView(config.run_dir, lambda: read_status(supervisor.url, config.run.name))
    if not console.is_terminal:
        return supervisor.run(lambda: _print_lines(view, console))
    with Live(view.render(), console=console, auto_refresh=False) as live:
        due = 0.0

        def tick() -> None:
            nonlocal due
            if time.monotonic() >= due:
                due = time.monotonic() + REFRESH_S
                live.update(view.render(), refresh=True)

        return supervisor.run(tick)


def _print_lines(view: LiveView, console: Console) -> None:
    for line in view.plain_lines():
        console.print(line, highlight=False, soft_wrap=True)
