"""The live view of made-up runs."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from common.live import LiveView, Tail, sparkline
from tests.unit.synthetic_run import (
    append_rows,
    batch_row,
    eval_row,
    round_row,
    write_config,
    write_run,
)


def screen(view: LiveView) -> str:
    """What a terminal of 100 columns shows."""
    console = Console(width=100, height=30, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(view.render())
    return capture.get()


def status(generators: int = 2, **learner: Any) -> dict[str, Any]:
    now = time.time()
    report = {"version": "1.57", "running": 64, "tokens_per_second": 1000.5, "time": now}
    names = [f"generator-{i}.{100 + i}" for i in range(generators)]
    mine = {
        "time": now, "open": 40, "capacity": 48, "waiting_for": "",
        "fates": {"trained": 912, "filtered": 300, "stale": 4, "failed": 1, "open": 40},
    }  # fmt: skip
    return {
        "time": now,
        "members": {
            "learner": {"role": "learner"},
            "verifier-0.7": {"role": "verifier"},
            **{name: {"role": "generator"} for name in names},
        },
        "reports": {
            "learner": mine | learner,
            "verifier-0.7": {"groups": 10},
            "generator-9.1": report,  # dead: it holds no lease
            **dict.fromkeys(names, report),
        },
        "streams": {"prompts": 4, "rollouts": 1, "verdicts": 3, "dead": 0},
        "open": 40,
        "published": "1.57",
        "ended": None,
    }  # fmt: skip


def test_the_view_fits_a_terminal_of_100_columns_and_30_rows(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", batches=120)
    long = "8 of 16 accepted groups; " * 10
    shown = status(generators=40, waiting_for=long)
    shown["streams"]["dead"] = 3
    lines = screen(LiveView(tmp_path / "demo", lambda: shown)).splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    assert "…" not in "\n".join(lines[:-3])  # only what is waited for is cut


def test_the_view_shows_learning_and_pipeline(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", batches=60)
    write_config(tmp_path / "demo", batches=120)
    text = screen(LiveView(tmp_path / "demo", status))
    for part in (
        "demo", "batch 60 of 120", "left", "0.340 → 0.810 at batch 60", "bound 2", "▁",
        "2,001 generated", "4 prompts, 1 rollouts, 3 verdicts", "40 of 48",
        "912 trained, 300 filtered, 4 stale, 1 failed", "2 × generator, 1 × verifier",
        "generator-1.101", "version 1.57", "64 samples", "nothing is waited for",
    ):  # fmt: skip
        assert part in text, part
    assert "generator-9.1" not in text


def test_the_view_says_what_is_waited_for_and_who_is_silent(tmp_path: Path) -> None:
    write_config(tmp_path, batches=5)
    assert "waiting: 3 of 16" in screen(LiveView(tmp_path, lambda: status(waiting_for="3 of 16")))
    old = status(time=time.time() - 60)
    assert "has not reported for 60 s" in screen(LiveView(tmp_path, lambda: old))
    assert "no learner" in screen(LiveView(tmp_path, lambda: status() | {"members": {}}))


def test_the_view_names_the_bottleneck(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", batches=3)
    shown = status(shares={"waiting": 0.9, "training": 0.1})
    text = screen(LiveView(tmp_path / "demo", lambda: shown))
    assert "learner starved: the learner waits for groups 90% of its time" in text


def test_a_lost_server_is_shown_and_not_raised(tmp_path: Path) -> None:
    assert "no answer" in screen(LiveView(tmp_path, lambda: {"error": "no answer from the server"}))


def test_a_run_that_has_not_begun_has_a_view_without_a_server(tmp_path: Path) -> None:
    text = screen(LiveView(tmp_path / "nothing", None))
    assert "batch 0 of ?" in text and "nothing" in text


def test_only_new_lines_are_read_and_a_torn_one_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_text("one\ntw")
    assert list(tail.lines()) == [b"one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert list(tail.lines()) == [b"two", b"three"]
    assert list(tail.lines()) == []


def test_plain_lines_tell_each_row_once_and_not_those_of_an_earlier_start(tmp_path: Path) -> None:
    write_config(tmp_path, batches=10)
    draw = random.Random(1)
    append_rows(tmp_path, eval_row("before", 0, 1.0, 0.3), batch_row(1, 10.0, draw))
    view = LiveView(tmp_path, None)
    assert list(view.plain_lines()) == []
    append_rows(
        tmp_path,
        batch_row(2, 20.0, draw, train_s=3.0, publish_s=1.0, wait_s=5.0),
        batch_row(3, 30.0, draw, train_s=4.0, publish_s=1.0, wait_s=6.0),
        eval_row("3", 3, 31.0, 0.5),
    )
    second, third, evaluation = view.plain_lines()
    assert second.startswith("batch 2/10: accuracy") and "5.0/3.0/1.0 s" in second
    assert third.startswith("batch 3/10: accuracy") and "5.0/4.0/1.0 s" in third
    assert evaluation == "evaluation 3: accuracy 0.500 ± 0.020"
    assert list(view.plain_lines()) == []


def test_an_evaluation_on_several_files_names_each_with_its_accuracy(tmp_path: Path) -> None:
    view = LiveView(tmp_path, dict)
    row = eval_row("after", 9, 1.0, 0.4)
    files = {"aime24": {"accuracy": 0.3}, "amc23": {"accuracy": 0.5}}
    append_rows(tmp_path, row | {"files": files}, row | {"files": {"aime24": files["aime24"]}})
    several, one = view.plain_lines()
    assert several == "evaluation after: accuracy 0.400 ± 0.020 (aime24 0.300, amc23 0.500)"
    assert one == "evaluation after: accuracy 0.400 ± 0.020"


def test_plain_lines_tell_of_rounds_that_lost_a_member(tmp_path: Path) -> None:
    view = LiveView(tmp_path, None)
    append_rows(
        tmp_path,
        round_row(1, 0, 1.0, members=0),
        round_row(2, 0, 2.0, members=2),
        round_row(3, 1, 3.0, members=0, failed="a member died"),
        round_row(4, 1, 4.0, members=1),
        round_row(5, 1, 5.0, members=2),
    )
    failed, lost = view.plain_lines()
    assert failed == "weight round 1.3 failed: a member died"
    assert lost.startswith("weight round 1.4 reached 1 of 2 generators")


def test_a_sparkline_shows_a_whole_run_in_its_width() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    line = sparkline([float(i) for i in range(1000)])
    assert len(line) == 24 and line[0] == "▁" and line[-1] == "█"
