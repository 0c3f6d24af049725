"""What is reported of every batch: figures from its verdicts beside those of the engine.

After a figure's name, `_raw` says "before the filter": over all groups judged since the last
batch, those filtered included. Without it, a figure is about the groups trained. Rewards are the
shaped ones; `reward_unshaped` is for correctness alone. What no sample was there for is None.

    accuracy, reward, reward_unshaped, penalty      means over samples; accuracy is exact
    length_mean, _p10, _p50, _p90, _p99, _max       response tokens of a sample
    at_cap_share, truncated_share                   samples cut off at the cap; after and before
                                                    the filter
    acceptance                                      groups judged that passed
    all_correct_share, all_wrong_share              groups judged that were filtered; those without
    all_no_answer_share                             any answer are among the all wrong
    no_answer_share                                 samples judged without an answer
    staleness_mean, staleness_max                   batches from a sample's oldest token to training
    versions_mean, versions_max                     policy versions from a sample's oldest token to
                                                    its newest
    long_ratio                                      see `learner.length_bias`
    lost_generating                                 groups lost before they were complete
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.messages import Judged
from learner.groups import Chosen, Judgements

Figures = dict[str, Any]


def batch_figures(
    engine: Figures, batch: list[Chosen], judged: Judgements, version: int
) -> Figures:
    """Figures of a batch trained at `version`: engine, samples trained, samples judged."""
    trained = _trained([item for chosen in batch for item in chosen.verdict.samples], version)
    trained |= {"groups": len(batch), "attempts": sum(chosen.attempt for chosen in batch)}
    return engine | trained | judged_figures(judged)


def _trained(samples: list[Judged], version: int) -> Figures:
    count = max(1, len(samples))
    ages = [version - item.oldest.number for item in samples]
    spans = [item.newest.number - item.oldest.number + 1 for item in samples]
    reward, penalty = (
        sum(getattr(item, name) for item in samples) / count for name in ("reward", "penalty")
    )
    return {
        "samples": len(samples),
        "accuracy": sum(item.outcome == "correct" for item in samples) / count,
        "reward": reward,
        "reward_unshaped": reward - penalty,
        "penalty": penalty,
        **_lengths([item.length for item in samples]),
        "at_cap_share": sum(item.truncated for item in samples) / count,
        "staleness_mean": sum(ages) / count,
        "staleness_max": max(ages, default=0),
        "versions_mean": sum(spans) / count,
        "versions_max": max(spans, default=0),
        "multi_version_samples": sum(item.oldest != item.newest for item in samples),
        "by_generator": dict(Counter(item.generator for item in samples)),
    }


def judged_figures(judged: Judgements) -> Figures:
    """Figures over all samples judged, filtered ones included; None if there were none, as when a
    batch is formed of groups that were left over."""

    def share(part: float, whole: int) -> float | None:
        return part / whole if whole else None

    samples, reasons = len(judged.lengths), judged.reasons
    return {
        "accuracy_raw": share(judged.correct, samples),
        "reward_raw": share(judged.reward, samples),
        "reward_unshaped_raw": share(judged.reward - judged.penalty, samples),
        **{f"{name}_raw": value for name, value in _lengths(judged.lengths).items()},
        "no_answer_share": share(judged.no_answer, samples),
        "truncated_share": share(judged.truncated, samples),
        "acceptance": judged.acceptance,
        "all_correct_share": share(reasons["all_correct"], judged.groups),
        "all_wrong_share": share(reasons["all_wrong"] + reasons["no_answer"], judged.groups),
        "all_no_answer_share": share(reasons["no_answer"], judged.groups),
        "groups_judged": judged.groups,
        "verdicts_failed": judged.failed,
        "lost_generating": len(judged.lost),
    }


def _lengths(lengths: Sequence[int]) -> Figures:
    """Mean, quantiles and maximum, in tokens."""
    names = ("length_p10", "length_p50", "length_p90", "length_p99")
    if not lengths:
        return dict.fromkeys(("length_mean", *names, "length_max"))
    quantiles = np.quantile(lengths, (0.1, 0.5, 0.9, 0.99)).tolist()
    mean = sum(lengths) / len(lengths)
    return {"length_mean": mean, **dict(zip(names, quantiles, strict=True)),
            "length_max": max(lengths)}  # fmt: skip
