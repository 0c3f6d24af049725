"""What a recipe changes of its model holds in learner, engine and export alike."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_rig import TOLERANCE, VOCABULARY, gap, make_prompt, make_tree, samples_of, write_model
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from common.config import Config, dump_toml, parse_config
from common.errors import ConfigError
from common.stop_tokens import stop_token_ids
from generator.engine import Engine
from learner.export import carry_settings
from learner.runtime import load_model

pytestmark = pytest.mark.slow

POSITIONS, LENGTH = 64, 128
STOPS = [f"t{index}" for index in range(2, 102)]
STOP_IDS = set(range(2, 102))

EXPORT = """
import sys
from pathlib import Path
from common.config import load_config
from learner.engine import TrainEngine

recipe, model, folder = map(Path, sys.argv[1:])
TrainEngine(load_config(recipe), model).export_hf(folder, model)
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model made for sequences half as long as the run's."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": POSITIONS})
    )
    return folder


def configure(model_dir: Path, *, raised: bool) -> Config:
    tree = make_tree(model_dir)
    tree["model"]["max_length"] = LENGTH
    tree["sampling"] = {"max_tokens": 20, "stop_tokens": STOPS}
    if raised:
        tree["model"]["max_positions"] = LENGTH
    return parse_config(tree, "test")


async def test_learner_and_engine_agree_beyond_the_positions_that_the_model_was_made_for(
    model_dir: Path,
) -> None:
    with pytest.raises(ConfigError, match="128"):
        await Engine.start(configure(model_dir, raised=False), model_dir)
    config = configure(model_dir, raised=True)
    model = load_model(config, model_dir, {}).eval()
    assert model.config.max_position_embeddings == LENGTH
    long = np.random.default_rng(3).integers(102, VOCABULARY, LENGTH - 20).astype(np.int32)
    prompt = dataclasses.replace(make_prompt(3, max_tokens=20), token_ids=long)
    engine = await Engine.start(config, model_dir)
    try:
        samples = await samples_of(engine, prompt, 8)
    finally:
        await engine.close()
    assert max(gap(model, prompt, sample) for sample in samples) < TOLERANCE
    ended = [sample for sample in samples if sample.finish_reason == "stop"]
    assert ended, "one token in five ends a response"
    for sample in ended:
        assert STOP_IDS.isdisjoint(sample.token_ids[:-1].tolist())
        assert int(sample.token_ids[-1]) in STOP_IDS | {1}


def test_an_exported_folder_has_the_positions_and_stop_tokens_of_the_run(
    model_dir: Path, tmp_path: Path
) -> None:
    recipe, folder = tmp_path / "recipe.toml", tmp_path / "export"
    recipe.write_text(dump_toml(configure(model_dir, raised=True)))
    # a process of its own: the engine joins a process group that outlives it
    subprocess.run([sys.executable, "-c", EXPORT, recipe, model_dir, folder], check=True)
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == LENGTH
    assert GenerationConfig.from_pretrained(folder).eos_token_id == sorted(STOP_IDS | {1})
    modes = {path.stat().st_mode for path in folder.iterdir()}
    assert modes == {(folder / "config.json").stat().st_mode}, "who serves it may be another user"
    # read back without the recipe, the folder ends responses as the run did
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert set(stop_token_ids(folder, tokenizer)) == STOP_IDS | {1}


def test_an_export_of_a_run_that_changed_nothing_is_left_as_it_is(
    model_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    shutil.copytree(model_dir, folder)
    carry_settings(folder, parse_config(make_tree(model_dir), "test"))
    for path in model_dir.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
