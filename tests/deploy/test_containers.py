"""The compose file with a real engine: runs in containers, of the image that its Dockerfile makes.

Skipped where no Docker daemon answers or the image is missing.
"""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.server import free_port
from tests.deploy.compose_file import COMPOSE, services
from tests.deploy.compose_project import IMAGE, Project, need_docker
from tests.deploy.waiting import ARITHMETIC, ROOT, SMALL, TINY, until

SLOW_S = 1200.0
PROMETHEUS = str(services(COMPOSE)["prometheus"]["image"])


def small(batches: int) -> str:
    return " ".join(f"--set {k}={v}" for k, v in (SMALL | {"run.batches": batches}).items())


@pytest.fixture
def arithmetic(compose: list[str], arithmetic_base: Path, tmp_path: Path) -> Iterator[Project]:
    need_docker(IMAGE)
    project = Project(compose, tmp_path, ARITHMETIC, DAPO_ARGS=small(batches=1000))
    try:
        project.seed(ROOT / arithmetic_base)
        yield project
    finally:
        project.down()


@pytest.mark.timeout(3000)
def test_a_run_with_vllm_in_containers_grows_shrinks_survives_crashes_stops_and_ends(
    arithmetic: Project,
) -> None:
    run = arithmetic

    def until_batch(number: int) -> None:
        until(f"batch {number}", lambda: len(run.batches()) >= number, run.why, SLOW_S)

    def until_generators(count: int) -> set[str]:
        def them() -> set[str] | None:
            names = run.members("generator")
            return names if len(names) == count else None

        found: set[str] = until(f"{count} generators", them, run.why, SLOW_S)
        return found

    run.up()
    until_batch(1)
    run.scale(2)
    both = until_generators(2)
    rows = run.batches
    until("work of both", lambda: both <= {n for r in rows() for n in r["by_generator"]}, run.why)
    run.scale(1)
    assert until_generators(1) < both
    until_batch(len(run.batches()) + 1)

    for role in ("generator", "learner"):
        run.crash(role)
    for role in ("generator", "learner"):
        until(f"{role} again", lambda role=role: run.is_back(role), run.why, SLOW_S)
    until_batch(len(run.batches()) + 2)

    run("stop")
    assert all(run.has_ended(name) for name in ("learner", "verifier", "generator", "server"))
    done = max(row["step"] for row in run.batches())
    assert run.newest_checkpoint() == done, run.why()

    run.environment["DAPO_ARGS"] = small(batches=done + 2)
    run.up()
    until("the end of the run", lambda: run.has_ended("learner"), run.why, SLOW_S)
    audit = run.audit()
    assert audit["balanced"] and audit["complete"] and audit["trained"] == 4 * (done + 2), audit


@pytest.fixture
def watched(compose: list[str], base: Path, tmp_path: Path) -> Iterator[Project]:
    need_docker(IMAGE, PROMETHEUS)
    project = Project(compose, tmp_path, TINY, DAPO_PROMETHEUS_PORT=str(free_port()))
    try:
        project.seed(ROOT / base)
        yield project
    finally:
        project.down()


def ask(project: Project, path: str, **query: str) -> Any:
    """What Prometheus answers, at the port that is published on this machine."""
    port = project.environment["DAPO_PROMETHEUS_PORT"]
    address = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)["data"]


@pytest.mark.timeout(1800)
def test_prometheus_finds_the_containers_as_they_come_and_go(watched: Project) -> None:
    run = watched

    def scraped() -> dict[str, int]:
        rows = ask(run, "query", query="count by (role) (dapo_rss_bytes)")["result"]
        return {row["metric"]["role"]: int(row["value"][1]) for row in rows}

    def until_scraped(generators: int) -> None:
        expected = {"learner": 1, "verifier": 1, "generator": generators}
        until(f"{expected}", lambda: scraped() == expected, lambda: f"{scraped()}\n{run.why()}")

    run("--profile", "monitoring", "up", "--wait", "--no-build", "prometheus")
    run.up("--scale", "generator=2", "learner", "verifier", "generator")
    until_scraped(generators=2)
    run.scale(1)
    until_scraped(generators=1)

    def health() -> set[str]:
        groups = ask(run, "rules")["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}

    until("every rule evaluated", lambda: health() == {"ok"}, lambda: f"{health()}")
