"""The audit of made-up ledgers and batch files."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.audit import audit, mark_ended
from common.errors import CheckpointError, ConfigError
from common.ledger import Line
from common.order import recycled
from tests.unit.synthetic_run import (
    append_rows,
    store_batch,
    write_config,
    write_ledger,
    write_run,
)


def trained(ordinal: int, batch: int) -> Line:
    return Line(ordinal, 0, "trained", "", batch)


def filtered(ordinal: int) -> Line:
    return Line(ordinal, 0, "filtered", "all_wrong")


def test_a_complete_run_whose_groups_all_have_one_fate_is_balanced(tmp_path: Path) -> None:
    write_run(tmp_path / "run", batches=20)
    result = audit(tmp_path / "run", None)
    assert result.balanced and result.complete and not result.reasons
    assert result.fates == {"trained": 320, "filtered": 100, "stale": 20, "failed": 0}
    assert result.dispatched == 440 and result.in_flight == 0
    assert result.as_dict()["balanced"] is True
    assert "\nbalanced; the run is complete" in result.as_text()


def test_a_batch_in_a_file_and_in_the_ledger_counts_once(tmp_path: Path) -> None:
    write_config(tmp_path, batches=2)
    write_ledger(tmp_path, [trained(0, 1), trained(1, 1), filtered(2)])
    store_batch(tmp_path, 1, [0, 1])
    store_batch(tmp_path, 2, [3, 4])
    result = audit(tmp_path, None)
    assert result.balanced
    assert (result.trained, result.filtered, result.dispatched) == (4, 1, 5)


def test_a_group_twice_in_one_batch_is_a_duplicate(tmp_path: Path) -> None:
    store_batch(tmp_path, 3, [0, 1, 1])
    result = audit(tmp_path, None)
    assert result.duplicates == 1 and not result.balanced
    assert "group 1 is trained in batch 3 and trained in batch 3" in result.reasons[0]


def test_a_line_that_is_there_twice_is_one_fate(tmp_path: Path) -> None:
    write_ledger(tmp_path, [filtered(0), trained(1, 1)])
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(2 * path.read_bytes())
    result = audit(tmp_path, None)
    assert result.balanced and (result.filtered, result.trained, result.dispatched) == (1, 1, 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (filtered(1), "group 1 is filtered and trained in batch 2"),
        (trained(1, 1), "group 1 is trained in batch 1 and trained in batch 2"),
    ],
)
def test_a_group_with_two_fates_or_two_batches_is_a_duplicate(
    tmp_path: Path, line: Line, reason: str
) -> None:
    write_ledger(tmp_path, [filtered(0), line])
    store_batch(tmp_path, 2, [1, 2])
    result = audit(tmp_path, None)
    assert result.duplicates == 1 and not result.balanced
    assert reason in result.reasons[0]


def test_a_group_without_a_fate_is_missing_once_the_run_has_ended(tmp_path: Path) -> None:
    write_config(tmp_path, batches=1)
    write_ledger(tmp_path, [trained(0, 1), filtered(3)])
    mark_ended(tmp_path, batches=1)
    result = audit(tmp_path, None)
    assert result.missing == 2 and not result.balanced and not result.complete
    assert "2 groups (1, 2) without a fate, though the run has ended" in result.as_text()


def test_between_the_last_batch_and_the_end_of_the_run_open_groups_are_in_flight(
    tmp_path: Path,
) -> None:
    """A crash there has lost nothing: the next start closes them."""
    write_config(tmp_path, batches=1)
    write_ledger(tmp_path, [trained(0, 1), filtered(3)])
    result = audit(tmp_path, {1})
    assert result.balanced and result.in_flight == 2 and not result.complete


def test_a_run_that_is_prolonged_has_not_ended(tmp_path: Path) -> None:
    write_config(tmp_path, batches=2)
    write_ledger(tmp_path, [trained(0, 1), filtered(3)])
    mark_ended(tmp_path, batches=1)
    result = audit(tmp_path, None)
    assert result.balanced and result.in_flight == 2 and not result.complete


def test_a_group_without_a_fate_is_in_flight_while_the_run_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path, batches=2)
    write_ledger(tmp_path, [trained(0, 1), filtered(3)])
    result = audit(tmp_path, None)
    assert result.balanced and result.in_flight == 2 and not result.complete
    assert "dispatched again at the next start" in result.reasons[0]


def test_a_complete_run_is_told_by_its_metrics_too(tmp_path: Path) -> None:
    write_config(tmp_path, batches=2)
    write_ledger(tmp_path, [filtered(0)])
    assert not audit(tmp_path, None).complete
    append_rows(tmp_path, {"time": 1.0, "kind": "batch", "step": 2})
    assert audit(tmp_path, None).complete


def test_groups_that_the_server_knows_are_in_flight(tmp_path: Path) -> None:
    write_config(tmp_path, batches=2)
    write_ledger(tmp_path, [trained(0, 1)])
    result = audit(tmp_path, {0, 1, 4})
    # 0 has its fate already, and only the learner's message to the server is under way
    assert (result.dispatched, result.trained, result.in_flight) == (5, 1, 4)
    assert result.balanced
    assert "2 groups (2, 3) in flight and not on the server" in result.reasons[0]


def test_a_prompt_that_came_back_is_a_group_of_its_own(tmp_path: Path) -> None:
    write_config(tmp_path, batches=1)
    lost = Line(1, 0, "stale", "no slot")
    write_ledger(tmp_path, [trained(0, 1), lost, trained(recycled(1), 1)])
    result = audit(tmp_path, {recycled(recycled(1))})
    assert result.balanced
    assert (result.dispatched, result.trained, result.stale, result.in_flight) == (4, 2, 1, 1)


def test_a_line_that_was_torn_by_a_crash_is_no_fate(tmp_path: Path) -> None:
    write_config(tmp_path, batches=9)
    write_ledger(tmp_path, [filtered(0), filtered(1)])
    with (tmp_path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"ordinal": 2, "attempt": 0, "fa')
    result = audit(tmp_path, None)
    assert result.balanced and result.filtered == result.dispatched == 2


def test_a_batch_that_was_not_committed_is_no_fate(tmp_path: Path) -> None:
    write_ledger(tmp_path, [filtered(0)])
    store_batch(tmp_path, 1, [1])
    (tmp_path / "batches" / "000001").rename(tmp_path / "batches" / "000001.tmp")
    assert audit(tmp_path, None).trained == 0


def test_a_damaged_batch_file_is_an_error_and_not_a_balance(tmp_path: Path) -> None:
    store_batch(tmp_path, 1, [0])
    (tmp_path / "batches" / "000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="manifest"):
        audit(tmp_path, None)


def test_an_empty_run_is_balanced_and_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    assert audit(tmp_path, None).balanced
    with pytest.raises(ConfigError, match="does not exist"):
        audit(tmp_path / "nowhere", None)
