"""structlog, set up once per process: JSON lines into a file, readable lines on a terminal.

Every line carries run, role and member; whoever knows group and version binds them.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """A structlog logger; the module's name becomes the field `logger`."""
    return structlog.get_logger(name)


def configure(role: str, member: str, run: str, file: Path | None = None) -> None:
    """Send this process's lines to `file` as JSON, or to standard error for reading."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
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
