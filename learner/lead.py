"""Rank 0's side of the loop: it decides each turn, and talks to the streams in the background.

The order of `decide` is the order of importance: stop, publish, evaluate, save, train, wait.
Whatever is not a turn for all ranks (the streams, the handshake of a round, an evaluation) runs
in the event loop of `Background`; this object is the only one that both threads know.
"""

from __future__ import annotations

import asyncio
import time
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from common.audit import forget_end, mark_ended
from common.batch_files import BatchFiles, StoredGroup
from common.broker import Broker
from common.config import Config
from common.data import Row
from common.ledger import Ledger
from common.log import get_logger
from common.messages import Version
from common.metrics import Metrics, read_metrics
from common.process import rss_mib
from common.results import write_results
from common.rounds import Go, Reply
from learner.assemble import Item, response_tokens, split
from learner.background import Background
from learner.conductor import Turn
from learner.dispatcher import Dispatcher
from learner.evaluation import Evaluation
from learner.figures import batch_figures
from learner.groups import Chosen, Judgements, group_tokens
from learner.length_bias import LengthBias
from learner.progress import Progress
from learner.publisher import Publisher
from learner.pulse import Pulse
from learner.resume import frontier
from learner.stall import WAIT, StallWatch
from learner.timeline import Timeline

POLL_S = 0.05
TURN_S = 1.0
PROBE_TOKENS = 64
BIAS_BATCHES = 32
"""Batches over which generated and trained lengths are compared."""
SPENT_ON = {
    "train": "training", "publish": "publishing", "checkpoint": "saving", "export": "saving",
}  # fmt: skip
"""What the time of a turn is counted as."""
log = get_logger(__name__)


class Lead:
    """What only rank 0 has: ledger, dispatcher, publisher, evaluation, metrics."""

    def __init__(
        self, config: Config, broker: Broker, background: Background, rows: list[Row],
        heldout: dict[str, list[Row]], host: str, world: int, metrics: Metrics, progress: Progress,
        pulse: Pulse,
    ) -> None:  # fmt: skip
        self.config, self.broker, self.background = config, broker, background
        self.heldout, self.host, self.world = heldout, host, world
        self.metrics, self.progress = metrics, progress
        self.timeline = Timeline.open(config.run_dir)
        self.ledger = Ledger(config.run_dir / "ledger.jsonl", self.timeline.require_current)
        self.files = BatchFiles(config.run_dir)
        self.dispatcher = Dispatcher(config, broker, self.ledger, self.timeline, rows)
        self.publisher = Publisher(config, broker, self.timeline, host)
        self.bias = LengthBias(BIAS_BATCHES * config.algorithm.groups_per_batch)
        self.probe = _probe([*chain(*heldout.values()), *rows], config)
        self.stall = StallWatch(progress, self.dispatcher, pulse)
        self.stopping = ""
        self._published: Version | None = None
        self._batch: list[Chosen] = []
        self._ready: dict[str, Reply] = {}
        self._round = ""
        self._evaluated: set[str] = set()
        self._saved = 0
        self._exported = False
        self._complete = False
        self._ending = ""  # why the run ends before all its batches are trained
        self._idle_since = time.monotonic()
        self._times: dict[str, float] = {"publish_s": 0.0}
        self._look_for_joiners_at = 0.0

    def stop(self, why: str) -> None:
        """End soon, with a checkpoint; a round that is under way is given up. From any thread."""
        self.stopping = why
        self.publisher.ending = True

    def start(self, version: int, saved: int) -> None:
        """Begin an incarnation at `version`, resumed from checkpoint `saved`."""
        self.timeline.begin(version)
        forget_end(self.config.run_dir)
        in_files = [group for v in self.files.versions() for group in self.files.groups_of(v)]
        self.background.call(self.dispatcher.start(version, in_files))
        self._evaluated = {str(row["label"]) for row in read_metrics(self.config.run_dir, "eval")}
        self._saved = saved
        self.background.keep(self._streams())

    async def _streams(self) -> None:
        async with self.broker.lease("learner", "learner", {"world": self.world}):
            watch = self.progress.vitals.watch_loop()
            await asyncio.gather(self.dispatcher.run(), self._report(), self.stall.run(), watch)

    # --- the decision ---------------------------------------------------------------------------

    def decide(self, version: int) -> Turn:
        """The next turn; takes about a second at most where there is nothing to do."""
        deadline, clock = time.monotonic() + TURN_S, self.progress.clock
        self.stall.turn = WAIT
        clock.enter("waiting")
        while True:
            self.background.check()
            if turn := self._next(version):
                clock.enter(SPENT_ON.get(turn.do, "waiting"))
                self.stall.turn = turn
                return turn
            if time.monotonic() > deadline:
                return Turn("wait", version)
            time.sleep(POLL_S)

    def _next(self, version: int) -> Turn | None:
        if self.stopping:
            return self._stop(version)
        if self._round_due(version):
            return self._open_round(version)
        over = self._over(version)
        if self._evaluating(version, over):
            self.progress.clock.enter("evaluating")
            return None
        self.progress.clock.enter("waiting")
        if version > self._saved and (version % self.config.checkpoint.every == 0):
            return Turn("checkpoint", version)
        return self._finish(version) if over else self._train(version)

    def _over(self, version: int) -> bool:
        """Whether all batches are trained, or nothing is left to learn."""
        if version >= self.config.run.batches or self._ending:
            return True
        self._ending = self.background.call(self.dispatcher.nothing_left())
        if self._ending:
            log.warning("the run ends early", version=version, why=self._ending)
        return bool(self._ending)

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
            mark_ended(self.config.run_dir, version, self._ending)
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

    # --- training -------------------------------------------------------------------------------

    def not_committed(self, missing: list[int]) -> None:
        """Payloads are gone from the server: those groups are generated again."""
        self.background.call(self.dispatcher.not_committed(missing, "payload missing"))

    def committed(self, version: int, groups: list[StoredGroup]) -> None:
        """The batch that makes `version` is durable; `groups` are this rank's."""
        self.background.call(self.dispatcher.committed(self._batch))
        self.dispatcher.rollouts.trained(groups, version)

    def trained(self, figures: dict[str, Any], seconds: float) -> None:
        """Capacity returns; the figures of the batch are recorded."""
        tally = self.background.call(self.dispatcher.trained_batch())
        version = self.dispatcher.admission.version
        row = batch_figures(figures, self._batch, tally, version - 1)
        row |= {"train_s": seconds, **self._times, "rss_mib": rss_mib()}
        row |= self.progress.batch(row["tokens_trained"])
        row |= self._pipeline_figures(tally)
        row |= {f"groups_{k}": n for k, n in self.dispatcher.fate_counts().items()}
        self.metrics.log("batch", version, row)
        log.info(
            "batch", version=version, accuracy=round(row["accuracy"], 3),
            accuracy_raw=row["accuracy_raw"], reward=round(row["reward"], 3),
            length=round(row["length_mean"], 1), staleness=row["staleness_max"],
            wait_s=round(self._times["wait_s"], 2), train_s=round(seconds, 2),
            entropy=round(row["entropy"], 3),
        )  # fmt: skip
        self._times["publish_s"] = 0.0
        self._idle_since = time.monotonic()

    def _pipeline_figures(self, judged: Judgements) -> dict[str, Any]:
        """Queues, what the generators do, and whether long groups come short."""
        counts, pace = self.dispatcher.admission.counts(), self.dispatcher.pace
        self.bias.add([group_tokens(chosen.verdict) for chosen in self._batch], judged)
        return {
            **self.background.call(self.dispatcher.streams.depths()),
            "groups_accepted": counts.accepted,
            "groups_pending": counts.pending,
            "samples_running": pace.running,
            "tokens_per_second_generated": pace.tokens_per_s,
            "long_ratio": self.bias.ratio,
        }

    def frontier(self) -> dict[str, int]:
        """What a checkpoint says of the ledger."""
        return frontier(self.ledger, self.dispatcher.trained)

    def checkpointed(self, version: int, oldest: int) -> None:
        """Batch files that every kept checkpoint contains become lines of the ledger."""
        self._saved = version
        self._idle_since = time.monotonic()
        done = [v for v in self.files.versions() if v <= oldest]
        self.background.call(self.dispatcher.fold(self.files.fates(done)))
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
        self.progress.clock.enter("publishing")
        target = Version(self.timeline.incarnation, version)
        patience = self.background.limit_s + self.config.publish.ready_timeout_s
        self._round, self._ready = self.background.call(self.publisher.call(target), patience)
        if self.stopping:
            return self._stop(version)
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

    def require_living(self, go: Go) -> None:
        """Raises RoundError once a member of the round is dead."""
        self.background.call(self.publisher.require_living(go))

    def round_failed(self, go: Go, why: str) -> None:
        self.publisher.broken()
        self.progress.rounds_failed += 1
        figures = {"round": go.round, "failed": why}
        self.metrics.log("round", self.dispatcher.admission.version, figures)
        log.error("weight round failed", round=go.round, version=go.version, why=why)

    def collect(
        self, go: Go, own: npt.NDArray[np.float32], deadline: float
    ) -> tuple[list[str], float]:
        patience = self.background.limit_s + self.config.publish.round_timeout_s
        return self.background.call(self.publisher.collect(go, own, deadline), patience)

    def published(
        self, round_id: str, version: Version, members: list[str], gap: float,
        own: npt.NDArray[np.float32], seconds: float,
    ) -> None:  # fmt: skip
        """The round is over: who came through may claim from now on."""
        self.background.call(self._publish(round_id, version, members))
        self._published = version
        self._times["publish_s"] += seconds
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
        self.dispatcher.may_dispatch = version.number < self.config.run.batches and not self._ending

    # --- evaluation -----------------------------------------------------------------------------

    def _evaluating(self, version: int, over: bool) -> bool:
        """Start an evaluation that is due, report one that is done; True if training must wait."""
        if not self.heldout:
            return False
        running = self.dispatcher.examiner.evaluation
        if running is not None:
            if running.done:
                self._evaluation_done(running, version)
                return False
            return running.label in ("before", "after") or over
        label = self._label(version, over)
        if label is None or label in self._evaluated:
            return False
        self.background.call(self.dispatcher.examiner.begin(Evaluation(label, self.heldout)))
        return label in ("before", "after")

    def _label(self, version: int, over: bool) -> str | None:
        every = self.config.eval.every
        if version == 0:
            return "before"
        if over:
            return "after"
        return str(version) if every and version % every == 0 else None

    def _evaluation_done(self, evaluation: Evaluation, version: int) -> None:
        self.dispatcher.examiner.evaluation = None
        self._evaluated.add(evaluation.label)
        path = self.config.run_dir / "evaluations" / f"{evaluation.label}.jsonl"
        write_results(path, evaluation.ordered())
        result = evaluation.result()
        self.metrics.log("eval", version, result)
        self._idle_since = time.monotonic()
        self.progress.evaluation()
        log.info("evaluation", label=evaluation.label, accuracy=result["accuracy"],
                 error=result["standard_error"], versions=result["versions"])  # fmt: skip

    # --- status and the end -----------------------------------------------------------------------

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            queues = await self.dispatcher.streams.depths()
            status = self.progress.report(self.dispatcher, str(self._published), queues)
            await self.broker.report("learner", status)

    def close(self) -> None:
        """End the run for every role if it is complete, and leave the server."""
        if self._complete:
            self.background.call(self.broker.end(self._ending or "complete"))
            log.info("the run is complete", **self.dispatcher.fate_counts())
        self.background.stop(self.broker.close())
        self.dispatcher.rollouts.close()
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
