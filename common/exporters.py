"""Where the rows of `Metrics.log` go besides metrics.jsonl, of the learner alone.

Each exporter works in a thread of its own behind a bounded queue: one that is slow, or that fails,
costs its own rows and never a batch.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from common.config import Config
from common.errors import ConfigError
from common.log import get_logger

QUEUE = 1000
"""Rows that may wait for a slow exporter; those after are left out."""
CLOSE_S = 5.0
log = get_logger(__name__)


class Exporter(Protocol):
    """Takes rows; `log` and `close` may take their time."""

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Scalars `kind/key` in RUN/tensorboard, by policy version."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        for key, value in scalars(row):
            self._writer.add_scalar(f"{kind}/{key}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The same scalars at Weights & Biases; a run that goes on is one run there, too."""

    def __init__(self, project: str, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"metrics.wandb_project = {project} needs the package wandb, which is not "
                "installed: `pip install wandb` and `wandb login`, or leave the key out"
            ) from None
        self._run: Any = wandb.init(
            project=project,
            name=config.run.name,
            id=config.run.name,
            resume="allow",
            dir=str(config.run_dir),
            config=config.model_dump(mode="json", exclude={"redis"}),
        )

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        values = {f"{kind}/{key}": value for key, value in scalars(row)}
        self._run.log(values | {"version": step})

    def close(self) -> None:
        self._run.finish()


class InBackground:
    """Another exporter, in a thread, behind a queue."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter
        self._rows: queue.Queue[tuple[str, int, dict[str, Any]] | None] = queue.Queue(QUEUE)
        name = type(exporter).__name__
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        """Returns at once; a row that finds the queue full is left out."""
        try:
            self._rows.put_nowait((kind, step, row))
        except queue.Full:
            log.warning("a row is left out", exporter=self._thread.name, kind=kind, step=step)

    def close(self) -> None:
        """Wait a little for the rows that are under way."""
        try:
            self._rows.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        try:
            while (item := self._rows.get()) is not None:
                self.exporter.log(*item)
            self.exporter.close()
        except Exception as error:
            # the rows are in metrics.jsonl all the same
            log.exception("an exporter has failed and is off", exporter=self._thread.name,
                          error=str(error))  # fmt: skip
            while self._rows.get() is not None:
                pass


def exporters_of(config: Config) -> list[Exporter]:
    """The exporters that the configuration asks for.

    Raises:
        ConfigError: one of them is not installed.
    """
    chosen: list[Exporter] = []
    if config.metrics.tensorboard:
        chosen.append(TensorBoard(config.run_dir))
    if config.metrics.wandb_project is not None:
        chosen.append(WeightsAndBiases(config.metrics.wandb_project, config))
    return [InBackground(exporter) for exporter in chosen]


def scalars(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a row; a mapping's are named `key/name`."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield f"{prefix}{key}", float(value)
