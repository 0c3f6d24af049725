"""Which groups are kept to be read (`common.rollout_log`), and what of them.

Of each batch a few of rank 0's groups, drawn by (run seed, version), whose payloads it has in hand;
and as many of the first that are filtered, and of those that fail, while a batch is filled: their
payloads are read just before the server forgets them. Decoding and writing are another thread's
work. A group that cannot be kept is a warning: training does not depend on it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from common.batch_files import StoredGroup
from common.broker import Broker
from common.config import Config
from common.errors import DapoError
from common.ledger import Line
from common.log import get_logger
from common.messages import Judged, Prompt, Sample, Verdict, decode
from common.rollout_log import Group, RolloutLog
from learner.advantage import group_advantages

log = get_logger(__name__)


class RolloutKeeper:
    """Rank 0's hand on `RUN/rollouts`; `close` waits until everything is written."""

    def __init__(self, config: Config, broker: Broker) -> None:
        self.config, self.broker = config, broker
        self.per_batch = config.rollouts.per_batch
        self._log = RolloutLog(config.run_dir, int(config.rollouts.max_mib * 2**20))
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rollouts")
        self._version = 0
        self._taken: Counter[str] = Counter()  # by fate, while the batch of `_version` is filled

    def trained(self, groups: Sequence[StoredGroup], version: int) -> None:
        """A batch that makes `version` is durable; `groups` are those of it that are in hand."""
        dice = random.Random(f"{self.config.run.seed}.{version}")
        for stored in dice.sample(groups, min(self.per_batch, len(groups))):
            self._write(partial(trained_group, stored, version, self.config))

    async def closing(self, lines: Sequence[Line], version: int) -> None:
        """Fates that are durable, of groups that the server is about to forget.

        `version` is that of the batch which is being filled.
        """
        if version != self._version:
            self._version = version
            self._taken.clear()
        for line in lines:
            if line.fate not in ("filtered", "failed") or self._taken[line.fate] >= self.per_batch:
                continue
            self._taken[line.fate] += 1
            prompt, verdict, payloads = await self._read(line)
            if prompt is not None:
                limit = self.config.max_message_bytes
                self._write(partial(closed_group, line, version, prompt, verdict, payloads, limit))

    async def _read(self, line: Line) -> tuple[bytes | None, bytes | None, list[bytes | None]]:
        gid, key = str(line.ordinal), self.broker.key
        prompt, verdict = await self.broker.persist(
            lambda: self.broker.client.hmget(key("group", gid), "prompt", "verdict"),
            "reading a group to keep",
        )
        count = self.config.algorithm.group_size
        return prompt, verdict, await self.broker.get_samples(gid, line.attempt, count)

    def _write(self, make: Callable[[], Group]) -> None:
        def work() -> None:
            try:
                self._log.write(make())
            except (DapoError, OSError) as error:
                log.warning("a rollout is not kept", why=str(error))

        self._writer.submit(work)

    def close(self) -> None:
        self._writer.shutdown()


def trained_group(stored: StoredGroup, version: int, config: Config) -> Group:
    """What is kept of a group of a batch, with the advantages that it was trained with.

    Raises:
        MessageError: a record of it cannot be read.
    """
    limit, algorithm = config.max_message_bytes, config.algorithm
    verdict = decode(Verdict, stored.verdict, limit)
    advantages = group_advantages(
        [judged.reward for judged in verdict.samples],
        algorithm.advantage_normalization,
        algorithm.advantage_ddof,
        algorithm.advantage_epsilon,
    )
    samples = [
        _sample(index, decode(Sample, payload, limit), verdict.samples[index], advantage)
        for index, (payload, advantage) in enumerate(
            zip(stored.samples, advantages.tolist(), strict=True)
        )
    ]
    prompt = decode(Prompt, stored.prompt, limit)
    head = {"version": version, "fate": "trained", "reason": "", "attempt": stored.attempt}
    return _group(head, prompt, verdict.verifier, samples)


def closed_group(
    line: Line, version: int, prompt: bytes, verdict: bytes | None,
    payloads: Sequence[bytes | None], limit: int,
) -> Group:  # fmt: skip
    """What is kept of a group that no batch gets: of one that failed, samples may be missing.

    Raises:
        MessageError: a record of it cannot be read.
    """
    record = decode(Verdict, verdict, limit) if verdict else None
    judged = dict(enumerate(record.samples if record else []))
    samples = [
        _sample(index, decode(Sample, payload, limit), judged.get(index), None)
        for index, payload in enumerate(payloads)
        if payload is not None
    ]
    head = {
        "version": version, "fate": line.fate, "reason": line.reason, "attempt": line.attempt,
    }  # fmt: skip
    return _group(head, decode(Prompt, prompt, limit), record.verifier if record else "", samples)


def _group(
    head: dict[str, Any], prompt: Prompt, verifier: str, samples: list[dict[str, Any]]
) -> Group:
    return head | {
        "group": prompt.group, "ordinal": prompt.ordinal, "row": prompt.row,
        "prompt": prompt.text, "gold": prompt.gold, "checker": prompt.checker,
        "verifier": verifier, "samples": samples,
    }  # fmt: skip


def _sample(
    index: int, sample: Sample, judged: Judged | None, advantage: float | None
) -> dict[str, Any]:
    """`reward` is for correctness alone, `shaped_reward` what was trained on; a sample that was
    never judged has neither."""
    versions = [(span.incarnation, span.number) for span in sample.spans]
    ends = (min(versions), max(versions)) if versions else ()
    row: dict[str, Any] = {
        "index": index, "text": sample.text, "outcome": None, "answer": None, "why": None,
        "reward": None, "shaped_reward": None, "advantage": advantage,
        "length": len(sample.token_ids), "truncated": sample.finish_reason == "length",
        "versions": [f"{incarnation}.{number}" for incarnation, number in ends],
        "generator": sample.generator,
    }  # fmt: skip
    if judged is not None:
        row |= {
            "outcome": judged.outcome, "answer": judged.extracted, "why": judged.reason,
            "reward": judged.reward - judged.penalty, "shaped_reward": judged.reward,
        }  # fmt: skip
    return row
