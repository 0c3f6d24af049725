"""The simulation around the real rule: the documented table, its limits, and the advice."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from common.cli import app
from common.errors import ConfigError
from learner.advice import Row, Table, advise, as_text, simulate_table
from learner.durations import LogNormal, Measured
from learner.limits import generators_alone, learner_alone, synchronous_loop, waiting_for_all
from learner.observed import observe
from learner.simulation import REFERENCE, Result, Setting, simulate

RECIPES = Path(__file__).parents[2] / "deploy" / "recipes"
BATCHES = 150
ALONE = max(learner_alone(REFERENCE), generators_alone(REFERENCE))


@pytest.mark.parametrize(("bound", "rate"), [(0, 0.16), (1, 0.31), (4, 0.70), (8, 1.00)])
def test_the_documented_rates_come_out_and_long_groups_keep_their_share(
    bound: int, rate: float
) -> None:
    result = simulate(REFERENCE, bound, BATCHES)
    share = ALONE / result.batch_s
    assert share == pytest.approx(rate, abs=0.02)
    assert 0.96 <= result.long_ratio <= 1.04
    assert result.staleness_max <= bound
    limit = max(ALONE, waiting_for_all(REFERENCE, bound))
    assert 0.77 <= limit / result.batch_s <= 1.001


def test_a_synchronous_loop_is_no_faster_than_a_bound_of_0() -> None:
    assert ALONE / synchronous_loop(REFERENCE) == pytest.approx(0.16, abs=0.015)


def test_dropping_is_faster_at_a_small_bound_and_trains_half_of_the_long_groups() -> None:
    result = simulate(replace(REFERENCE, policy="drop"), 1, BATCHES)
    assert ALONE / result.batch_s == pytest.approx(0.42, abs=0.03)
    assert result.long_ratio == pytest.approx(0.48, abs=0.1)
    assert result.stale > 0.5


def test_without_oversampling_nothing_is_lost() -> None:
    result = simulate(replace(REFERENCE, oversample=1.0), 1, 60)
    assert result.stale == 0
    assert result.staleness_max == 1


def test_a_simulation_is_drawn_by_its_seed() -> None:
    assert simulate(REFERENCE, 1, 20, seed=3) == simulate(REFERENCE, 1, 20, seed=3)
    assert simulate(REFERENCE, 1, 20, seed=3) != simulate(REFERENCE, 1, 20, seed=4)


SMALL = Setting(
    LogNormal(10.0, 0.0), batch_groups=4, group_size=2, generators=1, slots=8, train_s=5.0,
    publish_s=1.0,
)  # fmt: skip


def test_equal_lengths_and_a_bound_of_0_take_generation_training_and_publication() -> None:
    result = simulate(SMALL, 0, 20)
    assert result.batch_s == pytest.approx(10 + 5 + 1)
    assert result.learner_busy == pytest.approx(6 / 16)
    assert result.generators_busy == pytest.approx(10 / 16)
    assert synchronous_loop(SMALL) == pytest.approx(16.0)
    assert waiting_for_all(SMALL, 1) == pytest.approx(8.0)


def test_generators_stand_still_during_a_publication() -> None:
    slow = replace(SMALL, train_s=1.0, publish_s=100.0)
    assert simulate(slow, 1, 20).batch_s == pytest.approx(110.0)


def test_more_generators_share_the_work() -> None:
    busy = replace(SMALL, slots=2, train_s=0.5, publish_s=0.0)
    one, four = simulate(busy, 2, 30), simulate(replace(busy, generators=4), 2, 30)
    assert one.batch_s == pytest.approx(40.0)
    assert four.batch_s == pytest.approx(10.0, rel=0.1)
    assert generators_alone(busy) == pytest.approx(40.0, rel=0.01)


def test_a_generator_without_room_for_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="1 slots has no room"):
        replace(SMALL, slots=1)


# --- lengths --------------------------------------------------------------------------------------


def test_log_normal_lengths_have_their_mean_and_their_share_of_stragglers() -> None:
    durations, rng = LogNormal(3.0, 0.5, long_share=0.25, long_factor=20.0), random.Random(1)
    groups = [durations.draw(4, rng) for _ in range(4000)]
    assert np.mean([seconds[1:] for seconds, _ in groups]) == pytest.approx(3.0, rel=0.03)
    assert np.mean([long for _, long in groups]) == pytest.approx(0.25, abs=0.03)
    assert np.mean([s[0] for s, long in groups if long]) == pytest.approx(60.0, rel=0.1)


def test_measured_lengths_have_the_quantiles_that_were_measured() -> None:
    points = ((0.0, 0.0), (0.1, 2.0), (0.5, 4.0), (0.9, 10.0), (0.99, 20.0), (1.0, 30.0))
    rng = random.Random(1)
    groups = [Measured(points).draw(5, rng) for _ in range(4000)]
    drawn = np.array([seconds for seconds, _ in groups])
    assert np.quantile(drawn, [0.1, 0.5, 0.9]) == pytest.approx([2.0, 4.0, 10.0], rel=0.06)
    assert all(long == (max(seconds) >= 20.0) for seconds, long in groups)


def batch_row(**figures: Any) -> dict[str, Any]:
    return {
        "time": 1.0, "kind": "batch", "step": 1, "length_p10_raw": 10, "length_p50_raw": 20,
        "length_p90_raw": 40, "length_p99_raw": 80, "length_max_raw": 100, "length_mean_raw": 25.0,
        "train_s": 6.0, "publish_s": 2.0, "acceptance": 0.75, "samples_running": 50,
        "tokens_per_second_generated": 500.0,
    } | figures  # fmt: skip


def write_metrics(run_dir: Path, *rows: dict[str, Any]) -> Path:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


def test_a_run_gives_its_lengths_by_the_pace_of_its_generators(tmp_path: Path) -> None:
    seen = observe(write_metrics(tmp_path, batch_row(), batch_row(train_s=8.0)))
    shares, seconds = zip(*seen.durations.points, strict=True)
    assert shares == (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
    assert seconds == pytest.approx((0, 1, 2, 4, 8, 10))  # 50 samples at once, 10 tokens/s each
    assert (seen.train_s, seen.publish_s, seen.filter_rate) == (7.0, 2.0, 0.25)


def test_a_run_without_a_pace_needs_the_seconds_of_a_sample(tmp_path: Path) -> None:
    run_dir = write_metrics(tmp_path, batch_row(samples_running=0))
    with pytest.raises(ConfigError, match="give --sample-s"):
        observe(run_dir)
    assert observe(run_dir, sample_s=5.0).durations.points[-1] == (1.0, pytest.approx(20.0))


def test_a_run_without_batches_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train a few batches first"):
        observe(tmp_path)


# --- the advice -----------------------------------------------------------------------------------


def a_row(generators: int, bound: int, rate: float, share: float, long: float = 1.0) -> Row:
    result = Result(3600 / rate, bound * 0.8, bound, 0.5, 0.5, long, 0.0)
    return Row(generators, bound, rate, share, 1.0, result)


def a_table(rows: list[Row], learner: float = 100.0) -> Table:
    counts = {row.generators for row in rows}
    alone = {count: 60.0 * count for count in counts}
    return Table(SMALL, rows, learner, alone, dict.fromkeys(counts, 10.0))


def test_the_smallest_bound_that_is_nearly_the_best_is_advised() -> None:
    rows = [a_row(2, 0, 20, 0.2), a_row(2, 1, 97, 0.97), a_row(2, 4, 100, 1.0)]
    advice = advise(a_table(rows))
    assert advice.startswith("Choose S = 1 with 2 generators: 97.0 batches per hour, 9.7 times")
    assert advice.endswith("the learner is the limit, and more generators would not help.")


def test_fewer_generators_are_advised_where_more_bring_nothing() -> None:
    rows = [a_row(1, 4, 58, 0.97), a_row(2, 4, 59, 0.5)]
    assert advise(a_table(rows)).startswith("Choose S = 4 with 1 generator:")
    assert "the generators are the limit" in advise(a_table(rows))


def test_the_advice_says_when_all_wait_for_slow_groups_and_when_there_is_a_bias() -> None:
    advice = advise(a_table([a_row(1, 1, 30, 0.5, long=0.48)]))
    assert "50% of what learner and generators could do" in advice
    assert "long groups are trained at 0.48 of their share" in advice


def test_the_table_has_a_row_for_each_bound_and_the_synchronous_loop() -> None:
    told: list[str] = []
    table = simulate_table(SMALL, [1, 0, 1], [1, 2], batches=20, tell=told.append)
    assert [(row.generators, row.max_staleness) for row in table.rows] == [
        (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert told[-1] == "simulating S = 1 with 2 generators"
    lines = as_text(table).splitlines()
    assert sum("sync" in line.split() for line in lines[:10]) == 2
    assert lines[-1] == advise(table)
    assert all(row.ceiling >= row.share - 1e-9 for row in table.rows)


def test_the_command_takes_a_recipe_and_prints_json() -> None:
    options = ["--max-staleness", "0,1", "--batches", "20", "--train-s", "5", "--json"]
    done = CliRunner().invoke(app, ["simulate", str(RECIPES / "arithmetic.toml"), *options])
    assert done.exit_code == 0, done.output
    table = json.loads(done.stdout)
    assert table["setting"]["batch_groups"] == 32
    assert table["setting"]["train_s"] == 5.0
    assert [row["max_staleness"] for row in table["rows"]] == [0, 1]
    assert table["advice"].startswith("Choose S = ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-staleness", "1,x"], "write numbers from 0 on"),
        (["--generators", "0"], "write numbers from 1 on"),
        (["--slots", "2"], "raise --slots"),
        (["--set", "run.seed=1"], "name one"),
    ],
)
def test_what_cannot_be_simulated_is_an_error_with_its_remedy(
    options: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, ["simulate", *options])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
