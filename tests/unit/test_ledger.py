"""The ledger: one durable fate for each group, whatever the order, repetition or crash."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import CheckpointError, DiskError, FencedError
from common.ledger import FATES, Ledger, Line, read_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


def filtered(ordinal: int, attempt: int = 0) -> Line:
    return Line(ordinal, attempt, "filtered", "all_wrong")


def trained(ordinal: int, batch: int) -> Line:
    return Line(ordinal, 0, "trained", "", batch)


def test_a_recorded_fate_is_there_after_a_restart(path: Path) -> None:
    ledger = Ledger(path)
    ledger.record([filtered(3), trained(1, batch=7)])
    ledger.close()
    again = Ledger(path)
    assert again.fates == {3: filtered(3), 1: trained(1, batch=7)}
    assert again.counts() == {"filtered": 1, "trained": 1}


def test_a_fate_is_synced_to_the_disk_before_the_call_returns_and_before_it_is_shown(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(path)
    seen: list[tuple[list[Line], dict[int, Line]]] = []
    sync = os.fsync

    def watch(fd: int) -> None:
        sync(fd)
        seen.append((list(read_lines(path)), dict(ledger.fates)))

    monkeypatch.setattr(os, "fsync", watch)
    ledger.record([filtered(1), filtered(2)])
    assert seen == [([filtered(1), filtered(2)], {})]
    assert list(ledger.fates) == [1, 2]


def test_recording_the_same_fate_again_writes_nothing(path: Path) -> None:
    ledger = Ledger(path)
    assert ledger.record([filtered(1), filtered(1)]) == [filtered(1)]
    assert ledger.record([filtered(1, attempt=2)]) == []
    assert list(read_lines(path)) == [filtered(1)]
    assert ledger.counts() == {"filtered": 1}


@pytest.mark.parametrize(
    "other", [trained(1, 4), trained(1, 5), Line(1, 0, "stale", "no slot"), filtered(1)]
)
def test_a_second_fate_is_an_error_and_leaves_the_file_as_it_was(path: Path, other: Line) -> None:
    ledger = Ledger(path)
    first = trained(1, 3)
    ledger.record([first])
    with pytest.raises(CheckpointError, match=r"group 1 is trained .* cannot become"):
        ledger.record([filtered(2), other])
    assert list(read_lines(path)) == [first]
    assert set(ledger.fates) == {1}
    assert ledger.record([filtered(2)]) == [filtered(2)]


def test_two_fates_in_one_call_are_an_error(path: Path) -> None:
    ledger = Ledger(path)
    with pytest.raises(CheckpointError, match="group 1"):
        ledger.record([filtered(1), trained(1, 2)])
    assert list(read_lines(path)) == []


@pytest.mark.parametrize("torn", [b"{", b'{"ordinal": 3', b"\x00\x00\x00", b'{"ordinal":3}'])
def test_a_torn_last_line_is_cut_at_the_next_start(path: Path, torn: bytes) -> None:
    ledger = Ledger(path)
    ledger.record([filtered(1)])
    ledger.close()
    with path.open("ab") as file:
        file.write(torn)
    assert list(read_lines(path)) == [filtered(1)]
    again = Ledger(path)
    again.record([filtered(2)])
    assert list(read_lines(path)) == [filtered(1), filtered(2)]


def write_lines(path: Path, *calls: list[Line]) -> list[bytes]:
    """The lines of a ledger that recorded these calls."""
    ledger = Ledger(path)
    for call in calls:
        ledger.record(call)
    ledger.close()
    return path.read_bytes().splitlines(keepends=True)


DAMAGES = [b"garbage\n", b"[]\n", b'{"ordinal": 3}\n', b"\n", b"\x00" * 40 + b"\n", b"\xff\n"]


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(path: Path, damaged: bytes) -> None:
    lines = write_lines(path, [filtered(1)], [filtered(2)], [filtered(3)])
    path.write_bytes(lines[0] + damaged.rjust(len(lines[1])) + lines[2])
    with pytest.raises(CheckpointError, match=r"line 2 cannot be read .*restore the file"):
        Ledger(path)
    assert path.read_bytes().endswith(lines[2])


@pytest.mark.parametrize("damaged", DAMAGES)
def test_a_write_of_which_only_the_end_came_to_the_disk_is_cut_whole(
    path: Path, damaged: bytes
) -> None:
    """The first page of an unsynced write may be lost while its second is there."""
    lines = write_lines(path, [filtered(1)], [filtered(2), filtered(3), filtered(4)])
    path.write_bytes(lines[0] + damaged + b"".join(lines[2:]))
    again = Ledger(path)
    assert list(again.fates) == [1] == [line.ordinal for line in read_lines(path)]
    assert path.read_bytes() == lines[0]


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_damaged_line_of_an_old_file_is_an_error_wherever_others_follow(
    path: Path, where: int
) -> None:
    """Ledgers that do not say what was durable when: no line is given up."""
    path.parent.mkdir()
    row = '{"ordinal": %d, "attempt": 0, "fate": "filtered", "reason": "", "batch": null}\n'
    lines = [row % ordinal for ordinal in range(4)]
    path.write_text("".join([*lines[:where], "x" * 40 + "\n", *lines[where:]]))
    with pytest.raises(CheckpointError, match=f"line {where + 1} cannot be read"):
        Ledger(path)
    path.write_text("".join(lines))
    assert list(Ledger(path).fates) == [0, 1, 2, 3]


def test_lines_that_a_killed_process_did_not_sync_are_synced_before_they_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        write_lines(path, [filtered(1)])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    assert list(Ledger(path).fates) == [1]
    assert path.stat().st_ino in synced


def full(fd: int, data: Any) -> int:
    """A disk that takes some bytes more, then none."""
    if len(data) > 10:
        return _write(fd, data[:10])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_write = os.write


def test_a_full_disk_is_an_error_that_says_so_and_leaves_the_ledger_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(path)
    ledger.record([filtered(1)])
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(DiskError, match=r"ledger\.jsonl .*disk is full.*free space"):
            ledger.record([filtered(2), filtered(3)])
    assert path.read_bytes() == before
    assert list(ledger.fates) == [1] and ledger.counts() == {"filtered": 1}
    ledger.record([filtered(3)])  # there is room again
    assert [line.ordinal for line in read_lines(path)] == [1, 3]


def test_what_cannot_be_taken_back_ends_the_ledger_until_the_next_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ledger = Ledger(path)
    ledger.record([filtered(1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(DiskError, match="device fails"):
            ledger.record([filtered(2)])
    with pytest.raises(DiskError, match="start the run again"):
        ledger.record([filtered(3)])
    assert list(ledger.fates) == [1]
    ledger.close()
    Ledger(path).record([filtered(3)])
    assert list(Ledger(path).fates) == [1, 3]


def test_nothing_is_recorded_for_a_run_that_another_learner_has_taken_over(path: Path) -> None:
    def still_mine() -> None:
        raise FencedError("another learner has taken over")

    ledger = Ledger(path, still_mine)
    with pytest.raises(FencedError):
        ledger.record([filtered(1)])
    assert path.read_bytes() == b"" and not ledger.fates
    assert ledger.record([]) == []


def test_a_ledger_that_does_not_exist_has_no_lines(path: Path) -> None:
    assert list(read_lines(path)) == []


def test_fates_may_be_counted_while_another_thread_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    ledger = Ledger(path)

    def write() -> None:
        for ordinal in range(2000):
            ledger.record([filtered(ordinal)])

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert ledger.counts()["filtered"] <= 2000
        time.sleep(0)
    assert ledger.counts() == {"filtered": 2000}


lines = st.builds(
    lambda ordinal, fate: Line(ordinal, 0, fate, "", ordinal if fate == "trained" else None),
    st.integers(0, 5), st.sampled_from(FATES),
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.lists(lines, max_size=3), max_size=8), cut=st.integers(0, 60))
def test_under_any_calls_and_a_crash_in_the_last_write_every_group_keeps_one_fate(
    tmp_path_factory: Any, calls: list[list[Line]], cut: int
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger, told = Ledger(path), {}
    for call in calls:
        try:
            told |= {line.ordinal: line for line in ledger.record(call)}
        except CheckpointError:
            continue
    ledger.close()
    durable = path.read_bytes()
    with path.open("ab") as file:
        file.write(
            b'{"ordinal": 77, "attempt": 0, "fate": "stale", "reason": "x", "batch": 1}'[:cut]
        )
    again = Ledger(path)
    assert again.fates == told
    assert path.read_bytes() == durable
    assert len(list(read_lines(path))) == len(told)
