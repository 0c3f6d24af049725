"""A learner that was killed goes on as if it had not been: same batches, same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.audit import audit
from common.batch_files import BatchFiles
from common.config import Config
from common.server import EmbeddedServer
from tests.integration.lives import Life, live, make_recipe, resumed, said, write_base

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BATCHES = 6
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


def exported(config: Config) -> Weights:
    return load_file(config.run_dir / "export" / "model.safetensors")


def batches_of(config: Config) -> list[list[tuple[int, int]]]:
    files = BatchFiles(config.run_dir)
    return [files.groups_of(version) for version in range(1, BATCHES + 1)]


def balanced(config: Config) -> None:
    result = audit(config.run_dir, None)
    assert result.complete and result.balanced, result.as_text()
    assert result.trained == BATCHES * 4 and not result.in_flight


@pytest.fixture(scope="module")
def undisturbed(
    base: Path, tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer
) -> Config:
    """A run of the same recipe whose learner lives once."""
    config = make_recipe(base, tmp_path_factory.mktemp("runs"), "undisturbed", BATCHES)
    live(config, server.url, Life())
    assert resumed(config) == [(None, [])]
    return config


def same_weights(config: Config, other: Config, base: Path, tolerance: float) -> None:
    """The distance of two runs' weights, as a share of the way that they have come."""
    found, wanted = exported(config), exported(other)
    start = load_file(base / "model" / "model.safetensors")
    assert found.keys() == wanted.keys() == start.keys()
    for name, weight in wanted.items():
        moved = (weight - start[name]).norm()
        assert moved > 0, f"{name} was not trained"
        assert (found[name] - weight).norm() / moved <= tolerance, name


def test_a_learner_killed_anywhere_trains_the_same_batches_to_the_same_weights(
    undisturbed: Config, base: Path, tmp_path: Path, server: EmbeddedServer
) -> None:
    config = make_recipe(base, tmp_path, "killed", BATCHES)
    live(
        config, server.url, Life("batch_file_written:2"), Life("batch_trained"),
        Life("checkpoint_half_written"), Life("batch_acknowledged"), Life(),
    )  # fmt: skip
    assert resumed(config) == [(None, []), (None, [1, 2]), (2, [3]), (2, [3, 4]), (4, [5])]
    assert batches_of(config) == batches_of(undisturbed)
    balanced(config)
    same_weights(config, undisturbed, base, 1e-6)


def test_a_disk_that_is_full_at_a_checkpoint_ends_the_learner_with_a_clear_error_and_costs_nothing(
    undisturbed: Config, base: Path, tmp_path: Path, server: EmbeddedServer
) -> None:
    config = make_recipe(base, tmp_path, "full", BATCHES)
    live(config, server.url, Life("batch_trained:3"), Life(largest_file=2**20), Life())
    assert resumed(config) == [(None, []), (2, [3]), (2, [3, 4])]
    message = r"checkpoints/000004\.tmp cannot be written .*older checkpoints are whole"
    assert re.search(message, said(config)), said(config)
    assert "Traceback" not in said(config)
    balanced(config)
    same_weights(config, undisturbed, base, 1e-6)


def test_a_run_goes_on_on_other_numbers_of_ranks_with_the_same_batches_and_weights(
    undisturbed: Config, base: Path, tmp_path: Path, server: EmbeddedServer
) -> None:
    config = make_recipe(base, tmp_path, "ranks", BATCHES, zero_stage=3)
    live(config, server.url, Life("batch_trained:3"), Life("batch_trained:2", ranks=2), Life())
    assert resumed(config) == [(None, []), (2, [3]), (4, [5])]
    assert batches_of(config) == batches_of(undisturbed)
    balanced(config)
    same_weights(config, undisturbed, base, 1e-3)
    left = [path.name for path in (config.run_dir / "checkpoints").iterdir()]
    assert left == ["000006"], "a converted copy was left behind"
