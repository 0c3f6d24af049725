"""The watchdog of a run that makes no progress names the stage that nothing comes from."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from learner import pulse as pulse_module
from learner import stall as stall_module
from learner.background import Background
from learner.conductor import Turn
from learner.pulse import Pulse
from learner.stall import StallWatch

ALL = {"generator": 2, "verifier": 1, "learner": 1}


def watch(
    members: dict[str, int] = ALL, quiet: tuple[int, ...] = (), turn: str = "wait",
    waiting_for: str = "", silent_s: float = 400.0,
) -> StallWatch:  # fmt: skip
    dispatcher: Any = SimpleNamespace(
        members=Counter(members), generators=members.get("generator", 0),
        waiting_for=lambda: waiting_for,
    )  # fmt: skip
    progress: Any = SimpleNamespace(since_s=lambda: silent_s, stall_limit=lambda: 0.01)
    pulse: Any = SimpleNamespace(quiet=lambda: list(quiet))
    made = StallWatch(progress, dispatcher, pulse)
    made.turn = Turn(turn, 7)
    return made


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"members": {"verifier": 1}}, "a generator: none holds a lease"),
        ({"members": {"generator": 1}}, "a verifier: none holds a lease"),
        ({"quiet": (1, 3)}, "rank 1, 3 of the learner: no sign of life"),
        ({"turn": "train"}, "the end of `train`, at version 7"),
        ({"waiting_for": "starved: 2 of 16"}, "starved: 2 of 16"),
        ({}, "an evaluation"),
    ],
)
def test_the_dead_or_starved_stage_is_named(case: dict[str, Any], words: str) -> None:
    assert watch(**case).waiting_for() == words


async def test_it_says_so_again_and_again_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_module, "WATCH_S", 0.01)
    with capture_logs() as logs:
        task = asyncio.create_task(watch({"verifier": 1}).run())
        while len(logs) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
    assert {line["waiting_for"] for line in logs} == {"a generator: none holds a lease"}
    assert {line["since_s"] for line in logs} == {400} and all(line["since"] for line in logs)


async def test_it_is_silent_while_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_module, "WATCH_S", 0.001)
    with capture_logs() as logs:
        task = asyncio.create_task(watch(silent_s=0.0).run())
        for _ in range(50):
            await asyncio.sleep(0.001)
        task.cancel()
    assert logs == []


class Store(dict[str, bytes]):
    """As torch's store, in a dictionary."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


async def test_a_rank_that_gives_no_sign_of_life_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse_module, "BEAT_S", 0.005)
    monkeypatch.setattr(pulse_module, "QUIET_S", 1.0)
    store = Store()
    listening = Pulse(store, 0, 3)
    Pulse(store, 1, 3)  # rank 2 never beats
    async with asyncio.timeout(60):
        while listening.quiet() != [2]:
            await asyncio.sleep(0.01)
    assert Pulse(store, 0, 1).quiet() == []


def test_a_call_into_the_loop_that_does_not_come_back_is_an_error_that_names_it() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    background = Background()
    with pytest.raises(TimeoutError, match="never did not end within 0.05 s"):
        background.call(never(), 0.05)
    background.stop(asyncio.sleep(0))
