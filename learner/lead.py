"""Rank 0's side of the loop: it decides each turn, and talks to the streams in the background.

The order of `decide` is the order of importance: stop, publish, evaluate, save, train, wait.
Whatever is not a turn for all ranks (the streams, the handshake of a round, an evaluation) runs
in the event loop of `Background`; this object is the only one that both threads know.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from common.batch_files import BatchFiles
from common.broker import Broker
from common.config import Config
from common.data import Row
from common.ledger import Ledger, Line
from common.log import get_logger
from common.messages import Version
from common.metrics import Metrics, read_metrics
from common.process import rss_mib
from common.rounds import Go, Reply
from learner.assemble import Item, response_tokens, split
from learner.background import Background
from learner.conductor import Turn
from learner.dispatcher import Dispatcher
from learner.evaluation import Evaluation
from learner.figures import batch_figures
from learner.groups import Chosen
from learner.publisher import Publisher
from learner.timeline import Timeline

POLL_S = 0.05
TURN_S = 1.0
PROBE_TOKENS = 64
log = get_logger(__name__)


class Lead:
    """What only rank 0 has: ledger, dispatcher, publisher, evaluation, metrics."""

    def __init__(
        self, config: Config, broker: Broker, background: Background, rows: list[Row],
        heldout: list[Row], host: str, world: int,
    ) -> None:  # fmt: skip
        self.config, self.broker, self.background = config, broker, background
        self.heldout, self.host, self.world = heldout, host, world
        self.metrics = Metrics(config.run_dir)
        self.timeline = Timeline.open(config.run_dir)
        self.ledger = Ledger(config.run_dir / "ledger.jsonl")
        self.files = BatchFiles(config.run_dir)
        self.dispatcher = Dispatcher(config, broker, self.ledger, self.timeline, rows)
        self.publisher = Publisher(config, broker, self.timeline, host)
        self.probe = _probe([*heldout, *rows], config)
        self.stopping = ""
        self._published: Version | None = None
        self._batch: list[Chosen] = []
        self._ready: dict[str, Reply] = {}
        self._round = ""
        self._evaluated: set[str] = set()
        self._saved = 0
        self._exported = False
        self._complete = False
        self._idle_since = self._last_progress = time.monotonic()
        self._times: dict[str, float] = {"publish_s": 0.0}
        self._look_for_joiners_at = 0.0

    def start(self, version: int, saved: int) -> None:
        """Begin an incarnation at `version`, resumed from checkpoint `saved`."""
        self.timeline.begin(version)
        in_files = [group for v in self.files.versions() for group in self.files.groups_of(v)]
        self.background.call(self.dispatcher.start(version, in_files))
        self._evaluated = {str(row["label"]) for row in read_metrics(self.config.run_dir, "eval")}
        self._saved = saved
        self.background.keep(self._streams())

    async def _streams(self) -> None:
        async with self.broker.lease("learner", "learner", {"world": self.world}):
            await asyncio.gather(self.dispatcher.run(), self._report())

    # --- the decision ---------------------------------------------------------------------------

    def decide(self, version: int) -> Turn:
        """The next turn; takes about a second at most where there is nothing to do."""
        deadline = time.monotonic() + TURN_S
        while True:
            self.background.check()
            if turn := self._next(version):
                return turn
            if time.monotonic() > deadline:
                self._complain()
                return Turn("wait", version)
            time.sleep(POLL_S)

    def _next(self, version: int) -> Turn | None:
        total = self.config.run.batches
        if self.stopping:
            return self._stop(version)
        if self._round_due(version):
            return self._open_round(version)
        if self._evaluating(version, total):
            return None
        if version > self._saved and (version % self.config.checkpoint.every == 0):
            return Turn("checkpoint", version)
        if version >= total:
            return self._finish(version)
        return self._train(version)

    def _stop(self, version: int) -> Turn:
        """SIGTERM: save what was trained, then end; generators keep what they hold."""
        return Turn("checkpoint" if version > self._saved else "stop", version)

    def _finish(self, version: int) -> Turn:
        if version > self._saved:
            return Turn("checkpoint", version)
        if not self._exported:
            return Turn("export", version)
        if not self._complete:
            self.background.call(self.dispatcher.end())
            self._complete = True
        return Turn("stop", version)

    def _train(self, version: int) -> Turn | None:
        batch = self.background.call(self.dispatcher.choose_batch())
        if batch is None:
            return None
        self._batch = batch
        self._times["wait_s"] = time.monotonic() - self._idle_since
        items = [Item(c.ordinal, c.attempt, response_tokens(c.verdict)) for c in batch]
        minis = split(items, self.config, version, self.world)
        return Turn("train", version, {"minis": minis, "prefix": self.broker.key("")})

    def _complain(self) -> None:
        """Say what is waited for, and since when, once no batch has come for a while."""
        silent = time.monotonic() - self._last_progress
        if silent < self.config.run.stall_s:
            return
        self._last_progress = time.monotonic()
        why = self.dispatcher.waiting_for() or "an evaluation"
        log.error("no progress", since_s=round(silent), waiting_for=why,
                  generators=self.dispatcher.generators)  # fmt: skip

    # --- training -------------------------------------------------------------------------------

    def not_committed(self, missing: list[int]) -> None:
        """Payloads are gone from the server: those groups are generated again."""
        self.background.call(self.dispatcher.not_committed(missing, "payload missing"))

    def committed(self) -> None:
        self.background.call(self.dispatcher.committed(self._batch))

    def trained(self, figures: dict[str, Any], seconds: float) -> None:
        """Capacity returns; the figures of the batch are recorded."""
        tally = self.background.call(self.dispatcher.trained_batch())
        version = self.dispatcher.admission.version
        row = batch_figures(figures, self._batch, tally, version - 1)
        row |= {"train_s": seconds, **self._times, "rss_mib": rss_mib()}
        row |= self.background.call(self.dispatcher.streams.depths())
        row |= {f"groups_{k}": n for k, n in self.dispatcher.fate_counts().items()}
        self.metrics.log("batch", version, row)
        log.info(
            "batch", version=version, accuracy=round(row["accuracy"], 3),
            accuracy_raw=row["accuracy_raw"], reward=round(row["reward"], 3),
            length=round(row["length_mean"], 1), staleness=row["staleness_max"],
            wait_s=round(self._times["wait_s"], 2), train_s=round(seconds, 2),
            entropy=round(row["entropy"], 3),
        )  # fmt: skip
        self._idle_since = self._last_progress = time.monotonic()

    def checkpointed(self, version: int, oldest: int) -> None:
        """Batch files that every kept checkpoint contains become lines of the ledger."""
        self._saved = version
        self._idle_since = time.monotonic()
        done = [v for v in self.files.versions() if v <= oldest]
        lines = [
            Line(ordinal, attempt, "trained", "", v)
            for v in done
            for ordinal, attempt in self.files.groups_of(v)
        ]
        self.background.call(self.dispatcher.fold(lines))
        self.files.remove(done, keep=self.config.checkpoint.archive_batches)

    def exported(self) -> None:
        self._exported = True

    # --- publication ----------------------------------------------------------------------------

    def _round_due(self, version: int) -> bool:
        if self._published is None or self._published.number < version:
            return True
        return bool(self.background.call(self._joiners()))

    async def _joiners(self) -> set[str]:
        now = time.monotonic()
        if now < self._look_for_joiners_at:
            return set()
        self._look_for_joiners_at = now + 0.5
        return await self.publisher.joiners()

    def _open_round(self, version: int) -> Turn:
        """Call the members together."""
        target = Version(self.timeline.incarnation, version)
        patience = 300.0 + self.config.publish.ready_timeout_s
        self._round, self._ready = self.background.call(self.publisher.call(target), patience)
        plan = {
            "round": self._round, "version": list(target), "members": bool(self._ready),
            "probe": self.probe,
        }  # fmt: skip
        return Turn("publish", version, plan)

    def plan_round(self, manifest: list[tuple[str, tuple[int, ...]]], port: int) -> Go:
        version = Version(self.timeline.incarnation, self.dispatcher.admission.version)
        return self.publisher.plan(self._round, version, self._ready, manifest, port, self.probe)

    def say_go(self, go: Go) -> None:
        self.background.call(self.publisher.say(go))

    def round_failed(self, go: Go, why: str) -> None:
        self.publisher.broken()
        figures = {"round": go.round, "failed": why}
        self.metrics.log("round", self.dispatcher.admission.version, figures)
        log.error("weight round failed", round=go.round, version=go.version, why=why)

    def collect(
        self, go: Go, own: npt.NDArray[np.float32], deadline: float
    ) -> tuple[list[str], float]:
        patience = 300.0 + self.config.publish.round_timeout_s
        return self.background.call(self.publisher.collect(go, own, deadline), patience)

    def published(
        self, round_id: str, version: Version, members: list[str], gap: float,
        own: npt.NDArray[np.float32], seconds: float,
    ) -> None:  # fmt: skip
        """The round is over: who came through may claim from now on."""
        self.background.call(self._publish(round_id, version, members))
        self._published = version
        self._times["publish_s"] = seconds
        self._idle_since = time.monotonic()
        figures = {
            "round": round_id, "members": len(members), "probe_gap": gap, "seconds": seconds,
            "probe_logprob": float(own.mean()),
        }  # fmt: skip
        self.metrics.log("round", version.number, figures)
        log.info("published", version=str(version), members=members, probe_gap=gap,
                 seconds=round(seconds, 3))  # fmt: skip

    async def _publish(self, round_id: str, version: Version, members: list[str]) -> None:
        """In the event loop, whose other tasks use the admission's state."""
        unclaimed = await self.publisher.publish(round_id, version, members)
        self.dispatcher.admission.publish(version.number, unclaimed)
        self.dispatcher.may_dispatch = version.number < self.config.run.batches

    # --- evaluation -----------------------------------------------------------------------------

    def _evaluating(self, version: int, total: int) -> bool:
        """Start an evaluation that is due, report one that is done; True if training must wait."""
        if not self.heldout:
            return False
        running = self.dispatcher.examiner.evaluation
        if running is not None:
            if running.done:
                self._evaluation_done(running, version)
                return False
            return running.label in ("before", "after") or version >= total
        label = self._label(version, total)
        if label is None or label in self._evaluated:
            return False
        self.background.call(self.dispatcher.examiner.begin(Evaluation(label, self.heldout)))
        return label in ("before", "after")

    def _label(self, version: int, total: int) -> str | None:
        every = self.config.eval.every
        if version == 0:
            return "before"
        if version >= total:
            return "after"
        return str(version) if every and version % every == 0 else None

    def _evaluation_done(self, evaluation: Evaluation, version: int) -> None:
        self.dispatcher.examiner.evaluation = None
        self._evaluated.add(evaluation.label)
        result = evaluation.result()
        self.metrics.log("eval", version, result)
        self._last_progress = self._idle_since = time.monotonic()
        log.info("evaluation", label=evaluation.label, accuracy=round(result["accuracy"], 4),
                 error=round(result["standard_error"], 4), versions=result["versions"])  # fmt: skip

    # --- status and the end -----------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            admission = self.dispatcher.admission
            counts = admission.counts()
            status = {
                "role": "learner", "time": time.time(), "version": admission.version,
                "published": str(self._published), "batches": self.config.run.batches,
                "open": counts.open, "capacity": counts.capacity, "accepted": counts.accepted,
                "pending": counts.pending, "training": counts.training,
                "unclaimed": self.dispatcher.unclaimed, "generators": self.dispatcher.generators,
                "waiting_for": self.dispatcher.waiting_for(),
                "fates": self.dispatcher.fate_counts(), "rss_mib": round(rss_mib()),
            }  # fmt: skip
            await self.broker.report("learner", status)

    def close(self) -> None:
        """End the run for every role if it is complete, and leave the server."""
        if self._complete:
            self.background.call(self.broker.end("complete"))
            log.info("the run is complete", **self.dispatcher.fate_counts())
        self.background.stop(self.broker.close())
        self.ledger.close()
        self.metrics.close()


def _probe(rows: list[Row], config: Config) -> list[int]:
    """A fixed text to score: prompts, one after the other."""
    tokens: list[int] = []
    for row in rows:
        tokens += row.token_ids.tolist()
        if len(tokens) >= PROBE_TOKENS:
            break
    return tokens[: min(PROBE_TOKENS, config.model.max_length - 1)]
