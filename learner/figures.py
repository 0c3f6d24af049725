"""What is reported of every batch: figures from its verdicts beside those of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.messages import Judged

if TYPE_CHECKING:
    from learner.groups import Chosen, Judgements


def batch_figures(
    engine: dict[str, Any], batch: list[Chosen], judged: Judgements, version: int
) -> dict[str, Any]:
    """Figures of a batch trained at `version`: engine, samples trained, samples judged."""
    samples = [item for chosen in batch for item in chosen.verdict.samples]
    count = max(1, len(samples))
    ages = [version - item.oldest.number for item in samples]
    lengths = [item.length for item in samples]
    trained = {
        "groups": len(batch),
        "samples": len(samples),
        "accuracy": _share(samples, "correct"),
        "reward": sum(item.reward for item in samples) / count,
        "penalty": sum(item.penalty for item in samples) / count,
        "length_mean": sum(lengths) / count,
        "length_max": max(lengths, default=0),
        "at_cap_share": sum(item.truncated for item in samples) / count,
        "staleness_mean": sum(ages) / count,
        "staleness_max": max(ages, default=0),
        "multi_version_samples": sum(item.oldest != item.newest for item in samples),
        "by_generator": _by_generator(samples),
        "attempts": sum(chosen.attempt for chosen in batch),
    }
    return engine | trained | judged.figures()


def _share(samples: list[Judged], outcome: str) -> float:
    return sum(item.outcome == outcome for item in samples) / max(1, len(samples))


def _by_generator(samples: list[Judged]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for item in samples:
        counts[item.generator] = counts.get(item.generator, 0) + 1
    return counts
