"""What the newest batches of a run have measured, for a simulation of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common.errors import ConfigError
from common.metrics import read_metrics
from learner.durations import Measured

NEWEST = 20
QUANTILES = {
    0.1: "length_p10_raw", 0.5: "length_p50_raw", 0.9: "length_p90_raw", 0.99: "length_p99_raw",
    1.0: "length_max_raw",
}  # fmt: skip


@dataclass(frozen=True)
class Observed:
    """Means over the newest batches; `filter_rate` is the share of groups filtered."""

    durations: Measured
    train_s: float
    publish_s: float
    filter_rate: float


def observe(run_dir: Path, sample_s: float | None = None) -> Observed:
    """Lengths of responses, times of the learner and the filter's share of a run.

    `sample_s` are the mean seconds of a sample; without it they follow from the pace of the
    generators: so many samples at once made so many tokens per second.

    Raises:
        ConfigError: the run has no batch with such figures, or no pace was measured.
    """
    rows = [row for row in read_metrics(run_dir, "batch") if _has_lengths(row)][-NEWEST:]
    if not rows:
        raise ConfigError(
            f"{run_dir / 'metrics.jsonl'} has no batch with length quantiles; train a few batches "
            "first, or leave --run out"
        )
    token_s = _token_s(rows) if sample_s is None else sample_s / _mean(rows, "length_mean_raw")
    if token_s is None:
        raise ConfigError(
            f"{run_dir / 'metrics.jsonl'} does not say how fast samples are made "
            "(samples_running, tokens_per_second_generated); give --sample-s"
        )
    points = [(share, _mean(rows, key) * token_s) for share, key in QUANTILES.items()]
    return Observed(
        Measured(((0.0, 0.0), *points)),
        train_s=_mean(rows, "train_s"),
        publish_s=_mean(rows, "publish_s"),
        filter_rate=1.0 - _mean(rows, "acceptance"),
    )


def _has_lengths(row: dict[str, Any]) -> bool:
    return all(row.get(key) is not None for key in QUANTILES.values())


def _token_s(rows: Iterable[dict[str, Any]]) -> float | None:
    """Seconds from one token of a sample to the next."""
    running = sum(row.get("samples_running") or 0 for row in rows)
    tokens = sum(row.get("tokens_per_second_generated") or 0.0 for row in rows)
    return running / tokens if running and tokens else None


def _mean(rows: Iterable[dict[str, Any]], key: str) -> float:
    return fmean(row[key] for row in rows)
