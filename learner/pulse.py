"""A sign of life of each rank, so that one that stands still can be named.

A rank that is stopped, or whose node is gone without a word, looks to the others like a long
collective. So each rank but 0 counts up a number in torchrun's store, from a thread of its own; a
rank whose threads go on while its main thread waits in a collective counts as alive.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

BEAT_S = 2.0
QUIET_S = 15.0
"""Without a beat for so long a rank is named."""


class Pulse:
    """Rank 0 listens, the others beat; nobody does with one rank."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank = store, rank
        self._seen = {other: (b"", time.monotonic()) for other in range(1, world)}
        if world > 1:
            work = self._listen if rank == 0 else self._beat
            threading.Thread(target=work, name="pulse", daemon=True).start()

    @classmethod
    def of_this_process(cls) -> Pulse:
        store = dist.distributed_c10d._get_default_store()
        return cls(store, dist.get_rank(), dist.get_world_size())

    def quiet(self) -> list[int]:
        """Rank 0: the ranks that have given no sign of life for a while."""
        now = time.monotonic()
        return [rank for rank, (_, since) in self._seen.items() if now - since > QUIET_S]

    def _beat(self) -> None:
        count = 0
        try:
            while True:
                count += 1
                self._store.set(f"pulse/{self._rank}", str(count))
                time.sleep(BEAT_S)
        except RuntimeError:
            return  # the store is gone, and with it torchrun: this rank is about to be ended

    def _listen(self) -> None:
        try:
            while True:
                for rank, (last, _) in list(self._seen.items()):
                    key = f"pulse/{rank}"
                    count = self._store.get(key) if self._store.check([key]) else b""
                    if count != last:
                        self._seen[rank] = (count, time.monotonic())
                time.sleep(BEAT_S)
        except RuntimeError:
            return
