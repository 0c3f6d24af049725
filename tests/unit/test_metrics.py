"""Figures of a run: one table that names them, and the exporters that follow it."""

from __future__ import annotations

import json
import random
import re
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.catalog import CATALOG, as_markdown
from common.config import Config, load_config
from common.errors import ConfigError
from common.exporters import InBackground, TensorBoard, exporters_of, scalars
from common.metrics import Metrics, last_row, read_metrics
from common.prometheus import LABELS, OFFSETS, Prometheus
from common.vitals import Clock, Vitals
from tests.unit.synthetic_run import batch_row, eval_row, round_row, write_config

ROOT = Path(__file__).parents[2]
REPORT = {"rss_mib": 100, "lag_s": 0.01, "seconds": {"idle": 4.0, "busy": 6.0}, "errors_logged": 2}


def a_config(folder: Path, *sets: str) -> Config:
    write_config(folder, batches=3)
    keys = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
    return load_config(folder / "config.toml", [*keys, *sets])


def shown(exporter: Prometheus) -> dict[tuple[str, str], float]:
    """(name, third label) to value, as a scrape reads it."""
    text = generate_latest(exporter.registry).decode()
    return {
        (sample.name, "".join(v for k, v in sample.labels.items() if k not in LABELS)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


# --- the table ----------------------------------------------------------------------------------


def test_names_follow_the_conventions_of_prometheus_and_are_unique() -> None:
    names = [metric.full_name for metric in CATALOG]
    assert len(set(names)) == len(names)
    sources = [(metric.source, metric.key) for metric in CATALOG]
    assert len(set(sources)) == len(sources)
    for metric in CATALOG:
        assert re.fullmatch(r"dapo_[a-z0-9_]+", metric.full_name)
        assert metric.label not in LABELS
        assert metric.means and metric.healthy and metric.action
        if metric.key.endswith(("_share", "_s")):
            assert metric.name.endswith(("_ratio", "_seconds")), metric.name


def test_docs_explain_every_metric_as_the_table_does() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert text.endswith(as_markdown())


def test_every_key_of_the_configuration_that_the_table_names_exists() -> None:
    named = {
        word
        for metric in CATALOG
        for word in re.findall(r"\b([a-z]+\.[a-z_]+)\b", f"{metric.healthy} {metric.action}")
    }
    unknown = []
    for word in named - {"metrics.jsonl"}:
        section, key = word.split(".")
        field = Config.model_fields.get(section)
        if field and key not in field.annotation.model_fields:  # type: ignore[union-attr]
            unknown.append(word)
    assert len(named) > 20 and not unknown


def test_every_figure_of_a_batch_that_should_be_logged_is_in_the_table() -> None:
    known = {metric.key for metric in CATALOG if metric.source == "batch"}
    row = batch_row(1, 1.0, random.Random(1))
    elsewhere = {  # of the learner's report, of every role's, or no figure at all
        "time", "kind", "step", "by_generator", "rss_mib", "groups_judged", "groups_failed",
        "prompts", "rollouts", "verdicts", "optimizer_steps",
    }  # fmt: skip
    fates = {key for key in row if key.startswith("groups_")}
    assert row.keys() - known - elsewhere - fates == set()


# --- Prometheus ---------------------------------------------------------------------------------


def test_a_report_is_exported_with_role_and_member() -> None:
    exporter = Prometheus("verifier", "verifier-0.7")
    exporter.log("verifier", 0, REPORT | {"groups": 9, "held": 3})
    text = generate_latest(exporter.registry).decode()
    assert 'dapo_groups_judged_total{member="verifier-0.7",role="verifier"} 9.0' in text
    assert "# TYPE dapo_groups_judged_total counter" in text
    assert "# TYPE dapo_groups_held gauge" in text
    values = shown(exporter)
    assert values["dapo_rss_bytes", ""] == 100 * 2**20
    assert values["dapo_time_seconds_total", "busy"] == 6.0
    assert values["dapo_errors_logged_total", ""] == 2.0


def test_what_is_missing_or_not_finite_is_left_out_and_nothing_of_other_roles_is_shown() -> None:
    exporter = Prometheus("learner", "learner")
    assert generate_latest(exporter.registry) == b""
    exporter.log(
        "batch", 1, {"entropy": float("nan"), "gap_by_age": {0: 0.1, 1: 0.4}, "loss": None}
    )
    exporter.log("generator", 1, {"running": 3})
    assert shown(exporter) == {
        ("dapo_logprob_gap_by_age_nats", "0"): 0.1,
        ("dapo_logprob_gap_by_age_nats", "1"): 0.4,
    }


def test_help_says_what_a_metric_means_and_what_is_healthy() -> None:
    exporter = Prometheus("learner", "learner")
    exporter.log("batch", 1, {"entropy": 0.5})
    assert "Healthy: 0.1 to 2" in generate_latest(exporter.registry).decode()


def test_members_of_one_machine_take_the_free_ports_of_their_role() -> None:
    import socket
    import urllib.request

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        base = probe.getsockname()[1] - OFFSETS["generator"]
    exporters = [Prometheus("generator", f"generator-{n}") for n in range(2)]
    served = [exporter.serve("127.0.0.1", base) for exporter in exporters]
    assert len(set(served)) == 2
    exporters[1].log("generator", 0, {"running": 5})
    with urllib.request.urlopen(f"http://{served[1]}/metrics", timeout=10) as answer:
        assert b'dapo_samples_running{member="generator-1",role="generator"} 5.0' in answer.read()
    assert Prometheus("generator", "off").serve("127.0.0.1", None) == ""


def test_a_learners_port_in_use_and_a_wrong_host_are_named_with_the_key() -> None:
    first = Prometheus("learner", "learner")
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="metrics.port"):
            first.serve("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="metrics.host = 203.0.113.1"):
        first.serve("203.0.113.1", 19321)


# --- alerts and dashboard -----------------------------------------------------------------------


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\bdapo_[a-z0-9_]+\b", text))


def exported() -> set[str]:
    """Names in the registries of a learner, a verifier and a generator, as they run."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for role in OFFSETS
        for family in Prometheus(role, role).describe()
    }


def test_alerts_and_dashboard_use_no_metric_that_no_role_exports() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    in_rules = names_in(json.dumps(rules))
    in_tests = names_in((ROOT / "deploy/prometheus/rules_test.yml").read_text())
    dashboard = names_in((ROOT / "deploy/grafana/dashboards/dapo.json").read_text())
    assert len(in_rules) > 10 and len(dashboard) > 40
    assert (in_rules | in_tests | dashboard) - exported() == set()


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    tests = (ROOT / "deploy/prometheus/rules_test.yml").read_text()
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["annotations"]["action"] and rule["alert"] in tests, rule["alert"]


def test_the_dashboard_has_a_row_for_each_role_and_panels_that_do_not_overlap() -> None:
    board = json.loads((ROOT / "deploy/grafana/dashboards/dapo.json").read_text())
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert {"Learner", "Generators", "Verifiers"} <= set(rows)
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# --- one call for all exporters -----------------------------------------------------------------


class Kept:
    """An exporter that remembers; `fails` makes it raise, `gate` makes it wait."""

    def __init__(self, fails: bool = False, gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[str, int]] = []
        self.fails, self.gate, self.closed = fails, gate, False

    def log(self, kind: str, step: int, row: dict[str, Any]) -> None:
        if self.gate:
            self.gate.wait(10)
        if self.fails:
            raise OSError("the disk is full")
        self.rows.append((kind, step))

    def close(self) -> None:
        self.closed = True


def test_one_call_writes_the_file_and_feeds_every_exporter(tmp_path: Path) -> None:
    kept, prometheus = Kept(), Prometheus("learner", "learner")
    metrics = Metrics(tmp_path, [prometheus, InBackground(kept)])
    metrics.log("batch", 1, {"entropy": 0.5})
    metrics.log("batch", 2, {"entropy": 0.4})
    metrics.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert kept.rows == [("batch", 1), ("batch", 2)] and kept.closed
    assert shown(prometheus)["dapo_entropy_nats", ""] == 0.4


def test_an_exporter_that_fails_or_hangs_costs_its_own_rows_only(tmp_path: Path) -> None:
    gate, well = threading.Event(), Kept()
    hangs = InBackground(Kept(gate=gate))
    metrics = Metrics(tmp_path, [InBackground(Kept(fails=True)), hangs, InBackground(well)])
    for step in range(1200):  # more than may wait
        metrics.log("batch", step, {"loss": 0.0})
    gate.set()
    metrics.close()
    assert len(list(read_metrics(tmp_path))) == 1200
    assert len(well.rows) > 0 and well.rows[0] == ("batch", 0)


def test_the_newest_row_of_a_kind_is_found_without_reading_the_whole_file(tmp_path: Path) -> None:
    assert last_row(tmp_path, "batch") is None
    metrics = Metrics(tmp_path)
    for step in range(3000):
        metrics.log("batch", step, {"padding": "x" * 200})
    metrics.log("round", 3000, {})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "batch", "st')
    row = last_row(tmp_path, "batch")
    assert row is not None and row["step"] == 2999
    assert last_row(tmp_path, "eval") is None


def test_tensorboard_gets_the_scalars_by_kind_and_version(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    for row in (
        batch_row(7, 1.0, random.Random(1)),
        eval_row("7", 7, 2.0, 0.5),
        round_row(1, 7, 3),
    ):
        board.log(row["kind"], row["step"], row)
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"batch/entropy", "batch/gap_by_age/1", "eval/accuracy", "round/probe_gap"} <= tags
    assert events.Scalars("eval/accuracy")[0].step == 7


def test_scalars_are_the_finite_numbers_of_a_row() -> None:
    row = {"a": 1, "b": float("inf"), "c": None, "d": "x", "e": {"f": 2.5, "g": "y"}}
    assert dict(scalars(row)) == {"a": 1.0, "e/f": 2.5}


# --- Weights & Biases ---------------------------------------------------------------------------


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.finished = False

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_rows_and_configuration_but_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = FakeRun(), {}
    stand_in = types.ModuleType("wandb")
    stand_in.init = lambda **settings: asked.update(settings) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sets = ("metrics.wandb_project=sums", "metrics.tensorboard=false", "redis.url=redis://h:1/0")
    (exporter,) = exporters_of(a_config(tmp_path / "demo", *sets))
    exporter.log("batch", 3, {"entropy": 0.5, "by_generator": {"g": 4}})
    exporter.close()
    assert run.rows == [{"batch/entropy": 0.5, "batch/by_generator/g": 4.0, "version": 3}]
    assert run.finished
    assert (asked["project"], asked["id"], asked["resume"]) == ("sums", "demo", "allow")
    assert "redis" not in asked["config"] and "algorithm" in asked["config"]


def test_wandb_that_is_not_installed_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = a_config(tmp_path / "demo", "metrics.wandb_project=x", "metrics.tensorboard=false")
    with pytest.raises(ConfigError, match=r"pip install wandb.*or leave the key out"):
        exporters_of(config)


def test_a_host_without_a_port_has_no_effect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metrics.host has no effect without metrics.port"):
        a_config(tmp_path / "demo", "metrics.host=0.0.0.0")
    assert a_config(tmp_path / "demo").metrics.port is None


# --- vitals -------------------------------------------------------------------------------------


def test_a_clock_counts_every_second_once_and_shares_are_of_its_window() -> None:
    now = [0.0]
    clock = Clock("idle", "busy", marks=2, now=lambda: now[0])
    assert clock.shares() == {"idle": 0.0, "busy": 0.0}
    now[0] = 3.0
    clock.enter("busy")
    now[0] = 4.0
    assert clock.totals() == {"idle": 3.0, "busy": 1.0}
    assert clock.shares() == {"idle": 0.75, "busy": 0.25}
    clock.mark()
    clock.mark()  # both marks are at 4 now
    now[0] = 6.0
    assert clock.shares() == {"idle": 0.0, "busy": 1.0}
    assert clock.totals() == {"idle": 3.0, "busy": 3.0}


async def test_a_blocked_event_loop_is_seen_once() -> None:
    import asyncio
    import time

    vitals = Vitals(Clock("idle"))
    task = asyncio.create_task(vitals.watch_loop())
    await asyncio.sleep(0.05)
    time.sleep(0.4)
    await asyncio.sleep(0.05)
    figures = vitals.figures()
    assert figures["lag_s"] >= 0.3 and figures["rss_mib"] > 0
    assert vitals.figures()["lag_s"] == 0.0
    task.cancel()


def test_the_last_error_of_a_process_is_remembered(tmp_path: Path) -> None:
    from common import log

    log.configure("generator", "generator-0", "run", tmp_path / "log.jsonl")
    before = log.errors_so_far()[0]
    logger = log.get_logger("test")
    logger.warning("only a warning")
    logger.error("round failed", round="1.2", error="no answer")
    count, when, words = log.errors_so_far()
    assert (count, words) == (before + 1, "round failed: no answer") and when > 0
