"""What this machine has, without loading torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_MIB = 2**20
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Machine:
    """Bytes of each GPU that processes here may use, and of host memory."""

    gpus: tuple[int, ...]
    host: int


def this_machine() -> Machine:
    """GPUs as nvidia-smi reports them, fewer under CUDA_VISIBLE_DEVICES; host memory as this
    process may use it, which in a container can be less than the host has."""
    return Machine(_gpus(), min([psutil.virtual_memory().total, *_limits()]))


def gpu_names() -> list[str]:
    """The GPUs of this machine by the names that CUDA_VISIBLE_DEVICES gives or would give them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _listed(visible)[: len(_gpus())]
    return [str(number) for number in range(len(_gpus()))]


def place(names: Sequence[str], wants: Sequence[int]) -> list[list[str]]:
    """GPUs for processes that want so many each: the next ones, and at the end the first again.

    None is named twice for one process, even if it wants more than there are.
    """
    placed, at = [], 0
    for want in wants:
        chosen = [names[(at + index) % len(names)] for index in range(want)] if names else []
        placed.append(list(dict.fromkeys(chosen)))
        at += want
    return placed


def _listed(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]


def _gpus() -> tuple[int, ...]:
    try:
        told = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = told.stdout.split() if told.returncode == 0 else []
    sizes = [int(line) * _MIB for line in lines if line.isdigit()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        sizes = sizes[: len(_listed(visible))]
    return tuple(sizes)


def _limits() -> list[int]:
    found = []
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            found.append(int(text))
    return found
