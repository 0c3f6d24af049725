"""The learner on 1, 2 and 3 ranks, ZeRO 1 to 3, against plain torch in one process.

One spawn per number of ranks trains everything and returns what it measured; each test then
proves one sentence about it.

Runs of three steps prove that training is right. Everything that the loss can be is then measured
by one engine at learning rate 0, whose settings are changed from batch to batch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.buckets import plan_buckets
from tests.integration.learner_ranks import spawn
from tests.integration.plain_learner import (
    CASES,
    OBJECTIVES,
    PAIR,
    SOME,
    SPLITS,
    STAGES,
    UPDATES,
    WORLDS,
    Weights,
    make_groups,
    make_model,
    plain_logprobs,
    plain_objective,
    reference,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("learner")
    make_model(directory / "tied", tied=True)
    make_model(directory / "untied", tied=False)
    return directory


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    steps = {kind: reference(home / kind, kind) for kind in UPDATES}
    return steps | {name: plain_objective(home, one) for name, one in OBJECTIVES.items()}


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world}ranks")
def results(request: pytest.FixtureRequest, home: Path) -> dict[Any, Any]:
    return spawn(request.param, home)


@pytest.fixture(scope="module")
def pair(home: Path) -> dict[Any, Any]:
    return spawn(PAIR, home)


def distance(found: Weights, wanted: Weights, scale: Weights | None = None) -> float:
    """Largest ‖found − wanted‖ / ‖scale‖ over the tensors; the scale is `wanted` itself."""
    assert list(found) == list(wanted)
    return max(
        float((found[name] - wanted[name]).norm() / (scale or wanted)[name].norm())
        for name in wanted
    )


def flat(weights: Weights) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in weights.values()])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_equal_plain_torch_for_every_split(
    case: Any, results: dict[Any, Any], expected: dict[str, Any]
) -> None:
    """Losses, norms and gradients to 1e-5, weights to 1e-6, each tensor's movement to 1e-3.

    The movement is looser because Adam divides by the gradient's size: an element whose gradient
    is near zero moves by the sign of its rounding error. Biases start at zero, so all of their
    weight is movement.
    """
    found, wanted = results[case], expected[case[0]]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    for mine, plain in zip(found["gradients"], wanted["gradients"], strict=True):
        assert distance(mine, plain) < 1e-5
    weights, initial = wanted["weights"], found["initial"]
    difference = flat(found["weights"]) - flat(weights)
    assert difference.norm() / flat(weights).norm() < 1e-6
    moved = {name: weights[name] - initial[name] for name in initial}
    assert distance(found["weights"], weights, moved) < 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_buckets_hold_the_checkpoint_and_tied_weights_once(
    case: Any, results: dict[Any, Any], home: Path
) -> None:
    stored = load_file(home / case[0] / "model.safetensors")
    initial = results[case]["initial"]
    assert sorted(initial) == sorted(stored)
    assert all(torch.equal(initial[name], stored[name]) for name in stored)
    assert ("lm_head.weight" in initial) == (case[0] == "untied")
    manifest = results[case]["manifest"]
    assert manifest == [(name, tuple(tensor.shape)) for name, tensor in initial.items()]
    sizes = [4 * math.prod(shape) for _, shape in manifest]
    assert sum(plan_buckets(sizes, 10_000), []) == list(range(len(manifest)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_those_of_unpadded_sequences(
    case: Any, results: dict[Any, Any], home: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / case[0])
    items = [item for group in make_groups(home / case[0], 0) for item in group]
    with torch.no_grad():
        for item, score in zip(items, results[case]["scores"], strict=True):
            plain = plain_logprobs(model, item).numpy()
            np.testing.assert_allclose(score, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_equals_plain_torch_for_every_split(
    name: str, stage: int, results: dict[Any, Any], expected: dict[str, Any]
) -> None:
    wanted = expected[name]
    for layout, budget in SPLITS[name]:
        found = results["objectives", stage][name, layout, budget]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        for mine, plain in zip(found["gradients"], wanted["gradients"], strict=True):
            assert distance(mine, plain) < 1e-5, (layout, budget)


def test_objectives_differ_from_each_other(expected: dict[str, Any]) -> None:
    losses = {name: expected[name]["loss"][0] for name in OBJECTIVES}
    assert len({round(loss, 5) for loss in losses.values()}) == len(losses), losses


def assert_same_figures(mine: dict[str, Any], other: dict[str, Any]) -> None:
    assert mine["gap_by_age"] == pytest.approx(other["gap_by_age"], rel=1e-5, abs=1e-6)
    scalars = {key: value for key, value in other.items() if key != "gap_by_age"}
    same = {key: mine[key] for key in scalars}
    assert same == pytest.approx(scalars, rel=2e-5, abs=1e-6)


def test_metrics_are_the_same_for_every_split(results: dict[Any, Any]) -> None:
    plain = results["tied", 1]["metrics"]
    assert [figures["tokens_trained"] > 50 for figures in plain] == [True] * 3
    assert set(plain[1]["gap_by_age"]) == {0, 1}
    assert all(figures["tokens_nonfinite"] >= 5 for figures in plain)
    for stage in STAGES[1:]:
        for mine, other in zip(results["tied", stage]["metrics"], plain, strict=True):
            assert_same_figures(mine, other)
    for name in OBJECTIVES:
        first = results["objectives", 1][name, "padded", SOME]["figures"]
        for stage in STAGES:
            for layout, budget in SPLITS[name]:
                found = results["objectives", stage][name, layout, budget]["figures"]
                assert_same_figures(found, first)


def test_metrics_say_what_each_objective_did(results: dict[Any, Any]) -> None:
    figures = {
        name: results["objectives", 1][name, "padded", SOME]["figures"] for name in OBJECTIVES
    }
    assert figures["token"]["responses_trained"] == 10  # of 12, a group is masked
    assert figures["mask"]["responses_trained"] == 12
    dropped = {name: row["importance_dropped"] for name, row in figures.items()}
    assert dropped["mask"] == figures["mask"]["importance_outside"] > 0.1
    assert dropped["sequence mask"] > 0 and dropped["decoupled and masked"] > 0.1
    assert dropped["token"] == dropped["direct, three updates"] == 0
    assert figures["kl and entropy"]["kl_reference"] > 0.1
    assert "kl_reference" not in figures["token"]
    # The steps of one batch move the policy away from the version that sampled.
    direct, decoupled = figures["direct, three updates"], figures["decoupled and masked"]
    assert direct["tokens_trained"] == decoupled["tokens_trained"]
    assert 0 < direct["gap_tokens"] < decoupled["gap_tokens"]


def test_the_reference_is_the_policy_that_the_run_started_from(results: dict[Any, Any]) -> None:
    for stage in STAGES:
        (figures,) = results["untied", stage]["metrics"]
        assert 0 < figures["kl_reference"] < 0.1  # of three updates, the first of which has none


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    stage: int, pair: dict[Any, Any]
) -> None:
    found = pair["resume", stage]
    for name, weight in found["uninterrupted"].items():
        assert torch.equal(found["resumed"][name], weight), name
    assert found["steps"] == 1
    assert found["random"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_loads_in_transformers_with_the_same_weights(
    stage: int, pair: dict[Any, Any]
) -> None:
    found = pair["resume", stage]
    assert all(torch.equal(found["exported"][name], w) for name, w in found["resumed"].items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_other_ranks_is_refused_with_the_remedy(
    stage: int, pair: dict[Any, Any]
) -> None:
    assert "set learner.ranks = " in pair["resume", stage]["refused"]


@pytest.mark.parametrize("stage", STAGES)
def test_learning_rate_zero_leaves_the_weights_bit_identical(
    stage: int, results: dict[Any, Any]
) -> None:
    assert results["objectives", stage]["still"]


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_not_finite_changes_no_weight_and_is_not_published(
    stage: int, pair: dict[Any, Any]
) -> None:
    found = pair["poison", stage]
    norm, loss, weight = found["messages"]
    assert "batch 5, mini-batch 1" in norm and "gradient norm" in norm
    assert "batch 5, mini-batch 1" in loss and "the loss is" in loss
    assert found["poisoned"] in weight
    assert found["unchanged"] and found["buckets_before_error"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_gives_the_same_scores_in_every_zero_stage_and_nearly_the_loss_of_fp32(
    stage: int, pair: dict[Any, Any], expected: dict[str, Any]
) -> None:
    found = pair["bf16", stage]
    np.testing.assert_array_equal(found["scores"], pair["bf16", 1]["scores"])
    assert found["loss"] == pytest.approx(expected["tied"]["loss"][0], rel=0.05)
    assert found["grad_norm"] == pytest.approx(expected["tied"]["grad_norm"][0], rel=0.05)


@pytest.mark.parametrize("stage", STAGES)
def test_gradient_checkpointing_changes_memory_and_not_the_step(
    stage: int, pair: dict[Any, Any], expected: dict[str, Any]
) -> None:
    found = pair["checkpointing", stage]
    assert found["loss"] == pytest.approx(expected["tied"]["loss"][0], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["tied"]["grad_norm"][0], rel=1e-5)
