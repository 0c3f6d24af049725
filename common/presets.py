"""Published DAPO runs, key by key, and where a recipe that follows one of them differs.

The paper is arXiv 2503.14476. The scripts are those of its authors for verl, `recipe/dapo` in the
repository volcengine/verl: run_dapo_qwen2.5_32b.sh and test_dapo_7b_math.sh. The paper describes
the 32B run alone; where it gives no value, a recipe that follows it takes the one of the scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.config import Config

Value = bool | int | float | str

_PAPER = "paper-32b"
_SCRIPTS_7B = "verl-7b-math"


@dataclass(frozen=True)
class Fact:
    """What the sources say of one key of the configuration; None where one of them is silent."""

    key: str
    paper: Value | None
    scripts: Value | None
    source: str
    scripts_7b: Value | None = None
    """Where the 7B script has another value than the 32B one."""


FACTS = (
    Fact("run.batches", None, None, "trainer.total_training_steps", scripts_7b=200),
    Fact("model.max_length", None, 2048 + 20480, "max_prompt_length + max_response_length",
         scripts_7b=2048 + 8192),
    Fact("model.max_positions", None, "none", "override_config.max_position_embeddings",
         scripts_7b=32768),
    Fact("sampling.max_tokens", 20480, 20480, "§4.1; max_response_length", scripts_7b=8192),
    Fact("sampling.temperature", None, 1.0, "rollout.temperature"),
    Fact("algorithm.group_size", 16, 16, "§4.1; rollout.n"),
    Fact("algorithm.groups_per_batch", 512, 512, "§4.1; data.train_batch_size"),
    Fact("algorithm.updates_per_batch", 16, 16, "§4.1; 512 / ppo_mini_batch_size = 32"),
    Fact("algorithm.dynamic_sampling", True, True, "eq. 11; filter_groups.enable",
         scripts_7b=False),
    Fact("algorithm.overlong_filter", None, False, "README of the recipe"),
    Fact("algorithm.clip_low", 0.2, 0.2, "§4.1; clip_ratio_low"),
    Fact("algorithm.clip_high", 0.28, 0.28, "§4.1; clip_ratio_high"),
    Fact("algorithm.dual_clip", "none", 10.0, "eq. 8; clip_ratio_c"),
    Fact("algorithm.loss_aggregation", "group", "token", "eq. 8; loss_agg_mode"),
    Fact("algorithm.advantage_normalization", "std", "std", "eq. 9; adv_estimator=grpo"),
    Fact("algorithm.advantage_ddof", None, 1, "torch.std in verl's GRPO advantage"),
    Fact("algorithm.advantage_epsilon", None, 1e-6, "epsilon in verl's GRPO advantage"),
    Fact("algorithm.ratio", "decoupled", "decoupled", "algorithm 1; old_log_probs of the batch"),
    Fact("algorithm.correction", "none", "none", "neither has tokens of older policies"),
    Fact("algorithm.kl_coefficient", 0.0, 0.0, "§2.3; use_kl_loss=False"),
    Fact("algorithm.entropy_coefficient", None, 0.0, "entropy_coeff"),
    Fact("reward.correct", 1.0, 1.0, "eq. 7; dapo reward manager"),
    Fact("reward.wrong", -1.0, -1.0, "eq. 7; dapo reward manager"),
    Fact("reward.overlong_cache", 4096, 4096, "§4.1; overlong_buffer.len"),
    Fact("reward.overlong_factor", 1.0, 1.0, "eq. 13; overlong_buffer.penalty_factor"),
    Fact("admission.max_staleness", 0, 0, "both alternate generation and training"),
    Fact("learner.learning_rate", 1e-6, 1e-6, "§4.1; optim.lr"),
    Fact("learner.schedule", "constant", "constant", "§4.1; verl's default"),
    Fact("learner.warmup_batches", 20, 10, "§4.1; optim.lr_warmup_steps"),
    Fact("learner.weight_decay", None, 0.1, "optim.weight_decay"),
    Fact("learner.grad_clip", None, 1.0, "actor.grad_clip"),
    Fact("generator.tensor_parallel", None, 4, "tensor_model_parallel_size"),
    Fact("verifier.checker", None, "math_dapo_compat", "reward_manager=dapo"),
    Fact("eval.every", None, 5, "trainer.test_freq", scripts_7b=10),
    Fact("eval.samples", 32, 32, "§4.1; the test file has each problem 32 times"),
    Fact("eval.temperature", 1.0, 1.0, "§4.1; val_kwargs.temperature"),
    Fact("eval.top_p", 0.7, 0.7, "§4.1; val_kwargs.top_p"),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A key with the value of each source and of the recipe; `differs` from what it follows."""

    key: str
    paper: Value | None
    scripts: Value | None
    recipe: Value
    source: str
    differs: bool


def compare(config: Config) -> list[Row]:
    """Every fact beside the value of a recipe that sets `run.preset`; empty for one that does not.

    A value that the followed source does not state cannot differ from it.
    """
    preset, rows = config.run.preset, []
    for fact in FACTS if preset else ():
        scripts = fact.scripts
        if preset == _SCRIPTS_7B and fact.scripts_7b is not None:
            scripts = fact.scripts_7b
        followed = scripts
        if preset == _PAPER and fact.paper is not None:
            followed = fact.paper
        here = _value(config, fact.key)
        differs = followed is not None and followed != here
        rows.append(Row(fact.key, fact.paper, scripts, here, fact.source, differs))
    return rows


def comparison_text(config: Config) -> str:
    """The comparison as a table, `*` before each key that differs; empty without a preset."""
    rows = compare(config)
    if not rows:
        return ""
    scripts = "scripts 7B" if config.run.preset == _SCRIPTS_7B else "scripts 32B"
    cells = [(" ", "key", "paper 32B", scripts, "this recipe", "source: paper; scripts")]
    cells += [
        ("*" if row.differs else " ", row.key)
        + (_text(row.paper), _text(row.scripts), _text(row.recipe), row.source)
        for row in rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(5)]
    lines = ["  ".join(map(str.ljust, row, [*widths, 0])).rstrip() for row in cells]
    count = sum(row.differs for row in rows)
    head = f"run.preset = {config.run.preset}: {count} keys (*) differ from what it follows"
    return "\n".join([head, *lines])


def _value(config: Config, key: str) -> Value:
    section, _, name = key.partition(".")
    value: Any = getattr(getattr(config, section), name)
    return "none" if value is None else value


def _text(value: Value | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
