"""`dapo status`: the page, its text, its JSON, and how it follows a run."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from common import status_cli
from common.audit import mark_ended
from common.cli import app
from common.errors import ConfigError
from common.ledger import Ledger, Line
from common.overview import overview
from common.status_view import render
from tests.unit.synthetic_run import append_rows, batch_row, write_config

NOW = 1000.0


def a_status(generators: int = 2, **learner: Any) -> dict[str, Any]:
    """What `read_status` returns of a healthy run."""
    own = {
        "role": "learner", "time": NOW - 1, "version": 7, "batches": 50, "capacity": 48,
        "max_staleness": 2, "stall_s": 300.0, "since_progress_s": 4.0, "batch_interval_s": 9.0,
        "acceptance": 0.5, "shares": {"waiting": 0.1, "training": 0.85, "publishing": 0.05},
        "groups": {"unclaimed": 3, "generating": 20, "judging": 1, "accepted": 5, "training": 16},
        "fates": {"trained": 112, "filtered": 60}, "seconds": {"training": 90.0, "waiting": 10.0},
        "tokens_total": 50_000.0, "rss_mib": 900, "lag_s": 0.01, "errors_logged": 0,
        "last_error": "", "last_error_time": 0.0, "waiting_for": "",
    }  # fmt: skip
    names = [f"generator-{n}.{100 + n}" for n in range(generators)]
    report = {
        "role": "generator", "time": NOW - 1, "version": "1.7", "running": 64, "rss_mib": 800,
        "tokens_per_second": 500.0, "shares": {"generating": 0.9, "idle": 0.1}, "lag_s": 0.02,
    }  # fmt: skip
    verifier = {
        "role": "verifier", "time": NOW, "groups_per_second": 3.5, "shares": {"busy": 0.4},
        "last_error": "no verdict: RuntimeError: no luck", "last_error_time": NOW - 30,
    }  # fmt: skip
    roles = {"learner": "learner", "verifier-0.9": "verifier", **dict.fromkeys(names, "generator")}
    members = {name: {"role": role, "lease_age_s": 2.0} for name, role in roles.items()}
    gone = report | {"time": NOW - 60}
    return {
        "time": NOW, "members": members,
        "reports": {
            "learner": own | learner, "verifier-0.9": verifier, "generator-9.9": gone,
            "generator-8.8": gone | {"time": NOW - 9999}, **dict.fromkeys(names, report),
        },
        "streams": {"prompts": 3, "rollouts": 1, "verdicts": 5, "dead": 0},
        "open": 45, "published": "1.7", "ended": None,
    }  # fmt: skip


def screen(page: dict[str, Any]) -> list[str]:
    console = Console(width=100, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(render(page))
    return capture.get().splitlines()


def test_the_page_has_everything_that_an_operator_asks_for() -> None:
    batch = batch_row(7, 1.0, random.Random(1), staleness_max=2, tokens_per_second=321.0)
    page = overview("demo", a_status(), batch)
    text = "\n".join(screen(page))
    for part in (
        "demo", "HEALTHY", "7 of 50 trained", "last progress 5 s ago", "version 1.7 is published",
        "learner", "verifier-0.9", "generator-0.100", "2 s old", "3.500 groups/s", "500 tokens/s",
        "generating 90%", "900 MiB", "gone", "generator-9.9", "last report 60 s ago", "no luck",
        "9, 30 s ago",
        "3 unclaimed, 20 generating, 1 judging, 5 accepted, 16 training", "limit 48",
        "112 trained, 60 filtered", "3 prompts, 1 rollouts, 5 verdicts, 0 dead", "50%",
        "2 worst, bound 2", "1,000 generated, 321 trained", "10% waiting, 85% training",
        "90% generating, 10% idle", "40% busy",
    ):  # fmt: skip
        assert part in text, part
    assert "generator-8.8" not in text  # gone for hours
    assert json.loads(json.dumps(page)) == page


def test_the_page_is_one_screen_whatever_the_number_of_members() -> None:
    lines = screen(overview("demo", a_status(generators=64, waiting_for="x" * 60), None))
    assert len(lines) <= 38 and max(map(len, lines)) <= 100
    assert any("more" in line for line in lines)


def test_a_page_without_a_single_report_has_dashes_and_no_error() -> None:
    page = overview("demo", {"time": NOW, "members": {}, "reports": {}, "streams": {}}, None)
    assert page["verdict"] == "starting"
    assert any("nobody holds a lease" in line for line in screen(page))


def test_tokens_trained_are_known_without_the_runs_directory() -> None:
    assert overview("demo", a_status(), None)["tokens_per_second"]["trained"] == 500.0


def test_without_a_server_a_run_has_ended_or_stalled() -> None:
    lost = {"error": "no answer from the server at 127.0.0.1:1: refused"}
    stalled = overview("demo", lost, None)
    assert stalled["verdict"] == "stalled" and "no answer" in stalled["figure"]
    assert overview("demo", lost, None, ended=True)["verdict"] == "ended"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    write_config(folder, batches=50)
    (folder / "server").mkdir()
    (folder / "server" / "url").write_text("redis://:secret@127.0.0.1:1/0")
    append_rows(folder, batch_row(7, 1.0, random.Random(1)))
    return folder


def statuses(monkeypatch: pytest.MonkeyPatch, *found: dict[str, Any]) -> None:
    """What the next looks at the server find."""
    left: Iterator[dict[str, Any]] = iter(found)
    monkeypatch.setattr(status_cli, "read_status", lambda url, run: next(left))
    monkeypatch.setattr(status_cli, "REFRESH_S", 0.0)


def test_the_exit_status_tells_whether_a_run_has_stalled(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses(monkeypatch, a_status(), a_status(since_progress_s=400.0))
    well, stalled = (CliRunner().invoke(app, ["status", str(run_dir)]) for _ in range(2))
    assert (well.exit_code, stalled.exit_code) == (0, 1)
    assert "HEALTHY" in well.output and "STALLED" in stalled.output
    assert "nothing was done for 401 s" in stalled.output


def test_watching_tells_each_change_of_the_verdict_and_stops_at_the_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starved = a_status(shares={"waiting": 0.9, "training": 0.1})
    over = a_status() | {"ended": "complete"}
    statuses(monkeypatch, a_status(), a_status(), starved, starved, over)
    lines = CliRunner().invoke(app, ["status", str(run_dir), "--watch"]).output.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["healthy", "learner starved", "ended"]


def test_watching_as_json_gives_a_line_for_every_look(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses(monkeypatch, a_status(), a_status() | {"ended": "complete"})
    result = CliRunner().invoke(app, ["status", str(run_dir), "--watch", "--json"])
    pages = [json.loads(line) for line in result.output.splitlines()]
    assert [page["verdict"] for page in pages] == ["healthy", "ended"]
    assert pages[0]["batch"]["entropy"] > 0


def test_a_server_that_is_gone_is_shown_without_its_password(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["status", str(run_dir)])
    assert result.exit_code == 1
    assert "no answer from the server at 127.0.0.1:1" in result.output
    assert "secret" not in result.output
    mark_ended(run_dir, 50)
    assert "ENDED" in CliRunner().invoke(app, ["status", str(run_dir)]).output


def test_after_the_end_the_runs_directory_says_what_the_server_cannot(run_dir: Path) -> None:
    with contextlib.closing(Ledger(run_dir / "ledger.jsonl")) as ledger:
        ledger.record([Line(0, 0, "trained", "mixed", 1), Line(1, 0, "filtered", "all correct")])
    mark_ended(run_dir, 7)
    result = CliRunner().invoke(app, ["status", str(run_dir), "--json"])
    page = json.loads(result.output)
    assert (result.exit_code, page["verdict"]) == (0, "ended")
    assert page["batches"] == {"trained": 7, "planned": 50}
    assert page["fates"] == {"trained": 1, "filtered": 1, "stale": 0, "failed": 0}


def test_what_is_neither_a_run_nor_an_address_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["status", str(tmp_path / "nothing")])
    assert isinstance(result.exception, ConfigError)
    assert "neither a run directory nor a redis:// address" in str(result.exception)
