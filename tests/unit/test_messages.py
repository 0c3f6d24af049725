"""The codec of the wire: what goes in comes out, and bad bytes are one typed error."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import MessageError
from common.messages import (
    SCHEMA,
    Judged,
    Prompt,
    Rollout,
    Sample,
    Span,
    Verdict,
    Version,
    decode,
    encode,
    ordinal_of,
)
from tests.unit import records
from tests.unit.records import a_judgement, a_prompt, a_sample, a_verdict

KINDS: tuple[Any, ...] = (Prompt, Sample, Rollout, Judged, Verdict)
EXAMPLES: list[bytes] = [
    encode(a_prompt()),
    encode(a_sample(40)),
    encode(Rollout("3", 3, 0, "g", "")),
    encode(a_verdict()),
]


def same(left: Any, right: Any) -> bool:
    """Equality field by field: arrays by content and type, NaN equal to itself."""
    for field in dataclasses.fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            if one.dtype != other.dtype or not np.array_equal(
                one, other, equal_nan=one.dtype.kind == "f"
            ):
                return False
        elif one != other:
            return False
    return True


def read_all(data: bytes) -> int:
    """Try every kind; only a MessageError may come out. Returns how many kinds it was."""
    read = 0
    for kind in KINDS:
        try:
            decode(kind, data)
            read += 1
        except MessageError as error:
            assert len(str(error)) < 2000
    return read


@settings(max_examples=100)
@given(records.records)
def test_a_record_comes_back_as_it_was_sent(record: Any) -> None:
    assert same(decode(type(record), encode(record)), record)


@settings(max_examples=50)
@given(records.records)
def test_a_record_is_read_as_its_own_kind_only(record: Any) -> None:
    assert read_all(encode(record)) == 1


def test_arrays_are_little_endian_views_of_the_bytes_whatever_their_order_was() -> None:
    tokens = np.arange(2000, dtype=">i8")[::2]
    record = dataclasses.replace(a_prompt(), token_ids=tokens)
    read = decode(Prompt, encode(record)).token_ids
    assert read.dtype == np.dtype("<i4")
    assert not read.flags.owndata
    assert not read.flags.writeable
    assert read.tolist() == tokens.tolist()
    assert np.array([1], dtype="<i4").tobytes() in encode(record)


def test_empty_arrays_and_an_empty_response_come_through() -> None:
    assert len(decode(Sample, encode(a_sample(0))).token_ids) == 0


# --- bad bytes ----------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_error(data: bytes) -> None:
    assert read_all(data) == 0


def test_thousands_of_random_byte_strings_with_a_plausible_head_are_a_message_error() -> None:
    noise = random.Random(1)
    heads = [data[:20] for data in EXAMPLES] + [b"\x92\x01", b"\xdd\xff\xff\xff\xff", b"\xc1"]
    for _ in range(2500):
        read_all(noise.choice(heads) + noise.randbytes(noise.randrange(40)))


@pytest.mark.parametrize(
    "data", EXAMPLES, ids=[kind.KIND for kind in (Prompt, Sample, Rollout, Verdict)]
)
def test_every_truncation_is_a_message_error(data: bytes) -> None:
    for end in range(len(data)):
        assert read_all(data[:end]) == 0
    assert read_all(data + b"\x00") == 0


@pytest.mark.parametrize(
    "data", EXAMPLES, ids=[kind.KIND for kind in (Prompt, Sample, Rollout, Verdict)]
)
def test_flipped_bits_give_another_record_or_a_message_error(data: bytes) -> None:
    noise = random.Random(2)
    for _ in range(1000):
        broken = bytearray(data)
        for _ in range(noise.randrange(1, 4)):
            broken[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        read_all(bytes(broken))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150)
@given(st.sampled_from(EXAMPLES), st.integers(0, 20), values)
def test_a_field_of_another_type_is_a_message_error_or_a_valid_record(
    data: bytes, place: int, value: Any
) -> None:
    fields = msgpack.unpackb(data)
    fields[place % len(fields)] = value
    read_all(msgpack.packb(fields))


@pytest.mark.parametrize("depth", [400, 1000, 100_000])
def test_deeply_nested_bytes_are_a_message_error(depth: int) -> None:
    nested = b"\x91" * depth + b"\x00"
    assert read_all(nested) == 0
    assert read_all(b"\x92" + nested + b"\x00") == 0
    assert read_all(b"\x92\x01" + nested) == 0


def test_another_schema_says_that_the_roles_are_of_different_versions() -> None:
    fields = msgpack.unpackb(EXAMPLES[0])
    fields[0] = SCHEMA + 1
    with pytest.raises(MessageError, match=r"schema 2, this process speaks 1.*every role"):
        decode(Prompt, msgpack.packb(fields))


def test_a_wrong_kind_and_a_wrong_field_are_named() -> None:
    with pytest.raises(MessageError, match="expected a prompt, got a 'sample'"):
        decode(Prompt, encode(a_sample()))
    fields = msgpack.unpackb(EXAMPLES[0])
    with pytest.raises(MessageError, match="a prompt has 16 fields, not 15"):
        decode(Prompt, msgpack.packb(fields[:-1]))
    fields[3] = "three"
    with pytest.raises(MessageError, match=r"prompt\.ordinal: expected int, got str"):
        decode(Prompt, msgpack.packb(fields))
    fields[3] = True
    with pytest.raises(MessageError, match=r"prompt\.ordinal: expected int, got bool"):
        decode(Prompt, msgpack.packb(fields))


def test_a_verdict_of_before_samples_had_an_answer_is_read_with_an_empty_one() -> None:
    fields = msgpack.unpackb(encode(a_verdict()))
    judged = next(field for field in fields if isinstance(field, list) and field)
    before = [item[:-1] for item in judged]
    fields[fields.index(judged)] = before
    read = decode(Verdict, msgpack.packb(fields))
    assert same(read, a_verdict())
    assert {item.answer for item in read.samples} == {""}
    before[0].pop()
    with pytest.raises(MessageError, match="a judged has 11 fields, not 9"):
        decode(Verdict, msgpack.packb(fields))


def test_a_record_above_the_limit_is_refused_before_it_is_read() -> None:
    data = encode(a_prompt())
    assert same(decode(Prompt, data, max_bytes=len(data)), a_prompt())
    with pytest.raises(MessageError, match=r"redis\.max_message_mib"):
        decode(Prompt, data, max_bytes=len(data) - 1)


# --- samples and versions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(1, 0, 0, 2)],
        [Span(1, 0, 0, 4)],
        [Span(1, 0, 1, 3)],
        [Span(1, 0, 0, 1), Span(1, 1, 2, 3)],
        [Span(1, 0, 0, 2), Span(1, 1, 1, 3)],
        [Span(1, 0, 0, 3), Span(1, 1, 3, 3)],
        [Span(1, 1, 2, 3), Span(1, 0, 0, 2)],
    ],
)
def test_version_spans_with_a_gap_or_an_overlap_are_refused(spans: list[Span]) -> None:
    with pytest.raises(MessageError, match="version spans"):
        dataclasses.replace(a_sample(3), spans=spans)
    fields = msgpack.unpackb(encode(a_sample(3)))
    fields[4] = [list(span) for span in spans]
    with pytest.raises(MessageError, match="version spans"):
        decode(Sample, msgpack.packb(fields))


def test_log_probs_must_be_as_many_as_tokens() -> None:
    with pytest.raises(MessageError, match="2 log-probs for 3 tokens"):
        dataclasses.replace(a_sample(3), logprobs=np.zeros(2, dtype=np.float32))


@given(records.versions)
def test_a_version_reads_back_from_its_text(version: Version) -> None:
    assert Version.parse(str(version)) == version


@pytest.mark.parametrize("text", ["", "1", "1.2.3", "a.b", "1.", ".", "None"])
def test_a_text_that_is_no_version_is_a_message_error(text: str) -> None:
    with pytest.raises(MessageError, match="no policy version"):
        Version.parse(text)


def test_versions_order_by_incarnation_first() -> None:
    assert Version(1, 9) < Version(2, 0) < Version(2, 1)


# --- what no record of a run says ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "ordinal"),
    [("0", 0), ("12", 12), ("e-0", -1), ("ebefore-4", -5), ("ea-b-c-12", -13), (str(2**59), 2**59)],
)
def test_the_name_of_a_group_tells_its_ordinal(group: str, ordinal: int) -> None:
    assert ordinal_of(group) == ordinal


@pytest.mark.parametrize(
    "group", ["", "e", "e-", "-1", "x-1", "1.5", "e1", "ebefore", "²", "٣", " 1", "1_0", "9" * 5000]
)
def test_any_other_name_is_a_message_error(group: str) -> None:
    with pytest.raises(MessageError, match="no group is named"):
        ordinal_of(group)


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "4"}, {"ordinal": 4}, {"ordinal": -4}, {"evaluation": True}, {"attempt": -1},
        {"group": "e-3", "ordinal": 3}, {"group": "e-3", "ordinal": -4},
        {"samples": 0}, {"samples": -1}, {"samples": 2**20}, {"max_tokens": 0},
        {"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf},
        {"top_p": 0.0}, {"top_p": 1.5}, {"token_ids": np.array([1, -1], dtype=np.int32)},
    ],
)  # fmt: skip
def test_a_prompt_that_nobody_can_generate_for_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        dataclasses.replace(a_prompt(3), **changes)


@pytest.mark.parametrize(
    "changes",
    [{"reward": math.nan}, {"reward": math.inf}, {"penalty": -math.inf}, {"length": -1}],
)
def test_a_judgement_that_would_spoil_a_batch_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="judged"):
        dataclasses.replace(a_judgement(), **changes)


def test_tokens_and_versions_below_zero_are_refused() -> None:
    with pytest.raises(MessageError, match="token -5 is below 0"):
        dataclasses.replace(a_sample(2), token_ids=np.array([1, -5], dtype=np.int32))
    fields = msgpack.unpackb(encode(a_prompt()))
    fields[2 + 6] = [-1, 0]
    with pytest.raises(MessageError, match="prompt.least: expected 2 integers from 0 on"):
        decode(Prompt, msgpack.packb(fields))
