"""A real learner in processes of its own, killed at failpoints, and workers that never vary.

The learner is all there is in production: DeepSpeed, streams, batch files, checkpoints. Generators
and verifiers are stood in for by one coroutine whose samples follow from ordinal and index alone,
so that a run with `admission.max_staleness = 0` trains the same tokens whatever befalls it.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.broker import Broker
from common.config import Config, parse_config
from common.entry import ROLLOUTS
from common.errors import DapoError
from common.messages import Prompt, Rollout, Sample, Span, Verdict, Version, decode, encode
from learner.warmup import character_model, character_tokenizer
from tests.integration.learner_ranks import free_port
from tests.unit.records import a_judgement

GROUP_SIZE = 2
DEADLINE_S = 240.0


def write_base(folder: Path) -> None:
    """A tiny model, its tokenizer and twenty problems."""
    torch.manual_seed(1)
    tokenizer = character_tokenizer()
    character_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": f"{index}+1=", "answer": f"{index + 1}"} for index in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_recipe(base: Path, runs: Path, name: str, batches: int, **learner: Any) -> Config:
    return parse_config(
        {
            "run": {"dir": str(runs), "name": name, "batches": batches},
            "model": {"path": str(base / "model"), "dtype": "float32", "max_length": 64},
            "data": {"train": [str(base / "train.jsonl")]},
            "sampling": {"max_tokens": 32},
            "algorithm": {"group_size": GROUP_SIZE, "groups_per_batch": 4},
            "admission": {"max_staleness": 0},
            "learner": {"learning_rate": 1e-3, "logit_chunk": 16, **learner},
            "checkpoint": {"every": 2, "keep_last": 1, "archive_batches": True},
        },
        "test",
    )


# --- workers ------------------------------------------------------------------------------------


def sample_of(ordinal: int, index: int, version: Version) -> Sample:
    draw = np.random.default_rng([ordinal, index])
    size = int(draw.integers(3, 12))
    return Sample(
        token_ids=draw.integers(2, 258, size).astype(np.int32),
        logprobs=draw.normal(-5.5, 0.3, size).astype(np.float32),
        spans=[Span(*version, 0, size)], finish_reason="stop", text="4", generator="w",
        seconds=0.1,
    )  # fmt: skip


def verdict_of(rollout: Rollout, samples: list[Sample]) -> Verdict:
    judged = [
        a_judgement(
            "correct" if index % 2 else "wrong", len(sample.token_ids),
            Version(sample.spans[0].incarnation, sample.spans[0].number),
        )
        for index, sample in enumerate(samples)
    ]  # fmt: skip
    ids = (rollout.group, rollout.ordinal, rollout.attempt, False)
    return Verdict(*ids, "accepted", "mixed", judged, "w")


async def work(broker: Broker) -> None:
    """Answer every prompt, for ever."""
    while True:
        version = await broker.published() or ""
        for entry in await broker.claim_prompts(version, "w", 8) if version else []:
            prompt = decode(Prompt, entry.data)
            for index in range(prompt.samples):
                sample = encode(sample_of(prompt.ordinal, index, Version.parse(version)))
                await broker.put_sample(prompt.group, prompt.attempt, index, sample)
            rollout = encode(Rollout(prompt.group, prompt.ordinal, prompt.attempt, "w", ""))
            ids = (entry.id, "w", prompt.group, prompt.attempt)
            await broker.advance(*ids, ("dispatched", "generated"), rollout)
        for entry in await broker.claim(ROLLOUTS, "w", 8, 20):
            rollout = decode(Rollout, entry.data)
            ids = (entry.id, "w", rollout.group, rollout.attempt)
            payloads = await broker.get_samples(rollout.group, rollout.attempt, GROUP_SIZE)
            if None not in payloads:
                samples = [decode(Sample, data) for data in payloads if data]
                verdict = encode(verdict_of(rollout, samples))
                await broker.advance(*ids, ("generated", "judged"), verdict)


@asynccontextmanager
async def workers(url: str, run: str) -> AsyncIterator[None]:
    broker = await Broker.connect(url, run, lease_s=60.0)
    async with broker.lease("worker", "w", {}):
        task = asyncio.create_task(work(broker))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await broker.close()


# --- lives --------------------------------------------------------------------------------------


@dataclass
class Life:
    """One start of the learner: on so many ranks, until a failpoint (none: to its end), or until
    a file grows beyond a limit, which looks like a full disk."""

    ends_at: str = ""
    ranks: int = 1
    largest_file: int = 0

    @property
    def ends_with(self) -> int:
        """The exit status: of SIGKILL, of an error that a person can mend, or of success."""
        return -signal.SIGKILL if self.ends_at else 2 if self.largest_file else 0


def live(config: Config, url: str, *lives: Life) -> None:
    """Start the learner again and again; each life has to end as it is meant to."""
    asyncio.run(_live(config, url, lives))


async def _live(config: Config, url: str, lives: Sequence[Life]) -> None:
    async with workers(url, config.run.name):
        for life in lives:
            codes = await _one_life(config, url, life)
            assert codes[0] == life.ends_with, f"{life}: {codes}\n{said(config)[-3000:]}"


async def _one_life(config: Config, url: str, life: Life) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["learner.engine", "learner.trainer", "learner.main"])
    config.run_dir.mkdir(parents=True, exist_ok=True)
    port = free_port()
    ranks = []
    for rank in range(life.ranks):
        environment = {"DAPO_REDIS_URL": url, "DAPO_LOG_NAME": "learner"}
        if rank == 0:
            environment["DAPO_FAILPOINT"] = life.ends_at
        if life.ranks > 1:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(life.ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        args = (config, environment, life.largest_file)
        ranks.append(context.Process(target=run_learner, args=args))
        ranks[-1].start()
    deadline = time.monotonic() + DEADLINE_S
    while ranks[0].is_alive() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    for rank in ranks[1:]:
        rank.kill() if life.ends_at else rank.join(30)  # as torchrun does when one has died
    for rank in ranks:
        rank.kill()
        rank.join()
    return [rank.exitcode for rank in ranks]


def run_learner(config: Config, environment: dict[str, str], largest_file: int) -> None:
    """The body of a rank's process."""
    os.environ.update(environment)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    out = os.open(config.run_dir / "learner.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from learner.main import main

    try:
        main(config)
    except DapoError as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(error.status) from None


def said(config: Config) -> str:
    """What the learner has printed."""
    return (config.run_dir / "learner.out").read_text()


def resumed(config: Config) -> list[tuple[int | None, list[int]]]:
    """What each life went on from: its checkpoint and the batches that it trained again."""
    lines = (config.run_dir / "logs" / "learner.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(r["checkpoint"], r["replayed"]) for r in rows if r["event"] == "resumed"]
