"""What a machine has: GPUs by nvidia-smi, memory by the host and the container."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import machine
from common.machine import gpu_names, place, this_machine


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, (80_000, 24_000)),
        ("0", (80_000,)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_the_machine_has_the_gpus_that_nvidia_smi_names_and_the_environment_allows(
    visible: str | None, gpus: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '80000\\n24000\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr(machine, "_QUERY", (str(program),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_machine().gpus == tuple(size * 2**20 for size in gpus)
    assert len(gpu_names()) == len(gpus)


def test_a_machine_without_nvidia_smi_has_no_gpu_and_some_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_QUERY", (str(tmp_path / "missing"),))
    found = this_machine()
    assert found.gpus == ()
    assert found.host > 0


def test_a_container_has_no_more_memory_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", (str(limit), str(tmp_path / "missing")))
    assert this_machine().host == 2**20
    limit.write_text("max\n")
    assert this_machine().host > 2**20


def test_each_process_gets_gpus_of_its_own_and_shares_only_what_is_short() -> None:
    learner, verifier, one, two = place(["0", "1", "2", "3", "4", "5"], [2, 0, 2, 2])
    assert (learner, verifier, one, two) == (["0", "1"], [], ["2", "3"], ["4", "5"])
    assert place(["GPU-a"], [1, 0, 1]) == [["GPU-a"], [], ["GPU-a"]]
    assert place(["0", "1", "2"], [2, 2]) == [["0", "1"], ["2", "0"]]
    assert place(["0"], [2]) == [["0"]]
    assert place([], [1, 1]) == [[], []]
