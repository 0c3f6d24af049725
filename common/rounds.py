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
import reprlib
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import MessageError
from common.messages import Version


def _is_version(text: str) -> str:
    try:
        Version.parse(text)
    except MessageError as error:
        raise ValueError(str(error)) from None
    return text


VersionText = Annotated[str, AfterValidator(_is_version)]
Count = Annotated[int, Field(ge=0)]
_STRICT: Any = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Call:
    OP: ClassVar[str] = "call"
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    round: str
    version: VersionText


@dataclass(frozen=True, slots=True)
class Go:
    """`ranks` gives each member the rank of its first worker; rank 0 is the learner."""

    OP: ClassVar[str] = "go"
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    round: str
    version: VersionText
    prefix: str
    fresh: bool
    host: str
    port: Count
    backend: Literal["gloo", "nccl"]
    world: Count
    ranks: dict[str, Count]
    manifest: list[tuple[str, list[Count]]]
    dtype: Literal["float32", "bfloat16"]
    bucket_bytes: Count
    timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    probe: list[Count]


@dataclass(frozen=True, slots=True)
class Publish:
    OP: ClassVar[str] = "publish"
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    round: str
    version: VersionText
    members: list[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A member's answer; the later one replaces the earlier."""

    OP: ClassVar[str] = "reply"
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    status: str
    workers: Annotated[int, Field(ge=1)] = 1
    device: str = "cpu"
    error: str = ""
    probe: list[float] = field(default_factory=list)


Message = Call | Go | Publish | Reply


_OF_PEERS = ("weight broadcast failed", "did not form", "abandoned")


def is_peers_fault(error: str) -> bool:
    """Whether a member failed only because the round did: in the words of `common.transport`."""
    return any(words in error for words in _OF_PEERS)


def dumps(message: Message) -> str:
    return json.dumps([message.OP, asdict(message)])


def loads(data: bytes | str) -> Message:
    """Inverse of `dumps`.

    Raises:
        MessageError: the text is no such message, or a field is of the wrong type.
    """
    try:
        op, fields = json.loads(data)
        message: Message = _readers()[op].validate_json(json.dumps(fields))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise MessageError(f"no message of a weight round: {op}.{where}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MessageError(f"no message of a weight round: {reprlib.repr(error)}") from None
    return message


@cache
def _readers() -> dict[str, TypeAdapter[Any]]:
    return {kind.OP: TypeAdapter(kind) for kind in (Call, Go, Publish, Reply)}
