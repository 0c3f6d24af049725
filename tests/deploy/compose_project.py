"""A project of Docker Compose: the compose file as it is, in the containers of a Docker daemon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.compose_file import COMPOSE
from tests.deploy.waiting import batches

IMAGE = "dapo-pipeline:cpu"
PASSWORD = "a+b/c=="


def told(*argv: str, **options: Any) -> str:
    """What a command says; it has to succeed."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{argv}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def need_docker(*images: str) -> None:
    """Skip where no daemon answers or an image is missing, and say how to get it."""
    if shutil.which("docker") is None:
        pytest.skip("no docker here; Debian: apt-get install docker.io")
    if subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon answers; start one, or name it in DOCKER_HOST")
    for image in images:
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True).returncode:
            ours = "`docker compose -f deploy/docker-compose.yml build`"
            pytest.skip(f"no image {image}; {ours if image == IMAGE else '`docker pull` gets it'}")


class Project:
    """Of a name of its own, so that nothing meets another run; `down` leaves nothing."""

    def __init__(self, compose: list[str], folder: Path, recipe: Path, **settings: str) -> None:
        for secret in ("redis_password", "grafana_password"):
            (folder / secret).write_text(f"{PASSWORD}\n")
        self.argv = [*compose, "-f", str(COMPOSE), "-p", f"dapo-test-{os.getpid()}"]
        self.folder, self.run_dir = folder, f"runs/{recipe.stem}"
        clean = {key: value for key, value in os.environ.items() if not key.startswith("DAPO_")}
        self.environment = clean | {
            "DAPO_IMAGE": IMAGE, "DAPO_SECRETS": str(folder), "DAPO_RECIPES": str(recipe.parent),
            "DAPO_RECIPE": recipe.name, **settings,
        }  # fmt: skip

    def __call__(self, *words: str) -> str:
        return told(*self.argv, *words, env=self.environment)

    def up(self, *words: str) -> None:
        """Bring services up and wait until they are well."""
        argv = [*self.argv, "up", "--wait", "--no-build", *words]
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr[-1500:]}\n{self.why()}"

    def scale(self, generators: int) -> None:
        self.up("--no-recreate", "--scale", f"generator={generators}", "generator")

    def seed(self, base: Path) -> None:
        """Put a base that this machine has made into the cache of the containers."""
        copy = self.folder / "seed" / base.name
        shutil.copytree(base, copy)
        for path in copy.rglob("*"):
            path.chmod(path.stat().st_mode | 0o444)  # weights are written for their owner alone
        self("run", "--rm", "-T", "--no-deps", "--volume", f"{copy.parent}:/seed:ro",
             "--entrypoint", "cp", "model", "-r", f"/seed/{base.name}", "/data/cache/")  # fmt: skip

    def inspect(self, service: str) -> list[dict[str, Any]]:
        """What the daemon knows of each container of a service, the stopped ones too."""
        ids = self("ps", "--all", "--quiet", service).split()
        found: list[dict[str, Any]] = json.loads(told("docker", "inspect", *ids)) if ids else []
        return found

    def crash(self, service: str) -> None:
        """Kill every process of a container but its init, as a crash would."""
        argv = [*self.argv, "exec", "-T", service, "sh", "-c", "kill -9 -1"]
        subprocess.run(argv, env=self.environment, capture_output=True)

    def is_back(self, service: str) -> bool:
        """Whether Docker has started it again, once, and it is well."""
        (container,) = self.inspect(service)
        well = container["State"]["Health"]["Status"] == "healthy"
        return well and container["RestartCount"] == 1

    def has_ended(self, service: str) -> bool:
        """Whether it is over; it must be so by itself, and well."""
        (container,) = self.inspect(service)
        assert container["State"]["ExitCode"] == 0, self.why()
        return bool(container["State"]["Status"] == "exited")

    def batches(self) -> list[dict[str, Any]]:
        """Rows of the batches trained so far; the learner's container may be stopped."""
        source = f"learner:/data/{self.run_dir}/metrics.jsonl"
        argv = [*self.argv, "cp", source, str(self.folder)]
        subprocess.run(argv, env=self.environment, capture_output=True)
        return batches(self.folder)

    def newest_checkpoint(self) -> int:
        """Its version, as a container of its own sees it."""
        names = self("run", "--rm", "-T", "--no-deps", "--entrypoint", "ls", "model",
                     f"{self.run_dir}/checkpoints").split()  # fmt: skip
        return max((int(name) for name in names if name.isdigit()), default=0)

    def members(self, role: str) -> set[str]:
        """Names of the living, by their leases."""
        argv = [*self.argv, "exec", "-T", "verifier", "dapo", "status", self.run_dir, "--json"]
        said = subprocess.run(argv, env=self.environment, capture_output=True, text=True)
        members = json.loads(said.stdout)["members"] if said.stdout else []
        return {row["name"] for row in members if row["role"] == role and row["alive"]}

    def audit(self) -> dict[str, Any]:
        """What `dapo audit` finds; it must be content."""
        audit = self("run", "--rm", "-T", "model", "audit", self.run_dir, "--json")
        found: dict[str, Any] = json.loads(audit)
        return found

    def why(self) -> str:
        return self("logs", "--tail", "30")

    def down(self) -> None:
        self("--profile", "monitoring", "down", "--volumes", "--timeout", "20")
