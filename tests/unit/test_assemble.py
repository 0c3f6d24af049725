"""From chosen groups to trajectories: the same mini-batches on any number of ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import Config, parse_config
from common.errors import MessageError
from common.messages import Verdict as VerdictRecord
from common.messages import Version, decode, encode
from learner.assemble import Item, require_trainable, response_tokens, split, trajectories
from tests.unit.records import a_sample, a_stored_group


def config(updates: int = 2, groups: int = 8, seed: int = 0, **algorithm: object) -> Config:
    tree = {
        "run": {"seed": seed},
        "model": {"path": "m", "max_length": 64},
        "data": {"train": ["t"]},
        "sampling": {"max_tokens": 32},
        "algorithm": {
            "group_size": 4, "groups_per_batch": groups, "updates_per_batch": updates, **algorithm,
        },
    }  # fmt: skip
    return parse_config(tree, "test")


def items(sizes: list[int]) -> list[Item]:
    return [Item(3 * index, index % 2, size) for index, size in enumerate(sizes)]


sizes_8 = st.lists(st.integers(0, 1000), min_size=8, max_size=8)


@settings(max_examples=60)
@given(sizes=sizes_8, seed=st.integers(0, 99), version=st.integers(0, 99))
def test_mini_batches_hold_the_same_groups_on_one_two_and_three_ranks(
    sizes: list[int], seed: int, version: int
) -> None:
    batch = items(sizes)
    plans = [split(batch, config(seed=seed), version, world) for world in (1, 2, 3)]
    joined = [[sorted(item for rank in mini for item in rank) for mini in plan] for plan in plans]
    assert joined[0] == joined[1] == joined[2]
    assert [len(mini) for mini in joined[0]] == [4, 4]
    assert sorted(item for mini in joined[0] for item in mini) == sorted(batch)


@settings(max_examples=40)
@given(sizes=sizes_8, order=st.permutations(range(8)), world=st.integers(1, 4))
def test_the_plan_depends_on_the_batch_and_not_on_the_order_in_which_it_is_given(
    sizes: list[int], order: list[int], world: int
) -> None:
    batch = items(sizes)
    shuffled = [batch[index] for index in order]
    assert split(shuffled, config(), 3, world) == split(batch, config(), 3, world)


def test_the_shuffle_changes_with_the_version_and_with_the_seed() -> None:
    batch = items([1] * 8)
    plans = [split(batch, config(seed=seed), version, 1) for seed in (0, 1) for version in range(3)]
    assert len({str(plan) for plan in plans}) == 6


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    plan = split(items([900, 800, 700, 600, 500, 400, 300, 200]), config(updates=1), 0, 2)
    loads = [sum(item.tokens for item in rank) for rank in plan[0]]
    assert loads == [2200, 2200]


def test_more_ranks_than_groups_leave_ranks_without_work_and_lose_nothing() -> None:
    plan = split(items([5, 6]), config(updates=1, groups=2), 0, 3)
    assert sorted(len(rank) for rank in plan[0]) == [0, 1, 1]


def test_trajectories_carry_the_groups_advantages_by_sample_index() -> None:
    group = a_stored_group(5, lengths=(3, 2, 5, 1))
    made = trajectories(group, config())
    # rewards are -1, 1, -1, 1: mean 0, sample standard deviation sqrt(4/3)
    expected = np.array([-1, 1, -1, 1]) / (np.sqrt(4 / 3) + 1e-6)
    assert [t.advantage for t in made] == pytest.approx(expected.tolist())
    assert [(t.group, t.sample, len(t.response_ids)) for t in made] == [
        (5, 0, 3), (5, 1, 2), (5, 2, 5), (5, 3, 1),
    ]  # fmt: skip
    assert made[2].prompt_ids.tolist() == [1, 2, 3, 4, 5]
    assert made[0].spans[0][:2] == Version(1, 0)


def test_the_population_standard_deviation_is_used_where_the_recipe_says_so() -> None:
    made = trajectories(a_stored_group(5), config(advantage_ddof=0, advantage_epsilon=0))
    assert [t.advantage for t in made] == pytest.approx([-1, 1, -1, 1])


def test_without_normalization_the_advantage_is_the_distance_to_the_mean() -> None:
    made = trajectories(a_stored_group(5, lengths=(3, 2)), config(advantage_normalization="none"))
    assert [t.advantage for t in made] == [-1.0, 1.0]


@pytest.mark.parametrize("filtered", [False, True])
def test_the_overlong_filter_masks_what_the_engine_cut_and_keeps_it_in_mean_and_std(
    filtered: bool,
) -> None:
    group = a_stored_group(5, lengths=(3, 2, 5, 1))
    cut = encode(dataclasses.replace(a_sample(5), finish_reason="length"))
    group = dataclasses.replace(group, samples=[*group.samples[:2], cut, group.samples[3]])
    made = trajectories(group, config(overlong_filter=filtered))
    assert [t.masked for t in made] == [False, False, filtered, False]
    assert [t.advantage for t in made] == [
        t.advantage for t in trajectories(a_stored_group(5, lengths=(3, 2, 5, 1)), config())
    ]


@pytest.mark.parametrize(
    ("judged", "payload", "words"),
    [
        (2, encode(a_sample(3)), "3 tokens, but 2 were judged"),
        (60, encode(a_sample(60)), "65 tokens are above 64"),
        (50, encode(a_sample(50)), "token 49 in a vocabulary of 49"),
        (2, b"\xc1", "msgpack"),
    ],
)
def test_a_payload_that_would_end_the_ranks_is_refused(
    judged: int, payload: bytes, words: str
) -> None:
    sound = a_stored_group(5, lengths=(3, 2, 49, 1))
    require_trainable(sound, config(), vocabulary=49)
    group = a_stored_group(5, lengths=(3, judged, 5, 1))
    group = dataclasses.replace(group, samples=[group.samples[0], payload, *group.samples[2:]])
    with pytest.raises(MessageError, match=words):
        require_trainable(group, config(), vocabulary=49)


def test_a_group_whose_verdict_is_of_other_samples_is_refused() -> None:
    group = a_stored_group(5, lengths=(3, 2, 5, 1))
    group = dataclasses.replace(group, samples=group.samples[:3])
    with pytest.raises(MessageError, match="3 samples, but 4 were judged"):
        require_trainable(group, config(), vocabulary=49)


def test_response_tokens_count_every_sample_of_a_verdict() -> None:
    verdict = decode(VerdictRecord, a_stored_group(5, lengths=(3, 2, 5, 1)).verdict)
    assert response_tokens(verdict) == 11
