"""Rollouts kept to be read: what is kept, how much of it, and how it is found again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from common.cli import app
from common.errors import ConfigError
from common.ledger import Line
from common.messages import encode
from common.rollout_log import RolloutLog, kept_versions, read_rollouts, surplus
from common.rollout_view import Wanted, as_text, printable, select
from learner.rollouts import RolloutKeeper, closed_group, trained_group
from tests.conftest import MakeConfig
from tests.unit.records import a_prompt, a_sample, a_stored_group, a_verdict
from tests.unit.synthetic_run import a_group

PLENTY = 2**40


def written(run_dir: Path, *groups: dict[str, Any]) -> Path:
    log = RolloutLog(run_dir, PLENTY)
    for group in groups:
        log.write(group)
    return run_dir


# --- the files ----------------------------------------------------------------------------------


def test_groups_are_read_back_as_they_were_written_the_newest_batch_first(tmp_path: Path) -> None:
    odd = a_group(2, prompt="a\u2028b\n\ud800 <tag>")
    groups = [a_group(1), odd, a_group(10)]
    written(tmp_path, *groups)
    found = list(read_rollouts(tmp_path))
    assert [group["version"] for group in found] == [10, 2, 1]
    assert found[1] == odd and kept_versions(tmp_path) == [1, 2, 10]
    assert list(read_rollouts(tmp_path, 2)) == [odd] and list(read_rollouts(tmp_path, 3)) == []


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    written(tmp_path, a_group(1), a_group(1, group="8"))
    path = tmp_path / "rollouts" / "000001.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    assert [group["group"] for group in read_rollouts(tmp_path)] == ["7"]


def test_the_folder_stays_below_its_limit_also_over_a_restart(tmp_path: Path) -> None:
    size = len(json.dumps(a_group(1)))
    for version in range(1, 200):
        RolloutLog(tmp_path, 20 * size).write(a_group(version))  # each time as a new learner
    kept = kept_versions(tmp_path)
    total = sum(path.stat().st_size for path in (tmp_path / "rollouts").iterdir())
    assert total <= 20 * size and kept[0] == 1 and kept[-1] == 199
    # what is left is spread evenly over the run
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert len(kept) >= 10 and max(gaps) <= 16


@given(st.dictionaries(st.integers(1, 99), st.integers(0, 50), max_size=30), st.integers(0, 600))
def test_what_goes_makes_the_rest_fit_and_the_newest_stays(
    sizes: dict[int, int], limit: int
) -> None:
    doomed = surplus(sizes, limit)
    rest = sizes.keys() - set(doomed)
    assert len(doomed) == len(set(doomed)) and set(doomed) <= sizes.keys()
    assert sum(sizes[version] for version in rest) <= limit or len(rest) == 1
    if sizes:
        assert max(sizes) in rest
    if sum(sizes.values()) <= limit:
        assert not doomed


# --- what is kept of a group --------------------------------------------------------------------


def test_a_trained_group_is_kept_with_the_advantages_of_its_training(
    make_config: MakeConfig,
) -> None:
    kept = trained_group(a_stored_group(3), 9, make_config())
    assert (kept["version"], kept["fate"], kept["gold"]) == (9, "trained", "4")
    assert (kept["prompt"], kept["group"], kept["ordinal"]) == ("2+2=?", "3", 3)
    outcomes = [sample["outcome"] for sample in kept["samples"]]
    assert outcomes == ["wrong", "correct", "wrong", "correct"]
    # two right of four: ±1 over a sample standard deviation of 2/√3
    expected = [-math.sqrt(3) / 2, math.sqrt(3) / 2] * 2
    assert [sample["advantage"] for sample in kept["samples"]] == pytest.approx(expected, 1e-4)
    assert [sample["length"] for sample in kept["samples"]] == [3, 2, 5, 1]
    assert kept["samples"][0]["versions"] == ["1.0", "1.0"]


def test_a_failed_group_is_kept_with_the_samples_that_it_had() -> None:
    line = Line(3, 2, "failed", "the checker crashed")
    kept = closed_group(line, 4, encode(a_prompt()), None, [encode(a_sample()), None], PLENTY)
    assert (kept["fate"], kept["reason"], kept["attempt"]) == ("failed", "the checker crashed", 2)
    (sample,) = kept["samples"]
    assert sample["text"] == "4" and sample["outcome"] is None and sample["advantage"] is None


def test_a_filtered_group_has_verdicts_and_no_advantages() -> None:
    verdict = encode(a_verdict(fate="filtered", reason="all_wrong", outcomes=("wrong", "wrong")))
    line = Line(3, 0, "filtered", "all_wrong")
    kept = closed_group(line, 4, encode(a_prompt()), verdict, [encode(a_sample())] * 2, PLENTY)
    assert [sample["outcome"] for sample in kept["samples"]] == ["wrong", "wrong"]
    assert [sample["advantage"] for sample in kept["samples"]] == [None, None]


def test_so_many_trained_groups_are_kept_whichever_are_drawn(make_config: MakeConfig) -> None:
    config = make_config(rollouts={"per_batch": 2})

    def drawn() -> list[str]:
        keeper = RolloutKeeper(config, None)  # type: ignore[arg-type]
        keeper.trained([a_stored_group(ordinal) for ordinal in range(8)], 1)
        keeper.close()
        return [group["group"] for group in read_rollouts(config.run_dir)]

    first = drawn()
    assert len(first) == 2
    assert drawn() == first * 2  # the seed and the version decide


def test_a_damaged_record_is_a_warning_and_the_next_group_is_kept(make_config: MakeConfig) -> None:
    config = make_config()
    keeper = RolloutKeeper(config, None)  # type: ignore[arg-type]
    stored = a_stored_group(1)
    stored.samples[0] = b"no record"
    keeper.trained([stored], 1)
    keeper.trained([a_stored_group(2)], 2)
    keeper.close()
    assert [group["group"] for group in read_rollouts(config.run_dir)] == ["2"]


# --- finding and reading ------------------------------------------------------------------------


def test_best_and_worst_take_one_sample_of_each_group_by_its_shaped_reward() -> None:
    groups = [a_group(2, rewards=[0.5, 1.0, -1.0]), a_group(1, group="8", rewards=[-1.5, 0.9])]
    best, worst = (select(groups, Wanted(), order) for order in ("best", "worst"))
    assert [sample["shaped_reward"] for sample in best] == [1.0, 0.9]
    assert [sample["shaped_reward"] for sample in worst] == [-1.5, -1.0]
    assert len(select(groups, Wanted(), "best", limit=1)) == 1


def test_only_what_is_asked_for_is_selected() -> None:
    groups = [a_group(2), a_group(1, fate="filtered", reason="all_wrong")]
    assert {s["fate"] for s in select(groups, Wanted(fate="filtered"))} == {"filtered"}
    assert {s["outcome"] for s in select(groups, Wanted(outcome="wrong"))} == {"wrong"}
    assert all(s["truncated"] for s in select(groups, Wanted(truncated=True)))


def test_the_text_shows_the_prompt_once_and_what_was_made_of_each_response() -> None:
    text = as_text(select([a_group(13)], Wanted()))
    assert text.count("What is 2+2?") == 1 and text.count("┌ response") == 3
    for part in (
        "batch 13 · trained · group 7, sample 0", "outcome correct", "gold 4", "advantage +1.000",
        "reward 1", "cut off", "policy versions 1.11 to 1.12", "generator g", "│ so it is 4",
    ):  # fmt: skip
        assert part in text, part


def test_what_a_model_wrote_cannot_steer_the_terminal() -> None:
    group = a_group(1, texts=["\x1b[2J\x07 gone\r\u202e", "fine\ttab", ""])
    text = as_text(select([group], Wanted()))
    assert "\x1b" not in text and "\x07" not in text and "\r" not in text and "\u202e" not in text
    assert "\\x1b[2J" in text and "fine\ttab" in text
    assert printable("a\nb\tc é 数") == "a\nb\tc é 数"


Dapo = Callable[..., tuple[int, str]]


@pytest.fixture
def dapo() -> Dapo:
    def call(*arguments: Any) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["rollouts", *map(str, arguments)])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    return call


def test_the_command_reads_a_run(tmp_path: Path, dapo: Dapo) -> None:
    written(tmp_path, a_group(1), a_group(2, fate="filtered", reason="all_wrong"))
    code, text = dapo(tmp_path, "--fate", "filtered", "--worst")
    assert code == 0 and "filtered (all_wrong)" in text and "trained" not in text
    code, text = dapo(tmp_path, "--version", 1, "--outcome", "correct", "--json")
    rows = [json.loads(line) for line in text.splitlines()]
    assert {row["version"] for row in rows} == {1}
    assert {row["outcome"] for row in rows} == {"correct"}
    assert len(dapo(tmp_path, "--limit", 2, "--json")[1].splitlines()) == 2
    assert "no sample is like that" in dapo(tmp_path, "--fate", "failed")[1]


def test_the_command_says_what_it_cannot_do(tmp_path: Path, dapo: Dapo) -> None:
    with pytest.raises(ConfigError, match="no rollouts to read"):
        dapo(tmp_path)
    written(tmp_path, a_group(1), a_group(2), a_group(4))
    with pytest.raises(ConfigError, match="version 3 are kept, but of 1 to 2, 4"):
        dapo(tmp_path, "--version", 3)
    with pytest.raises(ConfigError, match="exclude each other"):
        dapo(tmp_path, "--best", "--worst")


def test_a_size_without_groups_to_keep_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="rollouts.max_mib has no effect"):
        make_config(rollouts={"per_batch": 0, "max_mib": 1.0})
