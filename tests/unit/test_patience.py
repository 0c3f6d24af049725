"""Waiting for the server: how long, how often it is tried, and what the log says of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from common import patience
from common.errors import BrokerError
from common.patience import PAUSE_S, SAY_S, Patience, Wait

LOST = OSError("connection refused")
WHY = "it does not answer"


class Clock:
    """Time that passes only when someone waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(patience, "time", made)
    yield made


def tries(wait: Wait, clock: Clock) -> Iterator[float]:
    """Try for ever in vain; the pauses."""
    while True:
        pause = wait.again(WHY, LOST)
        clock.now += pause
        yield pause


def test_pauses_grow_from_an_instant_to_their_limit(clock: Clock) -> None:
    pauses = list(itertools.islice(tries(Patience(60.0).begin("reading"), clock), 10))
    assert pauses[0] == PAUSE_S[0] and pauses[-1] == PAUSE_S[1]
    assert pauses == sorted(pauses)


def test_the_budget_is_spent_once_and_the_error_names_what_and_why_and_the_key(
    clock: Clock,
) -> None:
    wait, began = Patience(60.0).begin("reading"), clock.now
    with pytest.raises(BrokerError) as caught:
        for _ in tries(wait, clock):
            pass
    assert 60.0 < clock.now - began <= 60.0 + PAUSE_S[1]
    for words in ("reading", WHY, "connection refused", "redis.patience_s", "waited 6"):
        assert words in str(caught.value)


def test_the_budget_begins_with_the_first_failure_and_not_with_the_call(clock: Clock) -> None:
    wait = Patience(5.0).begin("reading")
    clock.now += 100.0  # a read that blocked on an idle stream
    assert wait.again(WHY, LOST) == PAUSE_S[0]


def test_many_calls_in_one_outage_are_one_line_in_a_while_and_one_at_its_end(clock: Clock) -> None:
    shared = Patience(1000.0)
    with capture_logs() as logs:
        waits = [shared.begin(f"call {number}") for number in range(50)]
        end = clock.now + 3.5 * SAY_S
        while clock.now < end:
            for wait in waits:
                wait.again(WHY, LOST)
            clock.now += 0.5
        for wait in waits:
            wait.over()
    events = [row["event"] for row in logs]
    assert events == ["waiting for the server"] * 4 + ["the server is back"]
    assert len({row["since"] for row in logs[:4]}) <= 2  # one moment, to the second
    assert logs[3]["waited_s"] >= 3 * SAY_S


def test_another_reason_is_said_at_once(clock: Clock) -> None:
    wait = Patience(60.0).begin("writing")
    with capture_logs() as logs:
        wait.again(WHY, LOST)
        wait.again("its memory is full", LOST)
    assert [row["why"] for row in logs] == [WHY, "its memory is full"]


def test_a_call_that_comes_through_at_once_says_nothing(clock: Clock) -> None:
    with capture_logs() as logs:
        Patience(60.0).begin("reading").over()
    assert logs == []
