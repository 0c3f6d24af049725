"""The configuration: what is refused, with which words, and that writing it out loses nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.config import (
    ArithmeticBase,
    Config,
    SmolLM2Base,
    dump_toml,
    fingerprint,
    load_config,
    parse_config,
)
from common.errors import ConfigError

RECIPE = """
[model]
path = "model"
max_length = 64
[data]
train = ["train.jsonl"]
[sampling]
max_tokens = 32
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def refusal(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, list(overrides))
    return str(caught.value)


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.rank=1", "unknown key learner.rank; did you mean learner.ranks?"),
        ("reward.corect=0.3", "unknown key reward.corect; did you mean reward.correct?"),
        ("lerner.ranks=2", "unknown key lerner; did you mean learner?"),
        ("redis.zzz=2", "unknown key redis.zzz; known here: url,"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_the_nearest_known_one(
    recipe: Path, override: str, words: str
) -> None:
    assert words in refusal(recipe, override)


def test_an_unknown_key_of_a_base_is_compared_with_the_keys_of_every_base(recipe: Path) -> None:
    recipe.write_text(RECIPE + '[base]\nkind = "arithmetic"\nwarmup_step = 3\n')
    assert "unknown key base.warmup_step; did you mean base.warmup_steps?" in refusal(recipe)


def test_every_wrong_key_is_reported_at_once(recipe: Path) -> None:
    text = refusal(recipe, "learner.foo=1", "sampling.temperature=-1")
    assert "learner.foo" in text
    assert "sampling.temperature" in text
    assert "-1" in text


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (["algorithm.importance_cap=3"], "algorithm.importance_cap", "updates_per_batch = 1"),
        (["reward.overlong_factor=2"], "reward.overlong_factor", "reward.overlong_cache = 0"),
        (["eval.every=5"], "eval.every", "without data.heldout"),
        (["data.weights=[2]"], "data.weights", "with one file in data.train"),
        (["redis.password_file=secret"], "redis.password_file", "without redis.url"),
        (["redis.port=7000", "redis.url=redis://a"], "redis.port", "redis.url"),
    ],
)
def test_a_key_without_effect_in_the_chosen_mode_is_an_error_that_names_it(
    recipe: Path, overrides: list[str], key: str, why: str
) -> None:
    text = refusal(recipe, *overrides)
    assert f"{key} has no effect" in text
    assert why in text


def test_the_same_keys_are_accepted_where_they_have_an_effect(recipe: Path) -> None:
    config = load_config(
        recipe,
        ["algorithm.updates_per_batch=2", "algorithm.importance_cap=3", "reward.overlong_cache=8",
         "reward.overlong_factor=0.5", "data.heldout=held.jsonl", "eval.every=5"],
    )  # fmt: skip
    assert config.algorithm.importance_cap == 3
    assert config.eval.every == 5


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("[1]", "data.weights has 1 values for 2 files in data.train"),
        ("[1, 0]", "data.weights.1: Input should be greater than 0"),
        ("[1, 0.3333333]", "data.weights: the weights 1.0, 0.3333333 repeat only after"),
    ],
)
def test_weights_are_one_for_each_file_and_above_zero(
    recipe: Path, weights: str, words: str
) -> None:
    assert words in refusal(recipe, 'data.train=["a", "b"]', f"data.weights={weights}")


def test_a_missing_section_and_a_missing_key_say_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("[model]\n")
    text = refusal(path)
    assert "model.path is missing; set it in the recipe or with --set model.path=" in text
    assert "section [data] is missing" in text


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("run.seed=7", lambda c: c.run.seed, 7),
        ("sampling.temperature=0.5", lambda c: c.sampling.temperature, 0.5),
        ("sampling.temperature=2", lambda c: c.sampling.temperature, 2.0),
        ("generator.enforce_eager=true", lambda c: c.generator.enforce_eager, True),
        ("run.name=night-1", lambda c: c.run.name, "night-1"),
        ('run.name="night-1"', lambda c: c.run.name, "night-1"),
        ("run.name=none", lambda c: c.run.name, "none"),
        ("learner.betas=[0.8, 0.9]", lambda c: c.learner.betas, (0.8, 0.9)),
        ('data.train=["a", "b"]', lambda c: c.data.train, ["a", "b"]),
        ("redis.url = redis://host:1/0", lambda c: c.redis.url, "redis://host:1/0"),
        ("algorithm.dual_clip=none", lambda c: c.algorithm.dual_clip, None),
        ("algorithm.dual_clip=None", lambda c: c.algorithm.dual_clip, None),
        ("learner.learning_rate=1e-6", lambda c: c.learner.learning_rate, 1e-6),
    ],
)
def test_set_reads_a_value_of_the_keys_type(
    recipe: Path, override: str, read: Any, value: Any
) -> None:
    assert read(load_config(recipe, [override])) == value


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("run.seed=many", "run.seed"),
        ("learner.zero_stage=4", "learner.zero_stage"),
        ("model.dtype=float16", "model.dtype"),
        ("algorithm.group_size=1", "algorithm.group_size"),
        ("run.name=a b", "run.name"),
        ("run.name={x}", "run.name"),
        ("learner.grad_clip=inf", "learner.grad_clip"),
        ("learner.learning_rate=nan", "learner.learning_rate"),
        ("run.batches=none", "run.batches"),
        ("sampling.top_p=0.9", "sampling.top_p"),
        ("data.train=one.jsonl", "data.train"),
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_range_is_refused_by_name(
    recipe: Path, override: str, key: str
) -> None:
    text = refusal(recipe, override)
    assert f"{key}:" in text
    assert "it is " in text


@pytest.mark.parametrize("override", ["learner", "learner.ranks", "ranks=2", "a.b.c=1", "=1"])
def test_an_override_of_another_form_is_refused_with_the_form(recipe: Path, override: str) -> None:
    assert f"--set {override}: write it as section.key=value" in refusal(recipe, override)


def test_an_override_of_what_is_no_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("model = 3\n")
    assert "model is no section" in refusal(path, "model.path=x")


def test_the_last_override_of_a_key_wins_over_the_file_and_earlier_ones(recipe: Path) -> None:
    assert (
        load_config(recipe, ["model.max_length=70", "model.max_length=80"]).model.max_length == 80
    )


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["algorithm.groups_per_batch=6", "algorithm.updates_per_batch=4"],
            ["algorithm.groups_per_batch", "algorithm.updates_per_batch"],
        ),
        (["sampling.max_tokens=64"], ["sampling.max_tokens", "model.max_length"]),
        (["reward.overlong_cache=33"], ["reward.overlong_cache", "sampling.max_tokens"]),
    ],
)
def test_values_that_contradict_are_refused_by_both_names(
    recipe: Path, overrides: list[str], keys: list[str]
) -> None:
    text = refusal(recipe, *overrides)
    assert all(key in text for key in keys)


# --- files --------------------------------------------------------------------------------------


def test_a_missing_recipe_is_named_with_the_place_of_the_shipped_ones(tmp_path: Path) -> None:
    text = refusal(tmp_path / "nothing.toml")
    assert "nothing.toml does not exist" in text
    assert "deploy/recipes/" in text


@pytest.mark.parametrize("content", [b"[model", b"\xff\xfe", b"[a]\n[a]\n"])
def test_a_recipe_that_is_no_toml_is_refused_by_name(recipe: Path, content: bytes) -> None:
    recipe.write_bytes(content)
    assert f"recipe {recipe} cannot be read" in refusal(recipe)


def test_a_directory_as_recipe_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


# --- round trip ---------------------------------------------------------------------------------


def reread(config: Config, path: Path) -> Config:
    path.write_text(dump_toml(config), encoding="utf-8")
    return load_config(path)


def test_what_is_written_out_reads_back_the_same(recipe: Path, tmp_path: Path) -> None:
    config = load_config(recipe, ["run.name=x", "learner.betas=[0.8,0.9]", "eval.samples=1",
                                  "data.heldout=h.jsonl"])  # fmt: skip
    assert reread(config, tmp_path / "out.toml") == config


def test_a_value_left_out_by_none_stays_left_out_in_the_written_file(
    recipe: Path, tmp_path: Path
) -> None:
    config = load_config(recipe, ["algorithm.dual_clip=none"])
    assert reread(config, tmp_path / "out.toml").algorithm.dual_clip is None


@pytest.mark.parametrize("base", [ArithmeticBase(kind="arithmetic"), SmolLM2Base(kind="smollm2")])
def test_the_section_of_a_base_survives_the_round_trip(
    base: ArithmeticBase | SmolLM2Base, tmp_path: Path
) -> None:
    tree = {"base": base.model_dump(), "model": {"path": "{base}"}, "data": {"train": ["{base}/t"]}}
    config = parse_config(tree, "test")
    assert reread(config, tmp_path / "out.toml") == config
    assert fingerprint(base) == fingerprint(type(base)(**base.model_dump()))


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"), min_size=1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=text, train=st.lists(text, max_size=3), seed=st.integers(-(2**60), 2**60),
    rate=st.floats(0, 1e3), dual=st.none() | st.floats(1.01, 1e6), updates=st.sampled_from([1, 2]),
    cache=st.sampled_from([0, 7]),
)  # fmt: skip
def test_any_valid_configuration_survives_the_round_trip(
    tmp_path: Path, path: str, train: list[str], seed: int, rate: float, dual: float | None,
    updates: int, cache: int,
) -> None:  # fmt: skip
    tree = {
        "run": {"seed": seed},
        "model": {"path": path},
        "data": {"train": train},
        "learner": {"learning_rate": rate},
        "algorithm": {"dual_clip": dual, "updates_per_batch": updates},
        "reward": {"overlong_cache": cache},
    }
    config = parse_config(tree, "test")
    assert reread(config, tmp_path / "out.toml") == config


def test_the_shipped_recipes_are_valid() -> None:
    recipes = sorted((Path(__file__).parents[2] / "deploy" / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        json.dumps(load_config(path).model_dump(mode="json"))


def test_derived_figures_follow_from_the_keys(recipe: Path) -> None:
    config = load_config(recipe, ["redis.max_message_mib=0.5"])
    assert config.max_prompt_tokens == 32
    assert config.max_message_bytes == 2**19
    assert config.probe_tolerance == 0.05
    assert load_config(recipe, ["model.dtype=float32"]).probe_tolerance == 1e-3
    assert load_config(recipe, ["publish.probe_tolerance=0.2"]).probe_tolerance == 0.2
