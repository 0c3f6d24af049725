"""A checkpoint of another number of ranks: DeepSpeed's universal form, one file per parameter.

ZeRO cuts the optimizer's state by ranks. DeepSpeed's converter puts the parts together, and any
number of ranks can load the result. It runs in a process of its own, because it starts processes
and this one may hold a GPU. The converted copy is temporary: the next checkpoint is of these ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common.disk import remove_tree
from common.errors import CheckpointError
from common.log import get_logger
from common.process import die_with_parent
from learner.state import FACTS, STATE, UNIVERSAL

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
SUFFIX = ".universal.tmp"
"""Of the folder of a copy; one that a crash leaves behind is removed at the next start."""
CONVERT_S = 1500.0
"""Deadline of a conversion, below that of the ranks that wait for it (COLLECTIVE_S)."""
log = get_logger(__name__)


def for_ranks(directory: Path, ranks: int) -> Path:
    """The checkpoint itself if it is of so many ranks, else a converted copy beside it.

    Called by one rank, before any of them loads. Whoever called it removes the copy (`discard`).

    Raises:
        CheckpointError: it cannot be converted; the message says why and what to do.
    """
    try:
        facts = json.loads((directory / FACTS).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} holds no learner state: {error}") from None
    saved = facts.get("learner.ranks")
    if saved == ranks:
        return directory
    copy, started = directory.with_name(directory.name + SUFFIX), time.monotonic()
    log.info("converting a checkpoint", checkpoint=str(directory), of_ranks=saved, for_ranks=ranks)
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    _convert(directory, copy, saved)
    for numbers in directory.glob("random_*.pt"):
        shutil.copy(numbers, copy)
    (copy / FACTS).write_text(json.dumps(facts | {UNIVERSAL: True}))
    log.info("converted", copy=str(copy), seconds=round(time.monotonic() - started, 1))
    return copy


def discard(folder: Path) -> None:
    """Remove a copy that was loaded; a checkpoint itself stays."""
    if folder.name.endswith(SUFFIX):
        remove_tree(folder)


def _convert(directory: Path, copy: Path, saved: int) -> None:
    command = [sys.executable, "-m", CONVERTER, "--inject_missing_state"]
    command += ["--input_folder", str(directory / STATE), "--output_folder", str(copy / STATE)]
    try:
        run = subprocess.run(
            command,
            env=os.environ | {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
            timeout=CONVERT_S,
        )
        last = [line for line in run.stdout.splitlines() if line.strip()][-1:]
        failed = run.returncode != 0
    except subprocess.TimeoutExpired:
        failed, last = True, [f"it took more than {CONVERT_S:g} s"]
    if failed:
        shutil.rmtree(copy, ignore_errors=True)
        raise CheckpointError(
            f"{directory} is of {saved} ranks and could not be converted ({' '.join(last)}); it "
            f"takes as much space again. Set learner.ranks = {saved}, or `dapo export` the run "
            "and start a new one from there"
        )
