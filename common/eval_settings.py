"""What `dapo eval` evaluates, and with which configuration.

What is not said on the command line comes from the recipe's sections `KEPT`; without a recipe from
the run that the weights are of, else from the model's own files. The sections of training have no
say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config import Config, parse_config, read_tree
from common.errors import CheckpointError, ConfigError
from common.messages import Version
from common.sections import EvalSection, ModelSection, SamplingSection

Tree = dict[str, Any]
KEPT = ("model", "sampling", "eval", "generator", "verifier", "admission")
PROMPT_ROOM = 4096
"""Tokens for a prompt where no recipe says how long a context is wanted."""


@dataclass(frozen=True)
class Weights:
    """Weights to evaluate: those of a folder, or of a run whose newest checkpoint is no folder yet.

    `recipe` has the settings of the run that they are of, where there is one.
    """

    name: str
    folder: Path | None
    version: Version
    recipe: Path | None


@dataclass(frozen=True)
class Wish:
    """What the command line says; None leaves it to the recipe."""

    data: list[Path]
    k: int | None = None
    recipe: Path | None = None
    sets: list[str] = field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    problems: int | None = None
    template: str | None = None
    generators: int | None = None
    seed: int | None = None


def find_weights(model: Path) -> Weights:
    """The weights that MODEL names: a Hugging Face folder, or a run directory.

    Of a run, its export if no checkpoint is newer, else its newest valid checkpoint.

    Raises:
        ConfigError: it is neither.
        CheckpointError: the run has neither an export nor a valid checkpoint.
    """
    path = model.resolve()
    if (path / "config.toml").exists():
        return _weights_of_run(path)
    if not (path / "config.json").exists():
        raise ConfigError(
            f"{model} is neither a Hugging Face folder (it has no config.json) nor a run directory "
            "(no config.toml); see the folders in runs/ and cache/"
        )
    recipe = path.parent / "config.toml"  # an export lies in the directory of its run
    name = f"{path.parent.name}-{path.name}"
    return Weights(name, model, Version(0, 0), recipe if recipe.exists() else None)


def _weights_of_run(run_dir: Path) -> Weights:
    from learner.checkpoint import MANIFEST, Checkpoints

    checkpoints = Checkpoints(run_dir, keep_last=1)
    newest = checkpoints.newest_valid()
    export, recipe = run_dir / "export", run_dir / "config.toml"
    exported = max((path.stat().st_mtime for path in export.glob("*.safetensors")), default=0.0)
    if newest is None:
        if not exported:
            raise CheckpointError(
                f"{run_dir} has no export and no valid checkpoint yet; checkpoint.every sets when"
            )
        return Weights(run_dir.name, export, Version(0, 0), recipe)
    # a run exports after its last checkpoint; it may have gone on since
    saved = (checkpoints.path(newest) / MANIFEST).stat().st_mtime
    folder = export if exported >= saved else None
    return Weights(run_dir.name, folder, Version(0, newest), recipe)


def settings(wish: Wish, weights: Weights, folder: Path, out: Path) -> Config:
    """The configuration of an evaluation of the weights in `folder`; `out` is its run directory.

    Raises:
        ConfigError: a key is unknown, out of range or without effect.
    """
    _require_effect(wish.sets)
    recipe = wish.recipe or weights.recipe
    tree = read_tree(recipe, wish.sets)
    kept = {name: _section(tree, name) for name in KEPT}
    kept["eval"].pop("every", None)
    kept["eval"] |= _said(samples=wish.k, temperature=wish.temperature, top_p=wish.top_p)
    kept["eval"]["problems"] = "none" if wish.problems is None else wish.problems
    kept["generator"] |= _said(count=wish.generators)
    kept["model"]["path"] = str(folder)
    facts = json.loads((folder / "config.json").read_text())
    if recipe is None:
        _take_from_model(kept, facts, wish.max_tokens)
    else:
        _lengthen(kept, facts, wish)
    files, run = [str(path) for path in wish.data], _section(tree, "run")
    template = wish.template or _section(tree, "data").get("template") or _template(folder)
    kept["data"] = {"train": files, "heldout": files, "template": template}
    seed = wish.seed if wish.seed is not None else run.get("seed", 0)
    kept["run"] = {"name": out.name, "dir": str(out.parent), "seed": seed}
    # by the group size a generator counts the groups for which it has room
    samples = kept["eval"].get("samples", EvalSection.model_fields["samples"].default)
    kept["algorithm"] = {"group_size": max(2, samples) if isinstance(samples, int) else 2}
    return parse_config(kept, str(recipe or "evaluation"))


def _require_effect(sets: list[str]) -> None:
    for item in sets:
        if item.partition(".")[0].strip() not in KEPT:
            raise ConfigError(
                f"--set {item} has no effect on an evaluation; it has use for [{'], ['.join(KEPT)}]"
            )


def _section(tree: Tree, name: str) -> Tree:
    section = tree.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name} is no section; write it as [{name}]")
    return dict(section)


def _said(**values: Any) -> Tree:
    return {key: value for key, value in values.items() if value is not None}


def _take_from_model(kept: dict[str, Tree], facts: Tree, max_tokens: int | None) -> None:
    """Lengths and arithmetic that the model was made for; half its context is for the response."""
    longest = int(facts.get("max_position_embeddings") or 2**31)
    default = SamplingSection.model_fields["max_tokens"].default
    kept["sampling"] |= _said(max_tokens=max_tokens)
    cap = kept["sampling"].setdefault("max_tokens", min(default, longest // 2))
    if isinstance(cap, int):
        kept["model"].setdefault("max_length", min(longest, cap + PROMPT_ROOM))
    dtype = facts.get("dtype") or facts.get("torch_dtype")
    kept["model"].setdefault("dtype", "float32" if dtype == "float32" else "bfloat16")


def _lengthen(kept: dict[str, Tree], facts: Tree, wish: Wish) -> None:
    """A longer response than the recipe's leaves the same room for a prompt."""
    if wish.max_tokens is None:
        return
    model, sampling = kept["model"], kept["sampling"]
    before = sampling.get("max_tokens", SamplingSection.model_fields["max_tokens"].default)
    sampling["max_tokens"] = wish.max_tokens
    if any(item.partition("=")[0].strip() == "model.max_length" for item in wish.sets):
        return
    length = model.get("max_length", ModelSection.model_fields["max_length"].default)
    longest = model.get("max_positions") or facts.get("max_position_embeddings") or 2**31
    if all(isinstance(value, int) for value in (before, length, longest)):
        more = max(0, wish.max_tokens - before)
        model["max_length"] = max(length, min(length + more, longest))


def _template(folder: Path) -> str:
    """The paper's instruction where the tokenizer has a chat template, else the bare text."""
    path = folder / "tokenizer_config.json"
    inside = path.exists() and "chat_template" in json.loads(path.read_text())
    return "dapo" if inside or (folder / "chat_template.jinja").exists() else "raw"
