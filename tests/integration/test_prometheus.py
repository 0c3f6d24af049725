"""Prometheus' configuration by its own tool, and what the roles answer to a scrape."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from common.prometheus import OFFSETS, Prometheus
from tests.unit.synthetic_run import batch_row, eval_row, round_row

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
VITALS = {"rss_mib": 300, "lag_s": 0.01, "seconds": {"idle": 4.0}, "errors_logged": 0}
REPORTS = {
    "learner": {"version": 3, "queues": {"prompts": 1}, "fates": {"trained": 48}},
    "verifier": {"groups": 9, "held": 1, "errors": 0},
    "generator": {"tokens": 5000, "running": 12, "retries": 0},
}


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed; it comes with Prometheus (Debian: prometheus)")
    return found


def told(*argv: str, text: str = "") -> str:
    """What a command says; it has to succeed."""
    done = subprocess.run(
        argv, cwd=FOLDER, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def a_member(role: str) -> tuple[Prometheus, str]:
    """A role's exporter with figures of every kind it has, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    exporter = Prometheus(role, f"{role}-0.1")
    address = exporter.serve("127.0.0.1", port - OFFSETS[role])
    exporter.log(role, 3, VITALS | REPORTS[role])
    if role == "learner":
        for row in (batch_row(3, 1.0, random.Random(1)), eval_row("3", 3, 2.0, 0.5)):
            exporter.log(row["kind"], 3, row)
        exporter.log("round", 3, round_row(1, 3, 3.0))
    return exporter, address


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_the_configuration_and_the_rules_are_valid(promtool: str) -> None:
    assert "is valid prometheus config" in told(promtool, "check", "config", "prometheus.yml")
    assert "SUCCESS" in told(promtool, "check", "rules", "rules.yml")


def test_alerts_fire_when_they_should_and_only_then(promtool: str) -> None:
    assert "SUCCESS" in told(promtool, "test", "rules", "rules_test.yml")


def test_the_queries_of_the_dashboard_are_valid(promtool: str, tmp_path: Path) -> None:
    board = json.loads((FOLDER.parent / "grafana" / "dashboards" / "dapo.json").read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", [])]
    rules = [{"record": f"query_{n}", "expr": expr} for n, expr in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert len(queries) > 40 and "SUCCESS" in told(promtool, "check", "rules", str(path))


@pytest.mark.parametrize("role", list(OFFSETS))
def test_what_a_role_answers_is_well_formed(promtool: str, role: str) -> None:
    _, address = a_member(role)
    text = scrape(address)
    assert f'dapo_rss_bytes{{member="{role}-0.1",role="{role}"}}' in text
    assert told(promtool, "check", "metrics", text=text) == ""


def test_a_scraper_that_hangs_holds_up_neither_the_role_nor_another_scraper() -> None:
    exporter, address = a_member("generator")
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as hangs:
        hangs.sendall(b"GET /metrics HTTP/1.1\r\n")
        exporter.log("generator", 0, {"running": 7})
        assert 'dapo_samples_running{member="generator-0.1",role="generator"} 7.0' in scrape(
            address
        )
