"""The learner's loop: publish, evaluate, train, save; rank 0 decides, all ranks act.

Invariants:
- Publication comes before any wait: a batch is trained only after the last one's weights went
  out, and every wait is a safe point at which joiners are served.
- A batch is durable on disk before a weight changes, and acknowledged only after that.
- The version counts trained batches. A restart trains the batch files after its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from common.batch_files import BatchFiles, StoredGroup
from common.config import Config
from common.errors import MessageError
from common.failpoints import failpoint
from common.log import get_logger
from common.messages import Verdict, decode
from common.patience import Patience
from learner.assemble import Item, require_trainable, response_tokens, split, trajectories
from learner.checkpoint import Checkpoints
from learner.conductor import Conductor, Turn
from learner.engine import TrainEngine
from learner.lead import Lead
from learner.reshape import discard, for_ranks
from learner.resume import plan_resume
from learner.sender import WeightSender

log = get_logger(__name__)


class Trainer:
    """One rank of the learner. `lead` is None but on rank 0."""

    def __init__(
        self, config: Config, engine: TrainEngine, client: redis.Redis, lead: Lead | None
    ) -> None:
        self.config, self.engine, self.client, self.lead = config, engine, client, lead
        self.patience = Patience(config.redis.patience_s)
        self.conductor = Conductor()
        self.files = BatchFiles(config.run_dir)
        self.checkpoints = Checkpoints(config.run_dir, config.checkpoint.keep_last)
        self.sender = WeightSender(config, engine, self.conductor)
        self.version = 0

    def run(self) -> None:
        """Resume, then take turns until rank 0 says stop."""
        acts: dict[str, Callable[[Turn], None]] = {
            "wait": lambda turn: None,
            "train": self.train,
            "publish": self.publish,
            "checkpoint": self.checkpoint,
            "export": self.export,
        }
        self.resume()
        while (turn := self._turn()).do != "stop":
            acts[turn.do](turn)
        if self.lead:
            self.lead.close()

    def _turn(self) -> Turn:
        if self.lead is None:
            return self.conductor.hear()
        return self.conductor.tell(self.lead.decide(self.version))

    # --- training -------------------------------------------------------------------------------

    def train(self, turn: Turn) -> None:
        """Write the batch file, acknowledge, then step."""
        started = time.monotonic()
        plan = [[[Item(*item) for item in mine] for mine in mini] for mini in turn.plan["minis"]]
        mine = [mini[self.engine.rank] for mini in plan]
        stored, missing = self._fetch(mine, turn.plan["prefix"])
        if self.lead and not missing:
            self.files.begin(turn.version + 1)
        if not self.conductor.all_well(not missing):
            if self.lead:
                # whichever rank missed it: what rank 0 does not name would be chosen again for ever
                groups = [group for mini in plan for mine in mini for group in mine]
                self.lead.not_committed(self._fetch([groups], turn.plan["prefix"])[1])
            return
        flat = [group for mini in stored for group in mini]
        self.files.write_part(turn.version + 1, self.engine.rank, flat)
        self.conductor.all_well(True)
        if self.lead:
            failpoint("batch_parts_written")
            self.lead.timeline.require_current()
            self.files.commit(turn.version + 1, self.engine.world)
            failpoint("batch_file_written")
            self.lead.committed(turn.version + 1, flat)
            failpoint("batch_acknowledged")
        figures = self._step(stored, turn.version)
        failpoint("batch_trained")
        if self.lead:
            self.lead.trained(figures, time.monotonic() - started)

    def _fetch(
        self, minis: list[list[Item]], prefix: str
    ) -> tuple[list[list[StoredGroup]], list[int]]:
        """Read the payloads of this rank's groups, once; also the ordinals of what is missing."""
        stored: list[list[StoredGroup]] = []
        missing: list[int] = []
        for mini in minis:
            stored.append([])
            for item in mini:
                group = self._fetch_group(item, prefix)
                if group is None:
                    missing.append(item.ordinal)
                else:
                    stored[-1].append(group)
        return stored, missing

    def _fetch_group(self, item: Item, prefix: str) -> StoredGroup | None:
        gid = str(item.ordinal)
        keys = [
            f"{prefix}sample:{gid}:{item.attempt}:{index}"
            for index in range(self.config.algorithm.group_size)
        ]

        def read() -> Any:
            pipe = self.client.pipeline(transaction=False)
            pipe.hmget(f"{prefix}group:{gid}", "prompt", "verdict")
            pipe.mget(keys)
            return pipe.execute()

        (prompt, verdict), payloads = self._patiently(read)
        if prompt is None or verdict is None or None in payloads:
            return None
        group = StoredGroup(item.ordinal, item.attempt, prompt, verdict, payloads)
        try:
            require_trainable(group, self.config, self.engine.vocabulary)
        except MessageError as error:
            log.error("a group that cannot be trained", group=item.ordinal, why=str(error))
            return None
        return group

    def _patiently(self, read: Callable[[], Any]) -> Any:
        """Repeat a read while the server is away, for as long as the streams wait for it too."""
        wait = self.patience.begin("reading payloads")
        while True:
            try:
                result = read()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                time.sleep(wait.again("it does not answer", error))
            else:
                wait.over()
                return result

    def _step(self, stored: list[list[StoredGroup]], version: int) -> dict[str, Any]:
        """Train one batch from its stored groups; the version moves on."""
        rate = self.engine.set_learning_rate(version + 1)
        minis = [[t for g in mini for t in trajectories(g, self.config)] for mini in stored]
        figures = self.engine.train_batch(minis, version)
        self.version = version + 1
        return figures | {"learning_rate": rate, "optimizer_step": self.engine.steps}

    # --- publication and checkpoints --------------------------------------------------------------

    def publish(self, turn: Turn) -> None:
        self.sender.send(turn, self.lead)

    def checkpoint(self, turn: Turn) -> None:
        """All ranks write beside the final name, rank 0 seals and renames."""
        if self.lead:
            self.checkpoints.begin(turn.version)
        self.conductor.all_well(True)
        self.engine.save(self.checkpoints.unfinished(turn.version))
        if self.lead:
            self.lead.timeline.require_current()
            facts = {"world": self.engine.world, **self.lead.frontier()}
            self.checkpoints.commit(turn.version, facts)
            self.lead.checkpointed(turn.version, self.checkpoints.contained())

    def export(self, turn: Turn) -> None:
        """A Hugging Face folder of the final weights."""
        self.engine.export_hf(self.config.run_dir / "export", Path(self.config.model.path))
        if self.lead:
            self.lead.exported()

    def resume(self) -> None:
        """Load the newest valid checkpoint and train the batch files after it again."""
        plan: dict[str, Any] = {}
        if self.lead:
            plan = plan_resume(self.checkpoints, self.files, self.lead.ledger)._asdict()
            if plan["checkpoint"] is not None:
                folder = self.checkpoints.path(plan["checkpoint"])
                plan["folder"] = str(for_ranks(folder, self.engine.world))
            self.conductor.tell(Turn("resume", plan=plan))
        else:
            plan = self.conductor.hear().plan
        if plan["checkpoint"] is not None:
            self.engine.load(Path(plan["folder"]))
            self.version = plan["checkpoint"]
            if self.lead:
                discard(Path(plan["folder"]))
        for batch in plan["batches"]:
            self._replay(batch)
        if self.lead:
            log.info("resumed", checkpoint=plan["checkpoint"], replayed=plan["batches"],
                     version=self.version)  # fmt: skip
            self.lead.start(self.version, plan["checkpoint"] or 0)

    def _replay(self, batch: int) -> None:
        groups = {group.ordinal: group for group in self.files.load(batch)}
        items = [Item(g.ordinal, g.attempt, self._tokens(g)) for g in groups.values()]
        minis = split(items, self.config, batch - 1, self.engine.world)
        stored = [[groups[item.ordinal] for item in mini[self.engine.rank]] for mini in minis]
        self._step(stored, batch - 1)
        failpoint("batch_replayed")

    def _tokens(self, group: StoredGroup) -> int:
        """Response tokens of a stored group, as its verdict counts them."""
        return response_tokens(decode(Verdict, group.verdict, self.config.max_message_bytes))
