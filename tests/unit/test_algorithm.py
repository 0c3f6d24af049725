"""The section [algorithm]: what `auto` is, and which combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest

from common.algorithm import AlgorithmSection
from common.config import dump_toml, load_config, parse_config
from common.errors import ConfigError

SEVERAL: dict[str, Any] = {"groups_per_batch": 8, "updates_per_batch": 4}


def config(algorithm: dict[str, Any], **sections: Any) -> Any:
    tree = {"model": {"path": "m"}, "data": {"train": ["t"]}, "algorithm": algorithm, **sections}
    return parse_config(tree, "test")


@pytest.mark.parametrize(
    ("keys", "decoupled", "correction"),
    [
        ({}, False, "none"),
        ({"ratio": "direct"}, False, "none"),
        ({"correction": "mask"}, False, "mask"),
        (SEVERAL, True, "truncate"),
        ({**SEVERAL, "ratio": "decoupled", "correction": "none"}, True, "none"),
        ({**SEVERAL, "ratio": "direct"}, False, "none"),
        ({**SEVERAL, "ratio": "direct", "correction": "sequence_mask"}, False, "sequence_mask"),
    ],
)
def test_auto_decouples_and_truncates_with_several_updates(
    keys: dict[str, Any], decoupled: bool, correction: str
) -> None:
    section = config(keys).algorithm
    assert section.decoupled is decoupled
    assert section.applied_correction == correction


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"ratio": "decoupled"}, "makes every ratio 1 and the clip inert; choose direct"),
        ({"correction": "truncate"}, "the ratio is the importance weight; choose mask"),
        ({**SEVERAL, "ratio": "direct", "correction": "truncate"}, "would weigh twice"),
        ({"groups_per_batch": 6, "updates_per_batch": 4}, "choose a multiple"),
        ({"importance_cap": 3.0}, "algorithm.importance_cap has no effect"),
        ({**SEVERAL, "correction": "mask", "importance_cap": 3.0}, "importance_cap has no effect"),
        ({**SEVERAL, "mask_low": 0.5}, "algorithm.mask_low has no effect"),
        ({"mask_high": 2.0}, "algorithm.mask_high has no effect"),
        ({"advantage_normalization": "none", "advantage_ddof": 1}, "advantage_ddof has no effect"),
        ({"advantage_normalization": "none", "advantage_epsilon": 0.1}, "advantage_epsilon has no"),
        ({"loss_constant": 10.0}, "algorithm.loss_constant has no effect"),
        ({"mask_low": 1.5, "correction": "mask"}, "algorithm.mask_low"),
        ({"mask_high": 0.5, "correction": "mask"}, "algorithm.mask_high"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_by_name(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(keys)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learner": {"min_learning_rate_ratio": 0.1}}, "with learner.schedule = constant"),
        ({"learner": {"schedule": "linear", "warmup_batches": 5}, "run": {"batches": 5}},
         "learner.schedule = linear never begins"),
    ],
)  # fmt: skip
def test_a_schedule_without_effect_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config({}, **sections)


def test_the_default_constant_is_the_generation_cap() -> None:
    keys = {"loss_aggregation": "constant"}
    assert config(keys, sampling={"max_tokens": 300}).loss_constant == 300
    assert config({**keys, "loss_constant": 7.5}).loss_constant == 7.5


def test_bounds_are_those_of_the_correction_in_use_and_the_defaults_of_the_other() -> None:
    keys = AlgorithmSection(correction="mask", mask_high=3.0)
    assert keys.token_bounds == (0.5, 3.0) and keys.response_bounds == (0.99, 1.01)
    keys = AlgorithmSection(correction="sequence_mask", mask_low=0.0)
    assert keys.token_bounds == (0.5, 5.0) and keys.response_bounds == (0.0, 1.01)


@pytest.mark.parametrize(
    "keys",
    [
        {}, SEVERAL, {**SEVERAL, "correction": "mask", "mask_low": 0.2},
        {"advantage_normalization": "none", "loss_aggregation": "constant", "loss_constant": 9.0},
    ],
)  # fmt: skip
def test_the_written_configuration_is_accepted_again(keys: dict[str, Any], tmp_path: Any) -> None:
    written = tmp_path / "config.toml"
    written.write_text(dump_toml(config(keys)))
    assert load_config(written).algorithm == config(keys).algorithm
