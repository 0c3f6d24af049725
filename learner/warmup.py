"""Builds the base of the small demo: a character-level Qwen2 that can add, carelessly.

The model is warmed up by a short supervised run on worked sums, clean ones first and then noisy
ones, so that it knows the form of a solution and is right about half of the time: reinforcement
learning then has groups that are neither all right nor all wrong, and mistakes and rambling to
unlearn. The folder loads in
transformers and in vLLM without a hub. Equal settings give equal weights on one machine.
"""

import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from common import arithmetic
from learner.export import open_to_readers

PAD, EOS = "<pad>", "<eos>"
CONTEXT = 512

Log = Callable[[str], None]


class ArithmeticSettings(Protocol):
    """What the builder reads of its settings; any object with these attributes will do."""

    @property
    def seed(self) -> int: ...
    @property
    def terms_min(self) -> int: ...
    @property
    def terms_max(self) -> int: ...
    @property
    def train_rows(self) -> int: ...
    @property
    def heldout_rows(self) -> int: ...
    @property
    def warmup_rows(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def noisy_steps(self) -> int: ...
    @property
    def warmup_batch(self) -> int: ...
    @property
    def warmup_learning_rate(self) -> float: ...
    @property
    def wrong_step_rate(self) -> float: ...
    @property
    def ramble_rate(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def measure_samples(self) -> int: ...


FIELDS = tuple(name for name in vars(ArithmeticSettings) if not name.startswith("_"))


@dataclass(frozen=True)
class Example:
    """Token ids of one worked example; the loss covers those after the prompt."""

    ids: list[int]
    prompt_length: int


def build_arithmetic(directory: Path, settings: ArithmeticSettings, log: Log) -> None:
    """Write `directory` with model/, train.jsonl, heldout.jsonl and base.json.

    The directory appears complete or not at all. Raises FileExistsError when it is there already
    and ValueError when the settings ask for more distinct problems than exist.
    """
    terms = settings.terms_min, settings.terms_max
    train = arithmetic.problems(settings.train_rows, settings.seed, *terms, held_out=False)
    heldout = arithmetic.problems(settings.heldout_rows, settings.seed, *terms, held_out=True)
    with staged(directory) as stage, torch.random.fork_rng(devices=[]):
        tokenizer = character_tokenizer()
        model, loss = _warm_up(settings, tokenizer, log)
        figures = _measure(settings, model, tokenizer, heldout)
        log("base: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
        model.save_pretrained(stage / "model")
        tokenizer.save_pretrained(stage / "model")
        open_to_readers(stage / "model")
        arithmetic.write_rows(stage / "train.jsonl", train)
        arithmetic.write_rows(stage / "heldout.jsonl", heldout)
        write_summary(stage / "base.json", settings, FIELDS, {"warmup_loss": loss, **figures})


def character_tokenizer() -> Qwen2Tokenizer:
    """One token a byte, so one a character of ASCII; any text in NFC round-trips exactly.

    transformers builds Qwen2's own tokenizer class for every Qwen2 folder, whatever the folder
    asks for, and that class works on bytes; so this is that class, with no merges at all.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate((PAD, EOS, *alphabet))},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def character_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """A fresh model of 0.6 M parameters, in fp32, from the current torch seed."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        # The usual 0.02 is for wide models: at this width attention hardly tells one position
        # from another at first, and finding the next term takes several times as long to learn.
        initializer_range=0.09,
        # The texts are short, and the term to add next is found by its position.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A temporary directory beside `directory` that is renamed to it when the block succeeds."""
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty: remove it to build the base again")
    directory.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield stage
        # Temporary files are private to their owner; roles may run as another user.
        for path in (stage, *stage.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        stage.rename(directory)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def write_summary(
    path: Path, settings: object, fields: Sequence[str], figures: dict[str, float]
) -> None:
    """Write base.json: the settings that were used and what was measured."""
    used = {name: getattr(settings, name) for name in fields}
    path.write_text(json.dumps({"settings": used, "measured": figures}, indent=2) + "\n")


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_tokens: int,
    *,
    batch: int = 256,
    temperature: float = 1.0,
) -> list[tuple[str, int]]:
    """One response for each prompt from the full distribution: (text, tokens with the end token).

    Temperature 0 is greedy. The prompts are tokenized as they are, padded on the left.
    """
    chosen: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        chosen = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    responses: list[tuple[str, int]] = []
    for start in range(0, len(prompts), batch):
        inputs = tokenizer(
            list(prompts[start : start + batch]),
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        output = model.generate(**inputs, **chosen, max_new_tokens=max_tokens)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            if tokenizer.eos_token_id in row:
                row = row[: row.index(tokenizer.eos_token_id) + 1]
            responses.append((tokenizer.decode(row, skip_special_tokens=True), len(row)))
    return responses


def _examples(
    settings: ArithmeticSettings, tokenizer: Qwen2Tokenizer
) -> tuple[list[Example], list[Example]]:
    """The supervised problems with clean solutions, and the same ones with noisy solutions.

    They are training problems: held-out ones are never seen before they are measured.
    """
    rng = random.Random(settings.seed)
    noise = arithmetic.Noise(
        settings.wrong_step_rate, settings.ramble_rate, settings.max_tokens + 8
    )
    terms = settings.terms_min, settings.terms_max
    clean, noisy = [], []
    for problem in arithmetic.problems(
        settings.warmup_rows, settings.seed + 1, *terms, held_out=False
    ):
        prompt = tokenizer.encode(problem.prompt)
        text = arithmetic.solution(problem)
        clean.append(Example(prompt + _response(text, True, tokenizer), len(prompt)))
        text, ends = arithmetic.noisy_solution(problem, rng, noise)
        noisy.append(Example(prompt + _response(text, ends, tokenizer), len(prompt)))
    return clean, noisy


def _response(text: str, ends: bool, tokenizer: Qwen2Tokenizer) -> list[int]:
    ids = [int(token) for token in tokenizer.encode(text)]
    return [*ids, int(tokenizer.eos_token_id)] if ends else ids


def _warm_up(
    settings: ArithmeticSettings, tokenizer: Qwen2Tokenizer, log: Log
) -> tuple[Qwen2ForCausalLM, float]:
    """The warmed-up model and its mean loss over the last tenth of the steps."""
    torch.manual_seed(settings.seed)
    model = character_model(tokenizer)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.warmup_learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    steps = settings.warmup_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    # Noise from the start hides the rule: the same steps then end far below half right.
    clean, noisy = (
        _batches(examples, settings.warmup_batch, random.Random(settings.seed))
        for examples in _examples(settings, tokenizer)
    )
    losses: list[float] = []
    started = time.monotonic()
    for step in range(1, steps + 1):
        batch = next(noisy if step > steps - settings.noisy_steps else clean)
        ids, mask, labels = _padded(batch, tokenizer)
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - started
            log(f"warm-up step {step}/{steps}: loss {losses[-1]:.3f}, {seconds:.0f} s")
    tail = losses[-max(1, steps // 10) :]
    return model.eval(), sum(tail) / len(tail)


def _rate(step: int, steps: int) -> float:
    """Share of the learning rate: a linear rise over the first tenth, then half a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Endless shuffled batches, each of mixed lengths."""
    while True:
        order = rng.sample(examples, len(examples))
        yield from (order[i : i + size] for i in range(0, len(order), size))


def _padded(
    batch: list[Example], tokenizer: Qwen2Tokenizer
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and labels, each (examples, longest); −100 labels carry no loss."""
    longest = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), longest), int(tokenizer.pad_token_id))
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(batch):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        mask[row, :length] = 1
        labels[row, example.prompt_length : length] = ids[row, example.prompt_length : length]
    return ids, mask, labels


def _measure(
    settings: ArithmeticSettings,
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    heldout: list[arithmetic.Problem],
) -> dict[str, float]:
    """Sampled at temperature 1 on held-out problems, in groups of eight."""
    torch.manual_seed(settings.seed)
    size = 8
    asked = [p for p in heldout[: settings.measure_samples // size] for _ in range(size)]
    responses = sample(model, tokenizer, [p.prompt for p in asked], settings.max_tokens)
    lengths = [length for _, length in responses]
    right = [
        arithmetic.claimed_answer(text) == problem.answer
        for problem, (text, _) in zip(asked, responses, strict=True)
    ]
    groups = [sum(right[start : start + size]) for start in range(0, len(right), size)]
    count = max(1, len(right))
    return {
        "accuracy": sum(right) / count,
        "mixed_groups": sum(0 < group < size for group in groups) / max(1, len(groups)),
        "length": sum(lengths) / count,
        "at_cap": sum(length == settings.max_tokens for length in lengths) / count,
    }
