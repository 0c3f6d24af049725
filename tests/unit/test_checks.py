"""Start-up checks: what is sound passes, and each planted mistake is named with its remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.checks import CERTAIN, CHECKS, dry_run_text, examine, require_sound, run_checks
from common.errors import ConfigError
from common.machine import Machine
from common.memory import GIB
from common.run import run_all
from common.startup import URL_VARIABLE
from common.stop_tokens import end_of_turn, stop_token_ids
from common.subject import Subject
from tests.conftest import MakeConfig

Keys = dict[str, dict[str, Any]]
Examine = Callable[..., Subject]

LAPTOP = Machine(gpus=(), host=16 * GIB)
MODEL = {
    "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 200,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


class Chatting:
    """A tokenizer of one token a character, with special tokens and a chat template."""

    def __init__(self, turn: str = "<|im_end|>", eos: str = "<|im_end|>", largest: int = 130):
        self.turn, self.eos = turn, eos
        self.chat_template: str | None = "chat"
        self.added_tokens_encoder = {"<|im_start|>": 128, "<|im_end|>": 129, "<|end|>": largest}
        self.all_special_tokens = [eos]

    @property
    def eos_token_id(self) -> int | None:
        return self.get_vocab().get(self.eos)

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(128)} | self.added_tokens_encoder

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % 128 for letter in text]

    def apply_chat_template(
        self, turns: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        said = "".join(f"<|im_start|>{t['role']}\n{t['content']}{self.turn}\n" for t in turns)
        return said + "<|im_start|>assistant\n" * add_generation_prompt


@pytest.fixture
def problems(tmp_path: Path) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n')
    return str(path)


@pytest.fixture
def look(
    tmp_path: Path, problems: str, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> Examine:
    """Look at a model folder and a small configuration, with changes to any of it."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    folder = tmp_path / "model"
    folder.mkdir()

    def build(
        keys: Keys | None = None,
        *,
        model: dict[str, Any] | None = None,
        tokenizer: Any = None,
        on: Machine = LAPTOP,
        generation: dict[str, Any] | None = None,
    ) -> Subject:
        (folder / "config.json").write_text(json.dumps(MODEL | (model or {})))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        sections = {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": [problems], "heldout": f"{tmp_path}/train.jsonl"},
        }
        for name, changes in (keys or {}).items():
            sections[name] = sections.get(name, {}) | changes
        subject = examine(make_config(**sections))
        found = Subject(subject.config, subject.facts, on)
        vars(found)["tokenizer"] = tokenizer or Chatting()
        return found

    return build


def lines_of(subject: Subject) -> dict[str, str]:
    """The line of each check by its name."""
    lines, _ = run_checks(subject, CHECKS)
    return dict(zip(CHECKS, lines, strict=True))


def test_a_sound_configuration_has_a_line_for_each_check_and_no_fault(look: Examine) -> None:
    lines, faults = run_checks(look(), CHECKS)
    assert faults == []
    assert [line[6:].partition(":")[0] for line in lines] == list(CHECKS)
    assert all(line.startswith(("ok    ", "note  ")) for line in lines)


GPUS_2 = Machine(gpus=(24 * GIB, 24 * GIB), host=64 * GIB)
ONE_GPU = Machine(gpus=(24 * GIB,), host=64 * GIB)
LARGE = {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 40}
CHAT = {"data": {"template": "chat"}}

MISTAKES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "longer than the positions": (
        "context",
        {"keys": {"model": {"max_length": 65}}},
        ["model.max_length = 65", "max_position_embeddings = 64", "model.max_positions = 65"],
    ),
    "positions that raise nothing": (
        "context",
        {"keys": {"model": {"max_positions": 64}}},
        ["model.max_positions = 64", "max_position_embeddings = 64", "leave it out"],
    ),
    "longer than the raised positions": (
        "context",
        {"keys": {"model": {"max_positions": 100, "max_length": 128}}},
        ["model.max_length = 128", "= 100"],
    ),
    "devices that heads do not divide over": (
        "heads",
        {"keys": {"generator": {"tensor_parallel": 3}}},
        ["generator.tensor_parallel = 3", "4 attention heads", "common divisor"],
    ),
    "key-value heads that do not divide": (
        "heads",
        {
            "keys": {"generator": {"tensor_parallel": 4}},
            "model": {"num_attention_heads": 12, "num_key_value_heads": 6},
        },
        ["generator.tensor_parallel = 4", "6 of keys and values"],
    ),
    "a template without a chat template": (
        "template",
        {"keys": CHAT, "tokenizer": "silent"},
        ["data.template = 'chat'", 'data.template = "raw"'],
    ),
    "a tokenizer of another model": (
        "vocabulary",
        {"tokenizer": Chatting(largest=200)},
        ["token 200", "200 rows", "model.path"],
    ),
    "a template with tokens that do not exist": (
        "vocabulary",
        {"keys": CHAT, "tokenizer": Chatting(turn="<|turn_end|>")},
        ["<|turn_end|>", "does not know", "data.template"],
    ),
    "an end of turn that ends nothing": (
        "end of responses",
        {"keys": CHAT, "tokenizer": Chatting(eos="<|end|>")},
        ["<|im_end|>", "<|end|> (130)", 'sampling.stop_tokens = ["<|im_end|>"]'],
    ),
    "a stop token that does not exist": (
        "end of responses",
        {"keys": {"sampling": {"stop_tokens": ["<|stop|>"]}}},
        ["sampling.stop_tokens", "'<|stop|>'", "no token of the tokenizer"],
    ),
    "no stop token at all": (
        "end of responses",
        {"tokenizer": Chatting(eos="<|none|>")},
        ["no end-of-sequence token", "sampling.stop_tokens"],
    ),
    "rounds that pass for silence": (
        "timing",
        {"keys": {"admission": {"silence_s": 60}, "publish": {"round_timeout_s": 90}}},
        ["admission.silence_s = 60", "publish.round_timeout_s = 90", "raise the first"],
    ),
    "NCCL on one GPU": (
        "devices",
        {"on": ONE_GPU},
        ["publish.backend = auto", "GPUs here: 1", "set publish.backend = gloo"],
    ),
    "more ranks than GPUs": (
        "devices",
        {"keys": {"learner": {"ranks": 4}}, "on": GPUS_2},
        ["learner.ranks = 4", "number of GPUs, 2", "redis.url"],
    ),
    "a learner that does not fit": (
        "learner memory",
        {"model": LARGE, "on": GPUS_2},
        ["a rank of the learner needs", "learner.micro_batch_tokens", "learner.zero_stage"],
    ),
    "a learner that does not fit beside the engine": (
        "learner memory",
        {
            "keys": {
                "generator": {"gpu_memory_utilization": 0.99},
                "publish": {"backend": "gloo"},
            },
            "model": {"hidden_size": 512},
            "on": ONE_GPU,
        },
        ["beside the engine this GPU has 0.2 GiB", "model.gradient_checkpointing"],
    ),
    "a GPU without room for one sample": (
        "generator memory",
        {"keys": {"generator": {"gpu_memory_utilization": 0.1}}, "on": GPUS_2},
        ["generator.gpu_memory_utilization leaves 0 KiB", "generator.tensor_parallel"],
    ),
    "a CPU cache without room for one sample": (
        "generator memory",
        {
            "keys": {
                "generator": {"kv_cache_gib": 0.001},
                "model": {"max_length": 4096},
                "sampling": {"max_tokens": 4000},
            },
            "model": {"max_position_embeddings": 4096},
        },
        ["generator.kv_cache_gib leaves", "model.max_length"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_a_fault_that_names_key_and_remedy(
    look: Examine, mistake: str
) -> None:
    check, changes, words = MISTAKES[mistake]
    if changes.get("tokenizer") == "silent":
        silent = Chatting()
        silent.chat_template = None
        changes = changes | {"tokenizer": silent}
    subject = look(**changes)
    line = lines_of(subject)[check]
    assert line.startswith(f"FAULT {check}: ")
    for word in words:
        assert word in line
    _, faults = run_checks(subject, {check: CHECKS[check]})
    assert faults == [line.removeprefix(f"FAULT {check}: ")]


def test_a_row_that_cannot_be_trained_on_is_a_fault_of_its_file(
    look: Examine, problems: str
) -> None:
    Path(problems).write_text('{"prompt": "1+1"}\n')
    assert "train.jsonl, row 1 has no gold" in lines_of(look())["rows"]


def test_a_held_out_file_that_repeats_its_problems_is_a_fault(
    look: Examine, tmp_path: Path
) -> None:
    path = tmp_path / "aime.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2"}\n' * 32)
    line = lines_of(look({"data": {"heldout": str(path)}}))["rows"]
    assert line.startswith("FAULT rows: ")
    assert "aime.jsonl repeats its problems" in line


NOTES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "positions are raised": (
        "context",
        {"keys": {"model": {"max_positions": 128, "max_length": 100}}},
        ["100 of 128 positions, raised from 64"],
    ),
    "a model that is elsewhere": (
        "model",
        {"keys": {"model": {"path": "models/Qwen2.5-32B"}}},
        ["`hf download Qwen/Qwen2.5-32B --local-dir models/Qwen2.5-32B`"],
    ),
    "a model that nobody knows": (
        "model",
        {"keys": {"model": {"path": "models/own"}}},
        ["models/own is not on this machine", "model.path"],
    ),
    "data that are elsewhere": (
        "data",
        {"keys": {"data": {"train": ["data/far.jsonl"]}}},
        ["data/far.jsonl", "`dapo data prepare INPUT... --out FILE`"],
    ),
    "no held-out problems": (
        "evaluation",
        {"keys": {"data": {"heldout": None}}},
        ["no accuracy is measured", "data.heldout"],
    ),
    "held-out problems that are trained on": (
        "evaluation",
        {},
        ["train.jsonl is in data.train and in data.heldout"],
    ),
    "ranks without a group": (
        "batch",
        {"keys": {"learner": {"ranks": 3}, "algorithm": {"updates_per_batch": 2}}},
        ["leave 1 of learner.ranks = 3 idle", "algorithm.updates_per_batch"],
    ),
    "engines with room to spare": (
        "room",
        {"keys": {"generator": {"count": 4}}},
        ["1024 places", "for up to 32 samples", "admission.max_staleness"],
    ),
    "a group larger than an engine": (
        "room",
        {"keys": {"generator": {"max_samples": 2}}},
        ["a group of 4", "generator.max_samples = 2"],
    ),
    "a learner that barely fits": (
        "learner memory",
        {"on": Machine(gpus=(), host=int(0.139 * GIB))},
        ["which is tight"],
    ),
    "more places than samples that fit": (
        "generator memory",
        {"keys": {"generator": {"kv_cache_gib": 0.001}}},
        ["such samples fit at a time, and generator.max_samples = 256"],
    ),
    "a template that ends no turn": (
        "end of responses",
        {"keys": CHAT, "tokenizer": Chatting(turn="")},
        ["ends a turn with no token of its own"],
    ),
}


@pytest.mark.parametrize("note", NOTES)
def test_what_someone_should_know_is_a_note_and_no_fault(look: Examine, note: str) -> None:
    check, changes, words = NOTES[note]
    line = lines_of(look(**changes))[check]
    assert line.startswith(f"note  {check}: ")
    for word in words:
        assert word in line


def test_stop_tokens_that_cover_the_end_of_turn_are_sound(look: Examine) -> None:
    other = Chatting(eos="<|end|>")
    covered = look(CHAT | {"sampling": {"stop_tokens": ["<|im_end|>"]}}, tokenizer=other)
    assert lines_of(covered)["end of responses"].startswith("ok")
    listed = look(CHAT, tokenizer=other, generation={"eos_token_id": [129, 130]})
    assert lines_of(listed)["end of responses"].startswith("ok")


def test_a_shared_gpu_is_sound_over_gloo(look: Examine) -> None:
    shared = look({"publish": {"backend": "gloo"}}, on=ONE_GPU)
    assert lines_of(shared)["devices"].startswith("ok    devices: ranks and engines want 2")


def test_with_a_server_elsewhere_roles_need_not_fit_on_this_machine(
    look: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = look({"learner": {"ranks": 4}, "redis": {"url": "redis://far/0"}}, on=ONE_GPU)
    assert lines_of(named)["devices"].startswith("ok")
    monkeypatch.setenv(URL_VARIABLE, "redis://far/0")
    assert lines_of(look({"learner": {"ranks": 4}}, on=ONE_GPU))["devices"].startswith("ok")


def test_a_simulated_engine_needs_no_heads_no_memory_and_no_device(look: Examine) -> None:
    lines = lines_of(look({"generator": {"engine": "simulated"}}, on=ONE_GPU))
    assert not any(line.startswith("FAULT") for line in lines.values())
    assert "want 1, GPUs here: 1" in lines["devices"]


# --- what the runner does with findings -----------------------------------------------------------


def test_a_dry_run_lists_every_check_also_when_several_fail(
    look: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = look({"model": {"max_length": 65}, "admission": {"silence_s": 1}})
    monkeypatch.setattr("common.checks.examine", lambda config: subject)
    with pytest.raises(ConfigError) as refused:
        dry_run_text(subject.config)
    first, *lines = str(refused.value).splitlines()
    assert "model.max_length = 65" in first
    assert "admission.silence_s = 1" in first
    assert len(lines) == len(CHECKS)
    assert sum(line.startswith("FAULT") for line in lines) == 2


def test_a_start_refuses_what_is_certain_and_not_what_is_estimated(
    look: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large = look(model=LARGE, on=GPUS_2)
    monkeypatch.setattr("common.checks.examine", lambda config: too_large)
    require_sound(too_large.config)
    silent = look({"admission": {"silence_s": 1}})
    monkeypatch.setattr("common.checks.examine", lambda config: silent)
    with pytest.raises(ConfigError, match=r"admission\.silence_s = 1"):
        require_sound(silent.config)


def test_the_checks_of_a_start_load_no_tokenizer(look: Examine) -> None:
    subject = look()
    del vars(subject)["tokenizer"]
    run_checks(subject, CERTAIN)
    assert "tokenizer" not in vars(subject)


def test_a_run_is_refused_before_anything_is_started(look: Examine) -> None:
    config = look({"model": {"max_length": 65}}).config
    with pytest.raises(ConfigError, match=r"model\.max_length = 65"):
        run_all(config)
    assert not (config.run_dir / "logs").exists()


# --- parts ----------------------------------------------------------------------------------------


def test_the_end_of_turn_is_the_first_special_token_after_the_answer() -> None:
    assert end_of_turn(Chatting(turn="\n<|im_end|><|end|>")) == "<|im_end|>"
    assert end_of_turn(Chatting(turn="<|end|>")) == "<|end|>"
    assert end_of_turn(Chatting(turn="")) is None


def test_stop_tokens_are_those_of_tokenizer_generation_config_and_recipe(tmp_path: Path) -> None:
    tokenizer = Chatting(eos="<|im_end|>")
    assert stop_token_ids(tmp_path, tokenizer) == [129]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(tmp_path, tokenizer, ["<|end|>"]) == [7, 129, 130]
    (tmp_path / "generation_config.json").write_text("{}")
    assert stop_token_ids(tmp_path, tokenizer) == [129]
