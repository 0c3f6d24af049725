"""The problems of a run, the same at every start.

Which prompt an ordinal stands for follows from seed, data and mixture alone, so a run whose data
change under it would train some prompts twice and others never. `data.json` in the run directory
says what the run began with; a start with anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from common.config import Config
from common.data import Row, load_rows
from common.disk import make_dir, replace_durable
from common.errors import ConfigError
from learner.heldout import load_heldout

Record = dict[str, Any]


class Problems(NamedTuple):
    """Rows to train on, and those to evaluate on by file (none without data.heldout)."""

    train: list[Row]
    heldout: dict[str, list[Row]]


def load_problems(config: Config, tokenizer: Any) -> Problems:
    """Read the data files of a run, and hold it to the data that it began with.

    Raises:
        DataError: a file or a row cannot be used; the message names it.
        ConfigError: the run was begun with other data.
    """
    data, verifier = config.data, config.verifier
    train = load_rows(
        data.train, tokenizer, data.template, config.max_prompt_tokens,
        verifier.checker, verifier.boxed, drop_long=True,
    )  # fmt: skip
    heldout = load_heldout(config, tokenizer)
    require_same(config, train)
    return Problems(train, heldout)


def require_same(config: Config, rows: list[Row]) -> None:
    """Keep a record of the training data, or compare with that of an earlier start.

    Nothing was dispatched before the first incarnation of a learner began; until then the data
    may still change.

    Raises:
        ConfigError: a learner of this run has begun with other data; the message says which.
    """
    path, record = config.run_dir / "data.json", data_record(config, rows)
    if (config.run_dir / "timeline.json").exists() and path.exists():
        if changes := _changes(json.loads(path.read_text()), record):
            raise ConfigError(
                f"the training data of {config.run_dir} have changed since the run began: "
                f"{'; '.join(changes)}. Which prompts were trained follows from them: put them "
                "back as they were (data.template, the tokenizer and model.max_length count as "
                "well), or start under another run.name"
            )
        return
    make_dir(config.run_dir)
    replace_durable(path, json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n")


def data_record(config: Config, rows: Iterable[Row]) -> Record:
    """All that the order of prompts follows from: seed, weights, and the rows of each file."""
    by_part: list[list[Row]] = [[] for _ in config.data.train]
    for row in rows:
        by_part[row.part].append(row)
    return {
        "seed": config.run.seed,
        "weights": config.data.weights,
        "files": [
            {"path": name, "rows": len(part), "digest": digest(part)}
            for name, part in zip(config.data.train, by_part, strict=True)
        ],
    }


def digest(rows: Iterable[Row]) -> str:
    """Fingerprint of what rows ask and how their answers are judged, in their order."""
    state = hashlib.blake2b(digest_size=16)
    for row in rows:
        tokens = row.token_ids.astype("<i4").tobytes()
        judged = json.dumps([len(tokens), row.gold, row.checker, row.boxed])
        state.update(judged.encode() + b"\n" + tokens)
    return state.hexdigest()


def _changes(old: Record, new: Record) -> list[str]:
    """In words: what differs between two records. The path of a file may."""
    found = [
        f"{name} was {old[key]} and is {new[key]}"
        for key, name in (("seed", "run.seed"), ("weights", "data.weights"))
        if old[key] != new[key]
    ]
    before, after = old["files"], new["files"]
    if len(before) != len(after):
        return [*found, f"data.train had {len(before)} files and has {len(after)}"]
    for was, now in zip(before, after, strict=True):
        if was["rows"] != now["rows"]:
            found.append(f"{now['path']} had {was['rows']} usable rows and has {now['rows']}")
        elif was["digest"] != now["digest"]:
            found.append(f"{now['path']} has other prompts or golds, or another order")
    return found
