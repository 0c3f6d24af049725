"""The compose file as this machine can run it without containers: paths, names and ports mapped."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.waiting import ROOT

FOLDER = ROOT / "deploy"
COMPOSE = FOLDER / "docker-compose.yml"
GPU = FOLDER / "docker-compose.gpu.yml"
DOCKERFILES = {kind: FOLDER / "docker" / f"Dockerfile.{kind}" for kind in ("cpu", "gpu")}


def services(path: Path, **settings: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file, its variables replaced by `settings` or their defaults."""

    def fill(match: re.Match[str]) -> str:
        return settings.get(match["name"]) or match["default"] or ""

    text = re.sub(r"\$\{(?P<name>\w+)(:-(?P<default>[^}]*))?\}", fill, path.read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


@dataclass(frozen=True)
class Machine:
    """Where things are here that a container has elsewhere."""

    secrets: Path
    settings: Path  # of the server
    server_port: int
    metrics_port: int

    def map(self, word: str) -> str:
        # the ports of metrics, 9400 of the learner and those above it; paths here may hold such too
        word = re.sub(r"\b94(\d\d)\b", lambda m: str(self.metrics_port + int(m[1])), word)
        for there, here in (
            ("/opt/dapo/deploy/", f"{FOLDER}/"),
            ("/run/secrets", str(self.secrets)),
            ("/etc/valkey/valkey.conf", str(self.settings)),
            ("//server:6379", f"//127.0.0.1:{self.server_port}"),
        ):
            word = word.replace(there, here)
        return word

    def command(self, service: dict[str, Any]) -> list[str]:
        """Entrypoint and command; without one the image's, which is `dapo`."""
        command = service["command"]
        words = shlex.split(command) if isinstance(command, str) else command
        own = service.get("entrypoint", [sys.executable, "-m", "common.cli"])
        return [self.map(word) for word in (*own, *words)]

    def health(self, service: dict[str, Any]) -> list[str]:
        """Its health check; the server's is told the port here."""
        kind, python, *words = service["healthcheck"]["test"]
        assert (kind, python) == ("CMD", "python")
        port = [str(self.server_port)] if "server" in words else []
        return [sys.executable, *map(self.map, words), *port]

    def environment(self, service: dict[str, Any]) -> dict[str, str]:
        return {key: self.map(str(value)) for key, value in service.get("environment", {}).items()}
