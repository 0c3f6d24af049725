"""What nobody of a run sends: records that are broken in every way that we could think of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack

from common.errors import MessageError
from common.messages import SCHEMA, Prompt, Rollout, Sample, Verdict, decode, encode
from common.rounds import Call, Go, Publish, Reply, dumps, loads
from tests.unit.records import a_prompt, a_sample, a_verdict

NAMES = [
    b"", b"-1", b"0", b"1", b"7", b"e", b"e-", b"e-1", b"efirst-0", b"ebefore-99", b"\xff\xfe",
    b"\xc2\xb2", b"*", b"{other}:x", b"../..", b"9" * 300, b"a" * 5000, b"'; FLUSHALL", b"\x00",
]  # fmt: skip
"""Names of groups, most of which no group has."""
ODD: list[Any] = [
    None, True, -1, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "x" * 300, "\x00",
    b"", b"\xff" * 7, [], [1], {}, {"a": 1}, [[[]]], msgpack.Timestamp(1), msgpack.ExtType(5, b"x"),
]  # fmt: skip


class Hostile:
    """A seeded source of hostile records; none is longer than twice `limit` bytes."""

    def __init__(self, seed: int, limit: int) -> None:
        self.dice, self.limit = random.Random(seed), limit

    def record(self, kind: type[Any]) -> bytes:
        """Bytes that are most likely no record of that kind."""
        broken: list[Callable[[list[Any]], bytes]] = [
            lambda values: self.dice.randbytes(self.dice.randrange(80)),
            lambda values: self._cut(msgpack.packb(values)),
            lambda values: self._flipped(msgpack.packb(values)),
            lambda values: msgpack.packb(self._one_odd(values)),
            lambda values: msgpack.packb([self.dice.choice(ODD), *values[1:]]),
            lambda values: msgpack.packb(self.dice.choice(ODD)),
            lambda values: msgpack.packb(self._fewer(values)),
            lambda values: msgpack.packb([*values, *self.dice.choices(ODD, k=3)]),
            lambda values: encode(self._example(self.dice.choice(KINDS))),
            lambda values: b"\x91" * self.dice.choice([10, 2000]),
            lambda values: msgpack.packb(values) + bytes(self.limit),
            lambda values: b"",
        ]
        values = msgpack.unpackb(encode(self._example(kind)), raw=False)
        assert values[0] == SCHEMA
        return self.dice.choice(broken)(values)

    def _example(self, kind: type[Any]) -> Any:
        if kind is Sample:
            return a_sample(self.dice.randrange(9))
        ordinal, attempt = self.dice.randrange(12), self.dice.randrange(3)
        problem = self.dice.random() < 0.2  # of an evaluation
        place: dict[str, Any] = {"group": f"ebefore-{ordinal}", "ordinal": -1 - ordinal}
        if kind is Rollout:
            record = Rollout(str(ordinal), ordinal, attempt, "g", "")
            return replace(record, **place) if problem else record
        record = a_prompt(ordinal, attempt) if kind is Prompt else a_verdict(ordinal, attempt)
        return replace(record, evaluation=True, **place) if problem else record

    def _cut(self, data: bytes) -> bytes:
        return data[: self.dice.randrange(len(data))]

    def _flipped(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(self.dice.randrange(1, 4)):
            flipped[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
        return bytes(flipped)

    def _one_odd(self, values: list[Any]) -> list[Any]:
        odd = list(values)
        odd[self.dice.randrange(2, len(odd))] = self.dice.choice(ODD)
        return odd

    def _fewer(self, values: list[Any]) -> list[Any]:
        gone = self.dice.randrange(len(values))
        return values[:gone] + values[gone + 1 :]

    def fields(self, kind: type[Any]) -> dict[bytes, bytes]:
        """An entry of a stream: a record, and fields that do not belong there."""
        fields: dict[bytes, bytes] = {}
        if self.dice.random() < 0.9:
            fields[b"r"] = self.record(kind)
        if self.dice.random() < 0.5:
            fields[b"g"] = self.dice.choice(NAMES)
        if not fields or self.dice.random() < 0.3:
            for _ in range(self.dice.choice([1, 3, 30])):
                name = self.dice.choice([b"reason", b"stream", b"attempt", b"", b"\xff\x00", b"R"])
                fields[name + self.dice.randbytes(self.dice.randrange(3))] = b"x"
        if self.dice.random() < 0.0005:
            fields |= {f"f{number}".encode(): b"" for number in range(9000)}
        return fields

    def said(self) -> bytes:
        """Something on the control stream that is no message, or one of a round that is not."""
        go = Go("x", "1.0", "p", True, "h", 1, "gloo", 2, {"g": 1}, [], "float32", 1, 1.0, [])
        message = self.dice.choice([Call("x", "1.0"), go, Publish("x", "1.0", []), Reply("ready")])
        if isinstance(message, Go | Publish) and self.dice.random() < 0.1:
            return dumps(message).encode()
        while True:
            data = self._unsaid(message)
            try:
                loads(data)
            except MessageError:
                return data

    def _unsaid(self, message: Any) -> bytes:
        op, fields = json.loads(dumps(message))
        if self.dice.random() < 0.4:
            data = json.dumps([op, fields]).encode()
            return self._cut(data) if self.dice.random() < 0.5 else self._flipped(data)
        odd = [None, True, -1, 1e400, "\ud800", "x", [], {}, [None], {"x": []}, "9" * 5000]
        key = self.dice.choice([*fields, "more"])
        fields = {**fields, key: self.dice.choice(odd)}
        return json.dumps([self.dice.choice([op, "shout", 3]), fields]).encode()


KINDS: list[type[Any]] = [Prompt, Rollout, Sample, Verdict]


def readable(kind: type[Any], data: bytes, limit: int) -> bool:
    """Whether it is a record of that kind after all."""
    try:
        decode(kind, data, limit)
    except MessageError:
        return False
    return True
