"""The transport of a weight round, between threads and between processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import transport
from common.errors import RoundError
from common.rounds import is_peers_fault
from common.transport import WeightGroup, digest, receive_buckets, send_buckets

HOST = "127.0.0.1"
CPU = torch.device("cpu")
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def store() -> Any:
    return transport.serve_store(HOST)


@pytest.fixture
def pair(store: Any, request: pytest.FixtureRequest) -> Iterator[tuple[WeightGroup, WeightGroup]]:
    """Rank 0 and rank 1 of a group."""
    groups = form(store, request.node.name, 2)
    yield groups[0], groups[1]
    for group in groups:
        group.close()


def form(store: Any, prefix: str, world: int) -> list[WeightGroup]:
    with ThreadPoolExecutor(world) as pool:
        joining = [pool.submit(join, store.port, prefix, rank, world) for rank in range(world)]
        return [group.result() for group in joining]


def join(port: int, prefix: str, rank: int, world: int) -> WeightGroup:
    store = transport.join_store(HOST, port, TIMEOUT_S)
    return WeightGroup.form("gloo", store, prefix, rank, world, TIMEOUT_S, HOST)


def in_background(call: Callable[[], Any]) -> Future[Any]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)


def buckets_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype) for size in sizes]


def receive(group: WeightGroup, buckets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Everything, for a plan that fits `buckets`."""
    plan = [flat.numel() * flat.element_size() for flat in buckets]
    return [octets for _, octets in receive_buckets(group, plan, CPU)]


@given(st.binary(min_size=2, max_size=64), st.data())
def test_a_digest_sees_every_changed_byte(content: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(content) - 1))
    change = data.draw(st.integers(1, 255))
    other = bytearray(content)
    other[at] ^= change
    assert digest(as_tensor(content)) != digest(as_tensor(bytes(other)))


@given(st.permutations(range(12)))
def test_a_digest_depends_on_the_order(order: list[int]) -> None:
    words = torch.arange(12, dtype=torch.int32)
    same = order == list(range(12))
    assert (digest(words[order]) == digest(words)) == same


def test_a_digest_depends_on_the_length_and_not_on_padding_alone() -> None:
    marks = [digest(torch.zeros(size, dtype=torch.uint8)) for size in range(20)]
    assert len(set(marks)) == len(marks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_digest_is_of_the_bytes_whatever_the_dtype(dtype: torch.dtype) -> None:
    octets = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    assert digest(octets.view(dtype)) == digest(octets)


def test_a_digest_of_a_slice_at_an_odd_offset_is_that_of_its_copy() -> None:
    octets = torch.randint(0, 256, (4099,), dtype=torch.uint8)
    for start in range(4):
        assert digest(octets[start:]) == digest(octets[start:].clone())


def test_a_digest_is_an_int64_and_spans_several_blocks() -> None:
    block = transport._BLOCK_WORDS
    words = torch.randint(-(2**31), 2**31, (2 * block + 12345,), dtype=torch.int32)
    mark = digest(words)
    assert 0 <= mark < 2**63
    swapped = words.clone()
    swapped[7], swapped[block + 7] = words[block + 7], words[7]  # same place in two blocks
    assert digest(swapped) != mark


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_arrive_as_they_were_sent(
    pair: tuple[WeightGroup, WeightGroup], dtype: torch.dtype
) -> None:
    buckets = buckets_of(1000, 1, 12345, dtype=dtype)
    sent = in_background(lambda: send_buckets(pair[0], buckets, lambda: True))
    for got, flat in zip(receive(pair[1], buckets), buckets, strict=True):
        assert torch.equal(got.view(dtype), flat)
    assert sent.result() == sum(flat.numel() * flat.element_size() for flat in buckets)


def test_a_group_of_three_receives_the_same(store: Any) -> None:
    groups = form(store, "three", 3)
    buckets = buckets_of(100, 200)
    receivers = [in_background(lambda g=g: receive(g, buckets)) for g in groups[1:]]
    send_buckets(groups[0], buckets, lambda: True)
    for receiver in receivers:
        assert all(map(torch.equal, receiver.result(), [b.view(torch.uint8) for b in buckets]))


def test_two_rounds_follow_each_other_in_one_group(pair: tuple[WeightGroup, WeightGroup]) -> None:
    for size in (100, 200):
        buckets = buckets_of(size)
        sent = in_background(lambda b=buckets: send_buckets(pair[0], b, lambda: True))
        assert torch.equal(receive(pair[1], buckets)[0], buckets[0].view(torch.uint8))
        sent.result()


def test_a_sender_that_is_told_to_stop_abandons_before_the_next_gather(
    pair: tuple[WeightGroup, WeightGroup],
) -> None:
    gathered = []

    def gather() -> Iterator[torch.Tensor]:
        for flat in buckets_of(10, 10, 10):
            gathered.append(flat)
            yield flat

    sent = in_background(lambda: send_buckets(pair[0], gather(), lambda: len(gathered) < 2))
    with pytest.raises(RoundError, match="abandoned by the learner before bucket 2"):
        receive(pair[1], buckets_of(10, 10, 10))
    with pytest.raises(RoundError, match="abandoned before bucket 2"):
        sent.result()
    assert len(gathered) == 2


def test_a_gather_that_fails_is_raised_here_and_an_abandoned_round_there(
    pair: tuple[WeightGroup, WeightGroup],
) -> None:
    def gather() -> Iterator[torch.Tensor]:
        yield from buckets_of(10)
        raise ArithmeticError("not finite")

    sent = in_background(lambda: send_buckets(pair[0], gather(), lambda: True))
    with pytest.raises(RoundError, match="abandoned"):
        receive(pair[1], buckets_of(10, 10))
    with pytest.raises(ArithmeticError):
        sent.result()


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ((10, 20, 30), "ended before bucket 2 of 3"),
        ((10,), "goes on with bucket 1"),
        ((10, 24), "bucket 1: 80 bytes sent, 96 in the manifest"),
    ],
    ids=["too few", "too many", "other size"],
)
def test_buckets_that_do_not_fit_the_manifest_are_refused(
    pair: tuple[WeightGroup, WeightGroup], expected: tuple[int, ...], message: str
) -> None:
    sent = in_background(lambda: send_buckets(pair[0], buckets_of(10, 20), lambda: True))
    with pytest.raises(RoundError, match=message):
        receive(pair[1], buckets_of(*expected))
    pair[1].close()
    sent.exception()  # the sender may or may not have noticed


def test_a_damaged_bucket_is_named(
    pair: tuple[WeightGroup, WeightGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaging:
        device = CPU

        def broadcast(self, tensor: torch.Tensor) -> None:
            if tensor.numel() == 80:
                tensor = tensor.clone()
                tensor[5] ^= 1
            pair[0].broadcast(tensor)

    lines: Any = Damaging()
    sent = in_background(lambda: send_buckets(lines, buckets_of(10, 20), lambda: True))
    with pytest.raises(RoundError, match="bucket 1 of 80 bytes arrived damaged"):
        receive(pair[1], buckets_of(10, 20))
    pair[1].close()
    sent.exception()


def test_a_group_that_somebody_does_not_join_fails_within_the_timeout(store: Any) -> None:
    started = time.monotonic()
    with pytest.raises(RoundError, match="group lonely of 2 did not form within 2 s"):
        join(store.port, "lonely", 0, 2)
    assert time.monotonic() - started < TIMEOUT_S + 1


def test_a_group_that_rank_0_gives_up_keeps_nobody_waiting(store: Any) -> None:
    """As when a member has died after it was called: the others are told, long before a timeout."""
    here = transport.dist.PrefixStore("given up", transport.join_store(HOST, store.port, 60.0))

    def member() -> WeightGroup:
        own = transport.join_store(HOST, store.port, 60.0)
        return WeightGroup.form("gloo", own, "given up", 1, 3, 60.0, HOST)

    def check() -> None:
        if here.check(["here/1"]):  # and nobody of rank 2 will ever come
            raise RoundError("the other one died")

    waiting = in_background(member)
    own = transport.join_store(HOST, store.port, 60.0)
    with pytest.raises(RoundError, match="the other one died"):
        WeightGroup.form("gloo", own, "given up", 0, 3, 60.0, HOST, check)
    with pytest.raises(RoundError, match="the learner has given it up") as caught:
        waiting.result(30)
    assert is_peers_fault(str(caught.value))


def test_a_silent_peer_is_an_error_within_the_timeout(
    pair: tuple[WeightGroup, WeightGroup],
) -> None:
    started = time.monotonic()
    with pytest.raises(RoundError, match="broadcast failed"):
        receive(pair[1], buckets_of(10))
    assert time.monotonic() - started < TIMEOUT_S + 1


def test_leaving_a_group_ends_the_wait_of_the_others(
    pair: tuple[WeightGroup, WeightGroup],
) -> None:
    waiting = in_background(lambda: receive(pair[1], buckets_of(10)))
    time.sleep(0.2)
    started = time.monotonic()
    pair[0].close()
    with pytest.raises(RoundError, match="broadcast failed"):
        waiting.result()
    assert time.monotonic() - started < TIMEOUT_S / 2
    with pytest.raises(RoundError, match="left the group"):
        pair[0].broadcast(torch.zeros(1))


def vanish(port: int) -> None:
    """Receive one bucket of an endless round, then die as by kill -9."""
    group = join(port, "vanish", 1, 2)
    for _ in receive_buckets(group, [4_000_000] * 10, CPU):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_receiver_killed_in_mid_broadcast_is_an_error_at_the_sender(store: Any) -> None:
    peer = multiprocessing.get_context("spawn").Process(target=vanish, args=(store.port,))
    peer.start()
    long = transport.join_store(HOST, store.port, 60.0)
    group = WeightGroup.form("gloo", long, "vanish", 0, 2, 60.0, HOST)  # it has torch to load
    group.timeout_s = TIMEOUT_S
    started = time.monotonic()
    with pytest.raises(RoundError, match="broadcast failed") as caught:
        send_buckets(group, buckets_of(*[1_000_000] * 10), lambda: True)
    assert is_peers_fault(str(caught.value))
    assert time.monotonic() - started < TIMEOUT_S + 1
    peer.join()
    assert peer.exitcode == -signal.SIGKILL


def test_a_store_listens_on_its_own_address_alone(store: Any) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=1.0)


def test_a_store_that_nobody_serves_is_named_at_once() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    started = time.monotonic()
    with pytest.raises(RoundError, match=f"no weight store answers at {HOST}:{port}"):
        transport.join_store(HOST, port, TIMEOUT_S)
    assert time.monotonic() - started < 1.0


def test_the_local_address_towards_this_machine_is_its_own() -> None:
    assert transport.local_address(HOST, 1) == HOST


def test_a_store_serves_groups_under_many_prefixes_at_once(store: Any) -> None:
    errors: list[Exception] = []

    def one(name: str) -> None:
        try:
            first, second = form(store, name, 2)
            buckets = buckets_of(5)
            sent = in_background(lambda: send_buckets(first, buckets, lambda: True))
            receive(second, buckets)
            sent.result()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(f"many-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
