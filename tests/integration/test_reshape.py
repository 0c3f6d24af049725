"""A checkpoint of one rank resumes on two, and back: same optimizer state, same next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from learner.reshape import discard, for_ranks
from tests.integration.plain_learner import make_model
from tests.integration.reshape_ranks import CASES, WORLDS, spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OTHER = {1: 2, 2: 1}
NAMES = [f"zero{stage}-{dtype}" for stage, dtype in CASES]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshape")
    make_model(folder / "tied", tied=True)
    return folder


@pytest.fixture(scope="module")
def before(home: Path) -> dict[int, Any]:
    """By number of ranks: the state when it was saved, and the weights one batch later."""
    return {world: spawn(world, home) for world in WORLDS}


@pytest.fixture(scope="module")
def after(home: Path, before: dict[int, Any]) -> dict[int, Any]:
    """The same, out of the checkpoint of the other number of ranks."""
    return {world: spawn(world, home, OTHER[world]) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{OTHER[world]}to{world}")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_optimizer_state_is_the_one_that_was_saved_to_the_bit(
    before: dict[int, Any], after: dict[int, Any], world: int, case: Any
) -> None:
    wanted, found = before[OTHER[world]][case]["state"], after[world][case]["state"]
    assert after[world][case]["converted"] and not after[world][case]["left"]
    assert after[world][case]["steps"] == 2
    assert found.keys() == wanted.keys()
    for name, tensors in wanted.items():
        for key, tensor in tensors.items():
            assert torch.equal(found[name][key], tensor), f"{key} of {name}"
            assert tensor.abs().sum() > 0, f"{key} of {name} says nothing"


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{OTHER[world]}to{world}")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_next_step_leads_to_the_weights_of_an_uninterrupted_run(
    before: dict[int, Any], after: dict[int, Any], world: int, case: Any
) -> None:
    """Uninterrupted on the ranks that saved: so the sums of gradients differ in their rounding."""
    wanted, found = before[OTHER[world]][case], after[world][case]["weights"]
    start = {name: tensors["weight"] for name, tensors in wanted["state"].items()}
    moved = flat(wanted["weights"]) - flat(start)
    off = flat(found) - flat(wanted["weights"])
    tolerance = 1e-3 if case[1] == "float32" else 0.2
    assert off.norm() / moved.norm() < tolerance


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten().float() for tensor in weights.values()])


def write_facts(folder: Path, ranks: int) -> Path:
    (folder / "state").mkdir(parents=True)
    (folder / "learner.json").write_text(json.dumps({"learner.ranks": ranks}))
    return folder


def test_a_checkpoint_of_as_many_ranks_is_loaded_as_it_is_and_stays(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "000002", ranks=2)
    assert for_ranks(folder, 2) == folder
    discard(folder)
    assert folder.exists() and list(tmp_path.iterdir()) == [folder]


def test_a_checkpoint_that_cannot_be_converted_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = write_facts(tmp_path / "000002", ranks=3)
    with pytest.raises(CheckpointError, match=r"of 3 ranks and could not .* learner\.ranks = 3"):
        for_ranks(folder, 1)
    assert list(tmp_path.iterdir()) == [folder]
    (folder / "learner.json").unlink()
    with pytest.raises(CheckpointError, match="no learner state"):
        for_ranks(folder, 1)
