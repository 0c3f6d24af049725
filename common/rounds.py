"""What learner and generators say to each other in a weight round.

The learner speaks on the control stream, members answer in a hash of the round. The order:

    learner:  call    round, version                        who is there?
    member:   ready   number of workers
    learner:  go      members with their ranks, manifest    pause and take the weights
    member:   done    log-probs of the probe                or: failed, with the reason
    learner:  publish members that hold the version         claim and hand over from now on

A member that `go` or `publish` does not name holds old or doubtful weights: it gives its claims
back and is served in a later round.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from common.errors import MessageError


@dataclass(frozen=True, slots=True)
class Call:
    OP: ClassVar[str] = "call"
    round: str
    version: str


@dataclass(frozen=True, slots=True)
class Go:
    """`ranks` gives each member the rank of its first worker; rank 0 is the learner."""

    OP: ClassVar[str] = "go"
    round: str
    version: str
    prefix: str
    fresh: bool
    host: str
    port: int
    backend: str
    world: int
    ranks: dict[str, int]
    manifest: list[tuple[str, list[int]]]
    dtype: str
    bucket_bytes: int
    timeout_s: float
    probe: list[int]


@dataclass(frozen=True, slots=True)
class Publish:
    OP: ClassVar[str] = "publish"
    round: str
    version: str
    members: list[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A member's answer; the later one replaces the earlier."""

    OP: ClassVar[str] = "reply"
    status: str
    workers: int = 1
    device: str = "cpu"
    error: str = ""
    probe: list[float] = field(default_factory=list)


Message = Call | Go | Publish | Reply


def dumps(message: Message) -> str:
    return json.dumps([message.OP, asdict(message)])


def loads(data: bytes | str) -> Message:
    """Inverse of `dumps`.

    Raises:
        MessageError: the text is no such message.
    """
    kinds: dict[str, Any] = {kind.OP: kind for kind in (Call, Go, Publish, Reply)}
    try:
        op, fields = json.loads(data)
        message: Message = kinds[op](**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"no message of a weight round: {error!r}") from None
    return message
