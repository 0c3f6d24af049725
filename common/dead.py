"""The dead letters of a run, for whoever looks after it: list them, put them back.

A dead letter costs nothing that was promised: its group was failed with the reason in the same step
(see `Broker.bury`), is tried again by the learner under `admission.attempts`, and has its one fate
in the end. A letter that is put back is worked on only if its group still waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from common.address import address
from common.broker import STATE_BEFORE
from common.errors import BrokerError, ConfigError
from common.status import look_up, server_of

KEY = "dead"


@dataclass(frozen=True)
class DeadLetter:
    """An entry that no worker could work on. `waiting`: its group is still where it was."""

    run: str
    id: str
    stream: str
    group: str
    attempt: str
    reason: str
    octets: int
    age_s: float
    waiting: bool


class DeadLetters:
    """The letters of one run, or of every run on a server, through a connection of its own."""

    def __init__(self, client: Any, runs: list[str]) -> None:
        self.client, self.runs = client, runs

    @classmethod
    @contextmanager
    def at(cls, target: str) -> Iterator[DeadLetters]:
        """`target` is a run directory, or the redis:// address of a server: all its runs.

        Raises:
            ConfigError: it is neither.
            BrokerError: the server does not answer.
        """
        url, run = (target, "") if "://" in target else server_of(Path(target).resolve())
        try:
            with look_up(url, text=False) as client:
                yield cls(client, [run] if run else _runs(client))
        except RedisError as error:
            raise BrokerError(f"the server at {address(url)}: {error}") from None

    def read(self) -> list[DeadLetter]:
        """The letters, oldest first."""
        return [
            self._letter(run, id_.decode(), fields)
            for run in self.runs
            for id_, fields in self.client.xrange(_key(run, KEY))
        ]

    def _letter(self, run: str, id_: str, fields: dict[bytes, bytes]) -> DeadLetter:
        names = (b"stream", b"g", b"attempt", b"reason")
        stream, group, attempt, reason = (
            fields.get(name, b"").decode(errors="replace") for name in names
        )
        now = self.client.hmget(_key(run, "group", group), "state", "attempt")
        expected = [STATE_BEFORE.get(stream, "").encode(), attempt.encode()]
        age_s = time.time() - int(id_.partition("-")[0]) / 1000
        size = len(fields.get(b"r", b""))
        waiting = bool(attempt) and now == expected
        return DeadLetter(run, id_, stream, group, attempt, reason, size, round(age_s, 1), waiting)

    def requeue(self, ids: Sequence[str]) -> int:
        """Put letters back on their streams; returns how many.

        Raises:
            ConfigError: there is no letter of that id, or its record was too long to be kept.
        """
        known = {letter.id: letter for letter in self.read()}
        script = (resources.files("common") / "scripts" / "requeue.lua").read_text()
        for id_ in ids:
            if id_ not in known:
                raise ConfigError(f"no dead letter has the id {id_!r}; `dapo dead … list` has them")
            letter = known[id_]
            keys = [_key(letter.run, KEY), _key(letter.run, letter.stream)]
            if int(self.client.eval(script, 2, *keys, id_)) < 0:
                raise ConfigError(
                    f"the record of {id_} was too long to be kept: it cannot be put back"
                )
        return len(ids)


def as_text(letters: list[DeadLetter]) -> str:
    """A line for each letter, and what to make of them."""
    if not letters:
        return "no dead letters"
    lines = [
        f"{item.id}  {item.run} {item.stream:<9}group {item.group or '?'}"
        f" attempt {item.attempt or '?'}, {item.octets:,} bytes, {item.age_s:,.0f} s ago"
        f"{', still waiting' * item.waiting}: {item.reason}"
        for item in letters
    ]
    waiting = sum(item.waiting for item in letters)
    lines.append(
        f"{len(letters)} dead letters; {waiting} of their groups still wait, the others were "
        "tried again or have their fate"
    )
    return "\n".join(lines)


def as_dicts(letters: list[DeadLetter]) -> list[dict[str, Any]]:
    return [asdict(letter) for letter in letters]


def _runs(client: Any) -> list[str]:
    """Runs with dead letters on a server, by the names of their keys."""
    names = (key.decode() for key in client.scan_iter(match=f"{{*}}:{KEY}", count=1000))
    return sorted(name[1:].removesuffix(f"}}:{KEY}") for name in names)


def _key(run: str, *parts: str) -> str:
    return f"{{{run}}}:" + ":".join(parts)
