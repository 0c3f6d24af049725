"""The broadcast of a weight round: every rank gathers in step, rank 0 sends.

Before each gather rank 0 tells all ranks to go on or to abandon, so that a round that fails on
rank 0 leaves nobody in a collective.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch.distributed import Store

from common.config import Config
from common.errors import RoundError
from common.log import get_logger
from common.messages import Version
from common.rounds import Go
from common.transport import Backend, WeightGroup, send_buckets, serve_store
from learner.conductor import Conductor, Turn
from learner.engine import TrainEngine
from learner.lead import Lead

log = get_logger(__name__)


class WeightSender:
    """Rank 0 holds the store and the group of the last round; other ranks only gather."""

    def __init__(self, config: Config, engine: TrainEngine, conductor: Conductor) -> None:
        self.config, self.engine, self.conductor = config, engine, conductor
        self._store: Store | None = None
        self._group: WeightGroup | None = None
        self._abandoned = False

    def send(self, turn: Turn, lead: Lead | None) -> None:
        """One round, as far as it gets; what came of it is `lead`'s to report."""
        started = time.monotonic()
        probe = np.asarray(turn.plan["probe"], dtype=np.int32)
        own = self.engine.score([(probe[:1], probe[1:])] if lead else [], temperature=1.0)
        if lead is None:
            if turn.plan["members"]:
                self._follow()
            return
        version = Version(*turn.plan["version"])
        if not turn.plan["members"]:
            seconds = time.monotonic() - started
            lead.published(turn.plan["round"], version, [], 0.0, own[0], seconds)
            return
        deadline = started + self.config.publish.round_timeout_s
        go = lead.plan_round(self.engine.manifest(), self._store_port(lead.host))
        self._broadcast(go, lead, deadline)
        members, gap = lead.collect(go, own[0], deadline)
        lead.published(go.round, version, members, gap, own[0], time.monotonic() - started)

    def _store_port(self, host: str) -> int:
        if self._store is None:
            self._store = serve_store(host)
        port: int = self._store.port  # type: ignore[attr-defined]
        return port

    def _broadcast(self, go: Go, lead: Lead, deadline: float) -> None:
        """Rank 0: say go, meet the members, send; the members' answers tell who came through."""
        self._abandoned = False

        def keep_going() -> bool:
            in_time = time.monotonic() < deadline and not lead.stopping
            self._abandoned = not self.conductor.go_on(in_time)
            return not self._abandoned

        lead.say_go(go)
        try:
            group = self._meet(go, lead)
            dtype = getattr(torch, go.dtype)
            buckets = (flat for _, flat in self.engine.buckets(go.bucket_bytes, dtype))
            send_buckets(group, buckets, keep_going)  # type: ignore[arg-type]
        except RoundError as error:
            if not self._abandoned:
                self.conductor.go_on(False)
            self._close()
            lead.round_failed(go, str(error))

    def _follow(self) -> None:
        """Other ranks: gather bucket by bucket for as long as rank 0 goes on."""
        dtype = getattr(torch, self.config.model.dtype)
        buckets = self.engine.buckets(int(self.config.publish.bucket_mib * 2**20), dtype)
        while self.conductor.go_on(True):
            if next(buckets, None) is None:
                break

    def _meet(self, go: Go, lead: Lead) -> WeightGroup:
        """The group of this round; the last one's if its members are the same."""
        if self._group is None or go.fresh:
            self._close()
            assert self._store is not None
            backend: Backend = "nccl" if go.backend == "nccl" else "gloo"
            self._group = WeightGroup.form(
                backend, self._store, go.prefix, 0, go.world, go.timeout_s, go.host,
                check=lambda: lead.require_living(go),
            )  # fmt: skip
        return self._group

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
