"""The waiting room in front of an engine's places."""

from __future__ import annotations

import asyncio

import pytest

from generator.gate import Gate


class Guests:
    """Tasks that go through a gate and note in which order."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.inside: list[int] = []
        self.leave = {n: asyncio.Event() for n in range(10)}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, *numbers: int) -> None:
        for number in numbers:
            self.tasks[number] = asyncio.create_task(self._visit(number))
        await settle()

    async def _visit(self, number: int) -> None:
        async with self.gate.place():
            self.inside.append(number)
            try:
                await self.leave[number].wait()
            finally:
                self.inside.remove(number)

    async def go(self, number: int) -> None:
        self.leave[number].set()
        await settle()

    async def end(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_no_more_are_inside_than_there_are_places_and_the_first_come_goes_first() -> None:
    guests = Guests(Gate(2))
    await guests.come(0, 1, 2, 3, 4)
    assert guests.inside == [0, 1]
    await guests.go(0)
    assert guests.inside == [1, 2]
    await guests.go(2)
    assert guests.inside == [1, 3]
    await guests.end()


async def test_a_shut_gate_lets_nobody_in_and_everybody_out() -> None:
    gate = Gate(2)
    guests = Guests(gate)
    await guests.come(0)
    gate.shut()
    await guests.come(1, 2)
    await guests.go(0)
    assert guests.inside == []
    gate.open()
    await settle()
    assert guests.inside == [1, 2]
    await guests.end()


async def test_who_waits_is_turned_away_with_an_error_and_who_is_inside_stays() -> None:
    gate = Gate(1)
    guests = Guests(gate)
    await guests.come(0, 1, 2)
    gate.turn_away(RuntimeError("not today"))
    await settle()
    for number in (1, 2):
        with pytest.raises(RuntimeError, match="not today"):
            guests.tasks[number].result()
    assert guests.inside == [0]
    await guests.come(3)
    await guests.go(0)
    assert guests.inside == [3]
    await guests.end()


async def test_a_place_is_not_lost_with_one_who_is_cancelled_when_called() -> None:
    guests = Guests(Gate(1))
    await guests.come(0, 1, 2)
    guests.leave[0].set()
    while not guests.tasks[0].done():
        await asyncio.sleep(0)
    guests.tasks[1].cancel()  # it has been called and has not come in
    await settle()
    assert guests.inside == [2]
    await guests.end()


async def test_a_gate_shut_after_the_call_keeps_the_called_waiting() -> None:
    gate = Gate(1)
    guests = Guests(gate)
    gate.shut()
    await guests.come(0)
    gate.open()
    gate.shut()
    await settle()
    assert guests.inside == []
    gate.open()
    await settle()
    assert guests.inside == [0]
    await guests.end()
