"""The messages of a weight round: what is said is what is heard."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MessageError
from common.rounds import Call, Go, Message, Publish, Reply, dumps, loads

words = st.text(max_size=10)
counts = st.integers(0, 10**6)
versions = st.builds("{}.{}".format, counts, counts)
messages: Any = st.one_of(
    st.builds(Call, words, versions),
    st.builds(
        Go, round=words, version=versions, prefix=words, fresh=st.booleans(), host=words,
        port=counts, backend=st.sampled_from(["gloo", "nccl"]), world=counts,
        ranks=st.dictionaries(words, counts, max_size=3),
        manifest=st.just([("a.weight", [2, 3])]), dtype=st.sampled_from(["float32", "bfloat16"]),
        bucket_bytes=counts, timeout_s=st.floats(0, 1e6), probe=st.lists(counts, max_size=3),
    ),
    st.builds(Publish, words, versions, st.lists(words, max_size=3)),
    st.builds(
        Reply, words, st.integers(1, 9), words, words, st.lists(st.floats(-100, 0), max_size=3)
    ),
)  # fmt: skip


@given(messages)
def test_a_message_reads_back_as_it_was_said(message: Message) -> None:
    assert loads(dumps(message)) == message
    assert loads(dumps(message).encode()) == message


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b"3", b"null", b"[]", b'["call"]', b'["call", []]', b'["call", {}]',
        b'["shout", {}]', b'[["call"], {}]',
        b'["call", {"round": "1", "version": "2.0", "more": 3}]',
        b'["call", {"round": "1", "version": "2"}]', b'["call", {"round": 1, "version": "2.0"}]',
        b'["publish", {"round": "1", "version": "2.0", "members": "ab"}]',
        b'["reply", {"status": "ready", "workers": 0}]', b'["reply", {"status": "a", "probe": 3}]',
        b'["call", {"round": "\\ud800", "version": "2.0"}]', b"[" * 100_000,
    ],
)  # fmt: skip
def test_anything_else_is_a_message_error(text: bytes) -> None:
    with pytest.raises(MessageError, match="no message of a weight round"):
        loads(text)


@given(st.binary(max_size=50))
def test_random_bytes_are_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        loads(data)
