"""The held-out files of a run: read, checked, and called by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.config import Config
from common.data import Row, load_rows, require_distinct


def load_heldout(config: Config, tokenizer: Any) -> dict[str, list[Row]]:
    """The rows of each file of data.heldout that eval.problems lets in, by the file's name.

    Raises:
        DataError: a file cannot be read, or repeats its problems (`require_distinct`).
    """
    verifier, files = config.verifier, config.data.heldout or []
    limit = config.max_prompt_tokens
    heldout = {}
    for name, path in zip(file_names(files), files, strict=True):
        rows = load_rows(
            [path], tokenizer, config.data.template, limit, verifier.checker, verifier.boxed
        )
        require_distinct(rows, path)
        heldout[name] = rows[: config.eval.problems]
    return heldout


def file_names(paths: list[str]) -> list[str]:
    """What the files are called in results: their stems where these differ, else the paths."""
    stems = [Path(path).stem for path in paths]
    return stems if len(set(stems)) == len(stems) else paths
