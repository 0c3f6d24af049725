"""The records on the wire and their msgpack codec.

Every record is one msgpack array `[SCHEMA, kind, fields…]`. Arrays travel as raw
little-endian bytes, so that reading one is a view and not a loop. Whatever is wrong with
the bytes, the reader gets one typed error, `MessageError`, and never an object half filled.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import msgpack
import numpy as np
import numpy.typing as npt

from common.errors import MessageError

SCHEMA = 1
MAX_BYTES = 64 * 2**20
MAX_SAMPLES = 2**16
"""Samples of one group: more are no group but an attack."""
DEAD_LETTER = "dead letter: "
"""How the failure of a group begins whose entry became one."""
DEADLY = "deadly: "
"""How a dead letter's reason begins if every worker that had the entry died of it, or by chance."""


def is_deadly(failure: str) -> bool:
    """Whether a group failed because its workers died: another attempt would kill some more."""
    return failure.startswith(DEAD_LETTER + DEADLY)


class Version(NamedTuple):
    """A policy version: the learner's incarnation and the number of batches trained."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.number}"

    @staticmethod
    def parse(text: str) -> Version:
        """Inverse of `str`.

        Raises:
            MessageError: the text is not of the form `incarnation.number`.
        """
        try:
            incarnation, number = text.split(".")
            return Version(int(incarnation), int(number))
        except ValueError:
            raise MessageError(f"{text!r} is no policy version (incarnation.number)") from None


class Span(NamedTuple):
    """Tokens [start, end) of a response were sampled by the policy (incarnation, number)."""

    incarnation: int
    number: int
    start: int
    end: int


def ordinal_of(group: str) -> int:
    """The ordinal of the group of that name: problems of an evaluation are counted down from -1.

    Raises:
        MessageError: no group has such a name.
    """
    label, _, index = group.rpartition("-")
    problem = label.startswith("e")
    number = index if problem else group
    if not (number.isascii() and number.isdigit() and len(number) < 19):
        raise MessageError(f"no group is named {reprlib.repr(group)}")
    return -1 - int(number) if problem else int(number)


def _require_place(record: Prompt | Rollout | Verdict, evaluation: bool) -> None:
    """One that says two things about its place would be taken for another group."""
    if record.ordinal != ordinal_of(record.group) or evaluation != (record.ordinal < 0):
        raise MessageError(
            f"{record.KIND}: group {record.group}, ordinal {record.ordinal} and evaluation "
            f"{evaluation} do not fit"
        )
    if record.attempt < 0:
        raise MessageError(f"{record.KIND}: attempt {record.attempt} is below 0")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Learner to generator: generate `samples` responses to one prompt.

    `group` is the key of the group: the ordinal in training, `e<round>-<index>` in evaluation.
    `least` is the least policy version that the prompt may be started with.
    """

    KIND: ClassVar[str] = "prompt"

    group: str
    ordinal: int
    attempt: int
    evaluation: bool
    row: int
    samples: int
    least: Version
    token_ids: npt.NDArray[np.int32]
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    gold: str
    checker: str
    boxed: bool
    text: str

    def __post_init__(self) -> None:
        _require_place(self, self.evaluation)
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise MessageError(f"prompt: {self.samples} samples, not 1 to {MAX_SAMPLES}")
        if self.max_tokens < 1:
            raise MessageError(f"prompt: max_tokens is {self.max_tokens}")
        if not (0 <= self.temperature < math.inf and 0 < self.top_p <= 1):
            raise MessageError(f"prompt: temperature {self.temperature}, top_p {self.top_p}")
        _require_tokens(self.KIND, self.token_ids)


@dataclass(frozen=True, slots=True)
class Sample:
    """One response, written once under its own key (group, attempt, index).

    `logprobs[t]` is the log-probability of `token_ids[t]` under the distribution that it was
    sampled from, temperature included. Spans cover the tokens without gap or overlap.
    """

    KIND: ClassVar[str] = "sample"

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: list[Span]
    finish_reason: Literal["stop", "length"]
    text: str
    generator: str
    seconds: float

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.logprobs) != length:
            raise MessageError(f"sample: {len(self.logprobs)} log-probs for {length} tokens")
        end = 0
        for span in self.spans:
            if span.start != end or span.end <= span.start:
                raise MessageError(f"sample: version spans {self.spans} leave a gap or overlap")
            end = span.end
        if end != length:
            raise MessageError(f"sample: version spans cover {end} of {length} tokens")
        _require_tokens(self.KIND, self.token_ids)


def _require_tokens(kind: str, token_ids: npt.NDArray[np.int32]) -> None:
    if token_ids.size and token_ids.min() < 0:
        raise MessageError(f"{kind}: token {token_ids.min()} is below 0")


@dataclass(frozen=True, slots=True)
class Rollout:
    """Generator to verifier: the payloads of this group are complete; or why they never will be."""

    KIND: ClassVar[str] = "rollout"

    group: str
    ordinal: int
    attempt: int
    generator: str
    failure: str

    def __post_init__(self) -> None:
        _require_place(self, self.ordinal < 0)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on one sample, inside a `Verdict`.

    `answer` is what was extracted in the checker's canonical spelling, so that equal answers can
    be counted; empty if there is none, or in a record of before the field existed.
    """

    KIND: ClassVar[str] = "judged"

    outcome: Literal["correct", "wrong", "no_answer", "error"]
    extracted: str
    reason: str
    reward: float
    penalty: float
    length: int
    truncated: bool
    oldest: Version
    newest: Version
    generator: str
    answer: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reward) and math.isfinite(self.penalty) and self.length >= 0):
            raise MessageError(
                f"judged: reward {self.reward}, penalty {self.penalty}, length {self.length}"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verifier to learner: fate `accepted`, `filtered` or `failed`, with the reason."""

    KIND: ClassVar[str] = "verdict"

    group: str
    ordinal: int
    attempt: int
    evaluation: bool
    fate: Literal["accepted", "filtered", "failed"]
    reason: str
    samples: list[Judged]
    verifier: str

    def __post_init__(self) -> None:
        _require_place(self, self.evaluation)


Record = TypeVar("Record", Prompt, Sample, Rollout, Judged, Verdict)

_NESTED: dict[str, Any] = {"Version": Version, "Span": Span}


def encode(record: Prompt | Sample | Rollout | Judged | Verdict) -> bytes:
    """The bytes of a record."""
    packed: bytes = msgpack.packb(_plain(record), use_bin_type=True)
    return packed


def _plain(record: Any) -> list[Any]:
    values: list[Any] = [SCHEMA, record.KIND]
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            value = np.ascontiguousarray(value, dtype=_dtype(str(field.type))).data
        elif field.type == "list[Judged]":
            value = [_plain(item) for item in value]
        values.append(value)
    return values


def decode(kind: type[Record], data: bytes, max_bytes: int = MAX_BYTES) -> Record:
    """Read a record of the kind expected.

    Raises:
        MessageError: too large, no msgpack, another schema or kind, a field missing or of the
            wrong type.
    """
    if len(data) > max_bytes:
        raise MessageError(
            f"a {kind.KIND} of {len(data)} bytes is above redis.max_message_mib ({max_bytes} bytes)"
        )
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises a dozen types, some of them bare ValueErrors
        raise MessageError(f"no msgpack: {type(error).__name__}: {error}") from None
    return _build(kind, values)


def _build(kind: type[Record], values: Any) -> Record:
    fields = dataclasses.fields(kind)
    if not isinstance(values, list) or len(values) < 2:
        raise MessageError(f"expected a {kind.KIND} record, got a {type(values).__name__}")
    if values[0] != SCHEMA:
        raise MessageError(
            f"record of schema {reprlib.repr(values[0])}, this process speaks {SCHEMA}; "
            "run the same version of every role"
        )
    if values[1] != kind.KIND:
        raise MessageError(f"expected a {kind.KIND}, got a {reprlib.repr(values[1])}")
    # a field with a default was added later: batch files of before may lack it
    least = sum(field.default is dataclasses.MISSING for field in fields)
    if not least <= len(values) - 2 <= len(fields):
        raise MessageError(f"a {kind.KIND} has {len(fields)} fields, not {len(values) - 2}")
    read = [_read(kind, f.name, str(f.type), v) for f, v in zip(fields, values[2:], strict=False)]
    return kind(*read)


def _read(kind: type[Any], name: str, type_: str, value: Any) -> Any:
    """One field, checked against its annotation."""
    try:
        return _reader(type_)(value)
    except (TypeError, ValueError, AssertionError) as error:
        raise MessageError(f"{kind.KIND}.{name}: {error or 'wrong type'}") from None


@cache
def _reader(type_: str) -> Any:
    """A function that checks and converts a value for an annotation."""
    if type_.startswith("npt.NDArray"):
        dtype = _dtype(type_)
        return lambda value: np.frombuffer(_exact(value, bytes), dtype=dtype)
    if type_.startswith("Literal["):
        options = {part.strip().strip("\"'") for part in type_[8:-1].split(",")}
        return lambda value: _one_of(value, options)
    if type_ == "list[Judged]":
        return lambda value: [_build(Judged, item) for item in _exact(value, list)]
    if type_ == "list[Span]":
        return lambda value: [_tuple(Span, item) for item in _exact(value, list)]
    if type_ in _NESTED:
        return lambda value: _tuple(_NESTED[type_], value)
    if type_ == "float":
        return lambda value: float(_exact(value, (int, float)))
    exact: Any = {"int": int, "str": str, "bool": bool}[type_]
    return lambda value: _exact(value, exact)


def _exact(value: Any, type_: Any) -> Any:
    wanted = type_ if isinstance(type_, tuple) else (type_,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise TypeError(f"expected {wanted[-1].__name__}, got {type(value).__name__}")
    return value


def _one_of(value: Any, options: set[str]) -> str:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{reprlib.repr(value)} is none of {', '.join(sorted(options))}")
    return value


def _tuple(kind: Any, value: Any) -> Any:
    numbers = [_exact(item, int) for item in _exact(value, list)]
    if len(numbers) != len(kind._fields) or min(numbers) < 0:
        raise ValueError(f"expected {len(kind._fields)} integers from 0 on")
    return kind(*numbers)


def _dtype(annotation: str) -> str:
    return "<i4" if "int32" in annotation else "<f4"
