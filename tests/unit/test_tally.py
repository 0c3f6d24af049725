"""Sums that add up over micro-batches and ranks, and the means made of them."""

from __future__ import annotations

import math

import pytest
import torch

from learner.tally import SUMS, Tally


def tally(tokens: float, gap: float, largest: float) -> Tally:
    result = Tally(2, torch.device("cpu"))
    sums = dict.fromkeys(SUMS, tokens)
    sums |= {"entropy": 2 * tokens, "importance_squared": 2 * tokens, "responses": tokens / 5}
    sums |= {"outside_responses": tokens / 20}
    table = torch.tensor([[gap, 0.0, tokens / 2], [0.0, 0.0, 0.0]], dtype=torch.float64)
    named = {name: torch.tensor(value) for name, value in sums.items()}
    result.count(named, table, torch.tensor(largest))
    return result


def test_joined_tallies_have_the_means_of_all_tokens_together() -> None:
    total = tally(10, gap=1.0, largest=0.3)
    total.add(tally(30, gap=3.0, largest=0.2))
    means = total.means()
    assert means["tokens_trained"] == 40
    assert means["entropy"] == 2
    assert means["importance_ess"] == pytest.approx(0.5)
    assert means["importance_outside_responses"] == pytest.approx(0.25)
    assert means["responses_trained"] == 8
    assert means["clip_dual"] == means["kl_reference"] == means["importance_dropped"] == 1
    gaps, by_age = total.gaps()
    assert gaps["gap_mean"] == pytest.approx(4 / 20)
    assert gaps["gap_max"] == pytest.approx(0.3)
    assert by_age == {0: pytest.approx(0.2)}


def test_a_tally_joined_without_its_gaps_adds_its_sums_alone() -> None:
    total = tally(10, gap=1.0, largest=0.3)
    before = total.gaps()
    total.add(tally(30, gap=3.0, largest=0.9), gaps=False)
    assert total.means()["tokens_trained"] == 40
    assert total.gaps() == before


def test_every_sum_must_be_counted() -> None:
    with pytest.raises(KeyError):
        Tally(1, torch.device("cpu")).count({}, torch.zeros(1, 3), torch.zeros(()))


def test_nothing_trained_gives_zeros_and_a_gap_of_nothing_is_no_number() -> None:
    empty = Tally(1, torch.device("cpu"))
    assert all(value == 0 for value in empty.means().values())
    gaps, by_age = empty.gaps()
    assert all(math.isnan(gaps[name]) for name in ("gap_mean", "gap_max", "gap_k3"))
    assert gaps["gap_tokens"] == 0 and by_age == {}
