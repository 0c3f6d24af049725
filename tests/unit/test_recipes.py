"""The shipped recipes: each passes its checks anywhere, and presets differ only where they say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from common.checks import CHECKS, dry_run_text, examine, run_checks
from common.cli import main
from common.config import Config, load_config
from common.errors import ConfigError
from common.machine import Machine
from common.memory import GIB
from common.presets import FACTS, compare, comparison_text
from common.startup import URL_VARIABLE, require_model, resolve
from common.subject import Subject

RECIPES = Path(__file__).parents[2] / "deploy" / "recipes"
ALL = sorted(path.stem for path in RECIPES.glob("*.toml"))
PRESETS = ["dapo-paper-32b", "dapo-verl-32b", "dapo-verl-7b-math"]

# What a preset chooses against the source it follows; the comments of the recipe say why.
CHOSEN = {"algorithm.correction", "admission.max_staleness", "verifier.checker"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without models, data and caches, as on a fresh machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(URL_VARIABLE, raising=False)


def read(name: str, *overrides: str) -> Config:
    return resolve(load_config(RECIPES / f"{name}.toml", list(overrides)))


def on(config: Config, *gpus_gib: float) -> dict[str, str]:
    """Lines of a machine that has the model, and GPUs of these sizes."""
    seen = examine(config)
    assert seen.facts is not None
    here = dataclasses.replace(seen.facts, here=True)
    machine = Machine(tuple(int(size * GIB) for size in gpus_gib), 2048 * GIB)
    subject = Subject(config, here, machine)
    names = ("heads", "devices", "learner memory", "generator memory")
    lines, _ = run_checks(subject, {name: CHECKS[name] for name in names})
    return dict(zip(names, lines, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_every_recipe_passes_its_dry_run_on_a_machine_without_its_model(name: str) -> None:
    lines = dry_run_text(read(name)).splitlines()
    assert len(lines) == len(CHECKS)
    assert all(line.startswith(("ok    ", "note  ")) for line in lines)


@pytest.mark.parametrize("name", [*PRESETS, "single-gpu"])
def test_a_recipe_of_a_public_model_says_how_to_get_model_and_data(name: str) -> None:
    text = dry_run_text(read(name))
    assert "`hf download Qwen/" in text
    assert "`dapo data prepare" in text
    assert "not estimated" not in text


def test_a_start_without_the_model_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen2\.5-32B --local-dir models"):
        require_model(read("dapo-paper-32b"))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_differs_from_what_it_follows_only_by_choices_that_are_listed(name: str) -> None:
    differing = {row.key for row in compare(read(name)) if row.differs}
    own = {"generator.tensor_parallel"} if name == "dapo-verl-7b-math" else set()
    assert differing == CHOSEN | own


def test_the_two_32b_presets_differ_where_paper_and_scripts_do() -> None:
    paper = {row.key: row.recipe for row in compare(read("dapo-paper-32b"))}
    verl = {row.key: row for row in compare(read("dapo-verl-32b"))}
    differing = {key for key, row in verl.items() if row.recipe != paper[key]}
    assert differing == {
        "algorithm.dual_clip", "algorithm.loss_aggregation", "learner.warmup_batches"
    }  # fmt: skip
    stated = [f for f in FACTS if f.paper is not None and f.scripts is not None]
    assert differing == {f.key for f in stated if f.paper != f.scripts}


def test_an_override_against_the_source_is_marked_in_the_table() -> None:
    text = comparison_text(read("dapo-verl-32b", "learner.learning_rate=2e-6"))
    head, columns, *rows = text.splitlines()
    assert head.startswith("run.preset = verl-32b: 4 keys (*) differ")
    assert re.split(" {2,}", columns.strip())[1:4] == ["paper 32B", "scripts 32B", "this recipe"]
    marked = [row.split()[1] for row in rows if row.startswith("*")]
    assert set(marked) == CHOSEN | {"learner.learning_rate"}
    (row,) = [row for row in rows if "learning_rate" in row]
    assert row.split()[2:5] == ["1e-06", "1e-06", "2e-06"]


def test_a_value_that_no_source_states_is_shown_and_cannot_differ() -> None:
    rows = {row.key: row for row in compare(read("dapo-paper-32b", "run.batches=3"))}
    assert rows["run.batches"].recipe == 3
    assert not rows["run.batches"].differs
    # the paper is silent on it, so the scripts are followed
    rows = {row.key: row for row in compare(read("dapo-paper-32b", "learner.grad_clip=0.5"))}
    assert rows["learner.grad_clip"].differs


def test_the_7b_script_is_compared_with_its_own_values() -> None:
    rows = {row.key: row for row in compare(read("dapo-verl-7b-math"))}
    assert rows["sampling.max_tokens"].scripts == 8192
    assert rows["model.max_positions"].scripts == rows["model.max_positions"].recipe == 32768
    assert rows["learner.weight_decay"].scripts == 0.1


def test_a_recipe_without_a_preset_is_compared_with_nothing() -> None:
    assert comparison_text(read("single-gpu")) == ""


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_of_a_preset_has_a_comment(name: str) -> None:
    lines = (RECIPES / f"{name}.toml").read_text().splitlines()
    bare = [line for line in lines if re.match(r"\w+ = ", line) and "#" not in line]
    assert [line.partition(" ")[0] for line in bare] == ["name", "preset"]


def test_without_the_raised_positions_the_7b_model_is_too_short(tmp_path: Path) -> None:
    recipe = (RECIPES / "dapo-verl-7b-math.toml").read_text()
    path = tmp_path / "short.toml"
    path.write_text(re.sub(r"(?m)^max_positions.*\n", "", recipe))
    _, faults = run_checks(examine(load_config(path)), {"context": CHECKS["context"]})
    (fault,) = faults
    assert "max_position_embeddings = 4096" in fault
    assert "model.max_positions = 10240" in fault


def test_the_presets_fit_the_nodes_that_they_are_written_for() -> None:
    for name in PRESETS:
        lines = on(read(name, "redis.url=redis://far/0"), *[80] * 8)
        assert lines["learner memory"].startswith("ok")
        assert not lines["generator memory"].startswith("FAULT")
        assert lines["devices"].startswith("ok")


def test_one_gpu_of_24_gb_has_room_for_the_small_recipe_and_not_for_less() -> None:
    assert all(line.startswith("ok") for line in on(read("single-gpu"), 24).values())
    assert on(read("single-gpu"), 12)["learner memory"].startswith("FAULT")


def test_a_dry_run_prints_configuration_comparison_and_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(RECIPES / "dapo-paper-32b.toml")
    monkeypatch.setattr("sys.argv", ["dapo", "run", recipe, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    places = [printed.index(part) for part in ("[run]", "run.preset = paper-32b", "ok    context")]
    assert places == sorted(places)
