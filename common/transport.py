"""Both ends of a weight broadcast: the learner's rank 0 sends, engine workers receive.

Each bucket of packed weights is preceded by a header of four int64: a command, the index of the
bucket, its bytes and its digest. So nobody ever waits in a broadcast for bytes that will not
come, half an update cannot pass for a whole one, and damaged bytes are noticed where they
arrive. Every operation has a deadline; whatever goes wrong becomes a `RoundError`.

This is the one module of `common` that loads torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist

from common.errors import RoundError
from common.failpoints import failpoint

NEXT, ABANDON, END = 1, 2, 3
MEET_S = 0.01

_MASK = 2**63 - 1
_BLOCK_WORDS = 2**18
_ODD = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: well mixed, and odd

Backend = Literal["gloo", "nccl"]


def serve_store(host: str) -> dist.TCPStore:
    """The key-value store at which weight groups meet, on a free port of `host` (see `.port`).

    It listens on that address alone; torch by itself would listen on every interface.

    Raises:
        RoundError: `host` is no address of this machine.
    """
    try:
        listener = socket.create_server((host, 0), family=_family(host))
    except OSError as error:
        raise RoundError(f"weight rounds cannot listen on {host}: {error}") from None
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Connect to a store that the learner serves.

    Raises:
        RoundError: nobody answers there within `timeout_s` seconds.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        # A plain connection first: where nobody listens, torch retries for twice the timeout.
        socket.create_connection((host, port), timeout=timeout_s).close()
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    except (OSError, RuntimeError) as error:
        reason = _first_line(error)
        raise RoundError(f"no weight store answers at {host}:{port}: {reason}") from None


def local_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches `host`."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


class WeightGroup:
    """The learner's rank 0 and every engine worker of a round, apart from any other group."""

    def __init__(self, group: Any, backend: Backend, rank: int, timeout_s: float) -> None:
        self._group = group
        self._backend = backend
        self.rank = rank
        self.timeout_s = timeout_s

    @property
    def device(self) -> torch.device:
        """Where the backend takes its tensors without staging."""
        return torch.device("cpu" if self._backend == "gloo" else "cuda")

    @classmethod
    def form(
        cls,
        backend: Backend,
        store: dist.Store,
        prefix: str,
        rank: int,
        world: int,
        timeout_s: float,
        host: str,
        check: Callable[[], None] = lambda: None,
    ) -> WeightGroup:
        """Meet the other ranks under `prefix`; returns once all `world` have come.

        Args:
            host: this end's own address, to which gloo binds.
            timeout_s: the longest that forming, and then any one operation, may take.
            check: asked on rank 0 while it waits for the others; it may give up by a RoundError.

        Raises:
            RoundError: not everybody came in time, rank 0 gave up, or a connection failed.
        """
        limit = timedelta(seconds=timeout_s)
        meeting = dist.PrefixStore(prefix, store)
        make = _gloo if backend == "gloo" else _nccl
        try:
            store.set_timeout(limit)
            _meet(meeting, rank, world, timeout_s, check)
            group = make(meeting, rank, world, limit, host)
        except RuntimeError as error:
            raise RoundError(
                f"weight group {prefix} of {world} did not form within {timeout_s:g} s: "
                f"{_first_line(error)}"
            ) from None
        return cls(group, backend, rank, timeout_s)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill `tensor` on every rank with rank 0's; blocks until that is done here.

        With gloo a tensor on a GPU goes through host memory.

        Raises:
            RoundError: a peer is gone, or the operation did not end within the timeout. The
                group is of no use afterwards.
        """
        if self._group is None:
            raise RoundError("weight broadcast failed: this end has left the group")
        staged = self._backend == "gloo" and tensor.device.type != "cpu"
        carried = tensor.cpu() if staged else tensor
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=self.timeout_s)
        try:
            self._group.broadcast([carried], options).wait()
            if self._backend == "nccl":
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise RoundError(f"weight broadcast failed: {_first_line(error)}") from None
        if staged and self.rank != 0:
            tensor.copy_(carried)

    def close(self) -> None:
        """Leave the group; peers that still wait for this end get an error."""
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            with contextlib.suppress(RuntimeError):
                group.abort()  # shutdown would wait for peers that may be gone


def send_buckets(
    group: WeightGroup, buckets: Iterable[torch.Tensor], keep_going: Callable[[], bool]
) -> int:
    """Send flat tensors in order, then the end; returns the number of bytes.

    `keep_going` is asked before each bucket is taken from `buckets`, so that a gather that all
    ranks do in step is never begun for a round that is over.

    Raises:
        RoundError: `keep_going` said no (the receivers are told), or a broadcast failed.
        Exception: whatever `buckets` raises; the receivers are told before.
    """
    remaining = iter(buckets)
    index = total = 0
    while True:
        if not keep_going():
            _send_header(group, ABANDON, index, 0, 0)
            raise RoundError(f"weight round abandoned before bucket {index}")
        try:
            flat = next(remaining, None)
        except BaseException:
            with contextlib.suppress(RoundError):
                _send_header(group, ABANDON, index, 0, 0)
            raise
        if flat is None:
            _send_header(group, END, index, total, 0)
            return total
        octets = flat.contiguous().view(torch.uint8)
        _send_header(group, NEXT, index, octets.numel(), digest(octets))
        group.broadcast(octets)
        failpoint("bucket_sent")
        index, total = index + 1, total + octets.numel()


def receive_buckets(
    group: WeightGroup, plan: Sequence[int], device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, bytes) of each bucket, a uint8 tensor of its own on `device`.

    `plan` holds the bytes of every bucket that has to come; the end is accepted only after the
    last of them. A bucket is yielded once its digest was checked.

    Raises:
        RoundError: abandoned by the sender, a bucket missing, out of order, of another size or
            damaged (the message names the bucket), or a broadcast failed.
    """
    for index, size in enumerate(plan):
        command, sent, count, wanted = _receive_header(group)
        if command == ABANDON:
            raise RoundError(f"weight round abandoned by the learner before bucket {index}")
        if command == END:
            raise RoundError(f"weight round ended before bucket {index} of {len(plan)}")
        if command != NEXT or sent != index:
            raise RoundError(f"weight bucket {index}: the learner sent bucket {sent} instead")
        if count != size:
            raise RoundError(f"weight bucket {index}: {count} bytes sent, {size} in the manifest")
        octets = torch.empty(size, dtype=torch.uint8, device=device)
        group.broadcast(octets)
        failpoint("bucket_received")
        if digest(octets) != wanted:
            raise RoundError(f"weight bucket {index} of {size} bytes arrived damaged (digest)")
        yield index, octets
    command, sent, _, _ = _receive_header(group)
    if command != END:
        what = "was abandoned" if command == ABANDON else f"goes on with bucket {sent}"
        raise RoundError(f"weight round {what} after the last bucket of the manifest")


@torch.no_grad()
def digest(flat: torch.Tensor) -> int:
    """63-bit digest of a flat tensor's bytes, the same on every device and for every dtype.

    With words w_i (the bytes as int32, the tail padded with zeros) in blocks of 2^18:
    bytes + sum_b g_b * (sum_i w_bi * h_i), modulo 2^63, with odd factors g and h. A changed
    word always changes the sum, swapped words nearly always. This guards against faults, not
    against forgery. Work memory is a few blocks whatever the size of the tensor.
    """
    octets = flat.detach().contiguous().view(-1).view(torch.uint8)
    total = octets.numel() * _ODD
    if octets.numel() == 0:
        return total & _MASK
    weights = _word_weights(octets.device)
    step = 4 * _BLOCK_WORDS
    # One transfer from the device at the end instead of one per block.
    sums = [
        _block_sum(octets[start : start + step], weights)
        for start in range(0, octets.numel(), step)
    ]
    for block, value in enumerate(torch.stack(sums).tolist()):
        total += (2 * block + 1) * _ODD * value
    return total & _MASK


def _block_sum(octets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    tail = -octets.numel() % 4
    if tail:
        octets = torch.nn.functional.pad(octets, (0, tail))
    elif octets.storage_offset() % 4:
        octets = octets.clone()  # int32 views need an aligned start
    words = octets.view(torch.int32).to(torch.int64)
    # int64 products and sums wrap around in two's complement on every device, so that the
    # order of a parallel reduction does not matter.
    return (words * weights[: words.numel()]).sum()


@lru_cache(maxsize=4)
def _word_weights(device: torch.device) -> torch.Tensor:
    """Odd 64-bit factors of the positions in a block, well mixed."""
    factor = _ODD - 2**64  # as a signed number
    mixed = torch.arange(1, _BLOCK_WORDS + 1, dtype=torch.int64, device=device) * factor
    mixed = (mixed ^ (mixed >> 29)) * factor
    return (mixed ^ (mixed >> 32)) | 1


def _send_header(group: WeightGroup, command: int, index: int, count: int, mark: int) -> None:
    header = torch.tensor([command, index, count, mark], dtype=torch.int64)
    group.broadcast(header.to(group.device))


def _receive_header(group: WeightGroup) -> tuple[int, int, int, int]:
    header = torch.zeros(4, dtype=torch.int64, device=group.device)
    group.broadcast(header)
    command, index, count, mark = header.tolist()
    return command, index, count, mark


def _meet(
    store: dist.Store, rank: int, world: int, timeout_s: float, check: Callable[[], None]
) -> None:
    """Wait at the store until everybody is there: forming a group cannot be interrupted, and one
    who died since it was called would cost all others the whole timeout."""
    if rank > 0:
        store.set(f"here/{rank}", "")
        if store.get("form") != b"go":
            raise RoundError("the weight group did not form: the learner has given it up")
        return
    everybody = [f"here/{other}" for other in range(1, world)]
    deadline = time.monotonic() + timeout_s
    try:
        while not store.check(everybody):
            check()
            if time.monotonic() > deadline:
                raise RuntimeError("somebody did not come")
            time.sleep(MEET_S)
    except BaseException:
        store.set("form", "off")
        raise
    store.set("form", "go")


def _gloo(store: dist.Store, rank: int, world: int, limit: timedelta, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = limit
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, world, options)


def _nccl(store: dist.Store, rank: int, world: int, limit: timedelta, host: str) -> Any:
    """A NCCL group whose `wait` raises on timeout; torch's default is to end the process.

    The variables are read when a group is made, so they are set for this one alone.
    """
    settings = {
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world, options)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
