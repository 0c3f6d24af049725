"""structlog, set up once per process: JSON lines into a file, readable lines on a terminal.

Every line carries run, role and member; whoever knows group and version binds them.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import structlog

_errors = (0, 0.0, "")


def get_logger(name: str) -> Any:
    """A structlog logger; the module's name becomes the field `logger`."""
    return structlog.get_logger(name)


def configure(role: str, member: str, run: str, file: Path | None = None) -> None:
    """Send this process's lines to `file` as JSON, or to standard error for reading."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _remember_error,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if file is None:
        stream: Any = sys.stderr
        render: list[Any] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("a", buffering=1)
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=shared + render,
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(run=run, role=role, member=member)
    logging.basicConfig(level=logging.WARNING)
    for noisy in ("httpx", "urllib3", "transformers", "deepspeed", "DeepSpeed"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def errors_so_far() -> tuple[int, float, str]:
    """How many errors this process has logged, and the time and the words of the last one."""
    return _errors


def _remember_error(logger: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
    global _errors
    if event["level"] in ("error", "critical"):
        details = (event[key] for key in ("why", "error", "reason") if event.get(key))
        words = ": ".join(map(str, (event["event"], *details)))
        _errors = (_errors[0] + 1, time.time(), words[:300])
    return event
