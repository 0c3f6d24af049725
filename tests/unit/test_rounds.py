"""The messages of a weight round: what is said is what is heard."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import MessageError
from common.rounds import Call, Go, Message, Publish, Reply, dumps, loads

words = st.text(max_size=10)
counts = st.integers(0, 10**6)
messages: Any = st.one_of(
    st.builds(Call, words, words),
    st.builds(
        Go, round=words, version=words, prefix=words, fresh=st.booleans(), host=words, port=counts,
        backend=words, world=counts, ranks=st.dictionaries(words, counts, max_size=3),
        manifest=st.just([["a.weight", [2, 3]]]), dtype=words, bucket_bytes=counts,
        timeout_s=st.floats(0, 1e6), probe=st.lists(counts, max_size=3),
    ),
    st.builds(Publish, words, words, st.lists(words, max_size=3)),
    st.builds(
        Reply, words, counts, words, words, st.lists(st.floats(-100, 0), max_size=3)
    ),
)  # fmt: skip


@settings(deadline=None)
@given(messages)
def test_a_message_reads_back_as_it_was_said(message: Message) -> None:
    assert loads(dumps(message)) == message
    assert loads(dumps(message).encode()) == message


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"\xff", b"3", b"null", b"[]", b'["call"]', b'["call", []]', b'["call", {}]',
        b'["shout", {}]', b'["call", {"round": "1", "version": "2", "more": 3}]', b'[["call"], {}]',
    ],
)  # fmt: skip
def test_anything_else_is_a_message_error(text: bytes) -> None:
    with pytest.raises(MessageError, match="no message of a weight round"):
        loads(text)


@settings(deadline=None)
@given(st.binary(max_size=50))
def test_random_bytes_are_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        loads(data)
