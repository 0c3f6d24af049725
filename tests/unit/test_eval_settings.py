"""What `dapo eval` evaluates and with which settings, from a command line and what it points to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common.config import Config
from common.errors import CheckpointError, ConfigError
from common.eval_run import progress_text
from common.eval_settings import Weights, Wish, find_weights, settings
from common.messages import Version
from learner.checkpoint import Checkpoints

RECIPE = """
[run]
seed = 5
[base]
kind = "arithmetic"
[model]
path = "{base}/model"
dtype = "float32"
max_length = 128
[data]
train = ["{base}/train.jsonl"]
template = "chat"
[sampling]
max_tokens = 80
[algorithm]
updates_per_batch = 4
groups_per_batch = 8
[reward]
overlong_cache = 24
[eval]
every = 5
samples = 8
top_p = 0.7
[redis]
url = "redis://somewhere:6379"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "made" / "model"
    folder.mkdir(parents=True)
    facts = {"max_position_embeddings": 512, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def data(tmp_path: Path) -> list[Path]:
    return [tmp_path / "aime24.jsonl", tmp_path / "amc23.jsonl"]


def resolved(wish: Wish, model: Path) -> Config:
    return settings(wish, find_weights(model), model, model.parent.parent / "out")


# --- settings -----------------------------------------------------------------------------------


def test_what_is_not_said_comes_from_the_recipe(
    model: Path, recipe: Path, data: list[Path]
) -> None:
    config = resolved(Wish(data, recipe=recipe), model)
    assert (config.eval.samples, config.eval.top_p, config.eval.temperature) == (8, 0.7, 1.0)
    assert (config.sampling.max_tokens, config.model.max_length) == (80, 128)
    assert (config.data.template, config.run.seed) == ("chat", 5)
    assert config.model.path == str(model)
    assert config.data.heldout == [str(path) for path in data]
    assert config.run_dir == model.parent.parent / "out"


def test_the_sections_of_training_and_the_server_of_the_recipe_have_no_say(
    model: Path, recipe: Path, data: list[Path]
) -> None:
    config = resolved(Wish(data, recipe=recipe, max_tokens=16), model)
    assert config.reward.overlong_cache == 0  # 24 would not fit into 16 tokens
    assert config.algorithm.updates_per_batch == 1
    assert config.redis.url is None and config.base is None


def test_the_command_line_goes_before_the_recipe(
    model: Path, recipe: Path, data: list[Path]
) -> None:
    wish = Wish(
        data, k=32, recipe=recipe, sets=["generator.threads=2"], temperature=0.5, top_p=1.0,
        max_tokens=20, problems=7, template="raw", generators=3, seed=0,
    )  # fmt: skip
    config = resolved(wish, model)
    chosen = config.eval
    assert (chosen.samples, chosen.temperature, chosen.top_p, chosen.problems) == (32, 0.5, 1.0, 7)
    assert (config.sampling.max_tokens, config.data.template, config.run.seed) == (20, "raw", 0)
    assert (config.generator.count, config.generator.threads) == (3, 2)
    assert config.algorithm.group_size == 32


def test_all_problems_are_used_unless_a_number_is_said(
    model: Path, recipe: Path, data: list[Path]
) -> None:
    recipe.write_text(RECIPE.replace("samples = 8", "samples = 8\nproblems = 3"))
    assert resolved(Wish(data, recipe=recipe), model).eval.problems is None


@pytest.mark.parametrize(
    ("max_tokens", "sets", "length"),
    [
        (100, [], 148),  # 48 tokens of prompt, as in the recipe
        (60, [], 128),
        (500, [], 512),  # the model has no more
        (100, ["model.max_length=256"], 256),
        (500, ["model.max_positions=1024"], 548),
    ],
)
def test_a_longer_response_leaves_the_same_room_for_a_prompt(
    model: Path, recipe: Path, data: list[Path], max_tokens: int, sets: list[str], length: int
) -> None:
    wish = Wish(data, recipe=recipe, sets=sets, max_tokens=max_tokens)
    assert resolved(wish, model).model.max_length == length


def test_without_a_recipe_the_model_says_how_long_and_how_exact(
    model: Path, data: list[Path]
) -> None:
    config = resolved(Wish(data), model)
    assert (config.sampling.max_tokens, config.model.max_length) == (256, 512)
    assert (config.model.dtype, config.data.template) == ("float32", "raw")
    facts = {"max_position_embeddings": 131072, "torch_dtype": "float16"}
    (model / "config.json").write_text(json.dumps(facts))
    (model / "chat_template.jinja").touch()
    config = resolved(Wish(data, max_tokens=2000), model)
    assert (config.sampling.max_tokens, config.model.max_length) == (2000, 6096)
    assert (config.model.dtype, config.data.template) == ("bfloat16", "dapo")


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["learner.zero_stage=3"], "learner.zero_stage=3 has no effect on an evaluation"),
        (["data.train=x"], "data.train=x has no effect"),
        (["generator.thread=3"], "did you mean generator.threads"),
        (["eval.samples=none"], "eval.samples"),
    ],
)
def test_a_key_without_effect_or_meaning_is_refused(
    model: Path, data: list[Path], sets: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        resolved(Wish(data, sets=sets), model)


# --- weights ------------------------------------------------------------------------------------


def a_run(folder: Path, *checkpoints: int) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.toml").write_text(RECIPE)
    made = Checkpoints(folder, keep_last=9)
    for version in checkpoints:
        made.begin(version)
        made.commit(version, {})
    return folder


def export_of(run: Path, older_by: float) -> Path:
    """An export that is older than everything else in the run by some seconds."""
    folder = run / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.touch()
    os.utime(weights, (0, weights.stat().st_mtime - older_by))
    return folder


def test_of_a_run_it_is_the_export_under_the_version_of_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "mine", 10, 20)
    folder = export_of(run, older_by=-5)
    recipe = run / "config.toml"
    assert find_weights(run) == Weights("mine", folder, Version(0, 20), recipe)


def test_of_a_run_that_went_on_after_its_export_it_is_the_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", 10, 20)
    export_of(run, older_by=60)
    found = find_weights(run)
    assert (found.folder, found.version) == (None, Version(0, 20))


def test_an_export_named_itself_takes_the_settings_of_its_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "mine", 10)
    folder = export_of(run, older_by=0)
    found = find_weights(folder)
    assert (found.folder, found.recipe) == (folder, run / "config.toml")


def test_what_is_neither_a_model_nor_a_run_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a Hugging Face folder .*config\.json"):
        find_weights(tmp_path)
    with pytest.raises(CheckpointError, match="no export and no valid checkpoint"):
        find_weights(a_run(tmp_path / "empty"))


# --- progress -----------------------------------------------------------------------------------


def test_the_progress_says_what_is_waited_for_and_then_how_far_it_is() -> None:
    assert progress_text({"error": "no answer"}) == "reading the problems"
    examiner = {"role": "examiner", "problems": 9, "done": 0, "samples": 0, "generators": 0}
    status = {"reports": {"examiner": examiner}, "members": {}}
    assert progress_text(status) == "9 problems; waiting for an engine"
    generator = {"role": "generator", "tokens_per_second": 12.4}
    status = {
        "reports": {"examiner": examiner | {"done": 2, "samples": 8, "generators": 1},
                    "g.1": generator, "dead": generator},
        "members": {"g.1": {}, "examiner": {}},
    }  # fmt: skip
    assert progress_text(status) == "2 of 9 problems, 8 samples, 12 tokens/s by 1 generator"
    status["reports"]["examiner"] = examiner | {"done": 9, "samples": 36, "generators": 1}
    assert progress_text(status) == "9 of 9 problems, 36 samples"
