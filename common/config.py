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
from typing import Any

from pydantic import Field, ValidationError, model_validator

from common.address import holds_password
from common.algorithm import AlgorithmSection
from common.errors import ConfigError
from common.order import shares
from common.sections import (
    AdmissionSection,
    ArithmeticBase,
    CheckpointSection,
    DataSection,
    EvalSection,
    GeneratorSection,
    LearnerSection,
    MetricsSection,
    ModelSection,
    PublishSection,
    RedisSection,
    RewardSection,
    RolloutsSection,
    RunSection,
    SamplingSection,
    Section,
    SmolLM2Base,
    VerifierSection,
)


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
    rollouts: RolloutsSection = RolloutsSection()
    metrics: MetricsSection = MetricsSection()

    @model_validator(mode="after")
    def check_effects(self) -> Config:
        """Refuse keys that have no effect in the chosen mode, and values that contradict."""
        self.algorithm.require_consistent()
        _require_lengths(self)
        _require_schedule(self)
        _require_weights(self.data)
        _require_no_secret(self.redis)
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
    def loss_constant(self) -> float:
        """Denominator per response of the aggregation `constant`."""
        return self.algorithm.loss_constant or float(self.sampling.max_tokens)

    @property
    def probe_tolerance(self) -> float:
        default = 1e-3 if self.model.dtype == "float32" else 0.05
        return self.publish.probe_tolerance or default


def _require_lengths(config: Config) -> None:
    sampling = config.sampling
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
    if config.generator.engine == "simulated" and config.publish.backend == "nccl":
        raise ValueError(
            "publish.backend = nccl needs a GPU at both ends, and generator.engine = simulated "
            "has none; set auto or gloo"
        )
    if isinstance(config.base, ArithmeticBase) and config.base.terms_min > config.base.terms_max:
        raise ValueError("base.terms_min is above base.terms_max; swap them")


def _require_schedule(config: Config) -> None:
    learner, batches = config.learner, config.run.batches
    if learner.schedule != "constant" and 0 < batches <= learner.warmup_batches:
        raise ValueError(
            f"learner.schedule = {learner.schedule} never begins: learner.warmup_batches = "
            f"{learner.warmup_batches} covers all of run.batches = {batches}; shorten the warm-up"
        )


def _require_weights(data: DataSection) -> None:
    if data.weights is None:
        return
    if len(data.weights) != len(data.train):
        raise ValueError(
            f"data.weights has {len(data.weights)} values for {len(data.train)} files in "
            "data.train; give one for each"
        )
    try:
        shares(data.weights)
    except ValueError as error:
        raise ValueError(f"data.weights: {error}") from None


def _require_no_secret(redis: RedisSection) -> None:
    """The recipe is kept in the run directory, and `--set` is there for `ps` to see."""
    if redis.url is not None and holds_password(redis.url):
        raise ValueError(
            "redis.url names a password; leave it out there and put it into the variable "
            "DAPO_REDIS_PASSWORD or a file named by redis.password_file"
        )
    if (redis.cert_file is None) != (redis.key_file is None):
        raise ValueError("redis.cert_file and redis.key_file go together; set both")


def _ineffective(config: Config) -> list[tuple[str, str, str]]:
    """(section, key, why) of every key that the chosen mode ignores."""
    rows = [("algorithm", key, why) for key, why in config.algorithm.ineffective()]
    if config.learner.schedule == "constant":
        rows.append(("learner", "min_learning_rate_ratio", "with learner.schedule = constant"))
    if config.admission.max_staleness == 0 and config.admission.oversample == 1:
        why = "with admission.max_staleness = 0 and oversample = 1: nothing can be overtaken"
        rows.append(("admission", "policy", why))
    if not config.algorithm.dynamic_sampling:
        rows.append(("admission", "give_up_after", "without algorithm.dynamic_sampling"))
    if config.reward.overlong_cache == 0:
        rows.append(("reward", "overlong_factor", "with reward.overlong_cache = 0"))
    if config.data.weights is not None and len(config.data.train) == 1:
        rows.append(("data", "weights", "with one file in data.train"))
    if config.data.heldout is None:
        rows += [("eval", key, "without data.heldout") for key in EvalSection.model_fields]
    if config.rollouts.per_batch == 0:
        rows.append(("rollouts", "max_mib", "with rollouts.per_batch = 0"))
    if config.metrics.port is None:
        rows.append(("metrics", "host", "without metrics.port"))
    rows += _of_the_other_engine(config)
    return [*rows, *_of_the_other_server(config.redis)]


def _of_the_other_server(redis: RedisSection) -> list[tuple[str, str, str]]:
    """Keys that the embedded server, or one of your own, ignores."""
    certificates = ["ca_file", "cert_file", "key_file"]
    if redis.url is None:
        return [("redis", key, "without redis.url") for key in ("password_file", *certificates)]
    rows = [
        ("redis", "port", "with redis.url: write the port into the address"),
        ("redis", "maxmemory_mib", "with redis.url: set maxmemory of the server"),
    ]
    if not redis.url.startswith("rediss:"):
        rows += [("redis", key, "where redis.url is not rediss://") for key in certificates]
    return rows


def _of_the_other_engine(config: Config) -> list[tuple[str, str, str]]:
    """Keys that the chosen kind of engine ignores."""
    why = f"with generator.engine = {config.generator.engine}"
    if config.generator.engine == "vllm":
        own = [key for key in GeneratorSection.model_fields if key.startswith("simulated_")]
        return [("generator", key, why) for key in own]
    keys = ["tensor_parallel", "kv_cache_gib", "gpu_memory_utilization", "enforce_eager"]
    rows = [("generator", key, why) for key in (*keys, "keep_kv_cache")]
    return [*rows, ("publish", "probe_tolerance", why)]


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a TOML recipe and lay `section.key=value` overrides over it.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown or without effect, or a
            value is out of range; the message names the key and what to do.
    """
    return parse_config(read_tree(path, overrides), str(path))


def read_tree(path: Path | None, overrides: list[str] | None = None) -> dict[str, Any]:
    """The sections of a recipe with the overrides laid over them, not yet validated.

    Without a path, the overrides alone.
    """
    try:
        tree = tomllib.loads(path.read_text()) if path else {}
    except FileNotFoundError:
        raise ConfigError(f"recipe {path} does not exist; see deploy/recipes/") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None
    for override in overrides or []:
        _apply(tree, override)
    return tree


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
                lines.append(f"{key} = {_as_toml('none' if value is None else value)}")
        lines.append("")
    return "\n".join(lines)


def _as_toml(value: Any) -> str:
    """A value as TOML, which differs from JSON in its tables."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_as_toml(item)}" for key, item in value.items())
        return f"{{ {', '.join(pairs)} }}" if value else "{}"
    return json.dumps(value, ensure_ascii=False)


def fingerprint(section: Section) -> str:
    """Short name of a section's content, for caches."""
    text = json.dumps(section.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
