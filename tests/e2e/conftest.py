"""What the end-to-end tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random character-level Qwen2 with its tokenizer, as the arithmetic recipe makes it."""
    from learner.warmup import character_model, character_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer()
    character_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    return folder
