"""DAPO as a plain synchronous loop: what a run with `admission.max_staleness = 0` has to equal.

    python -m tests.e2e.synchronous_loop RECIPE FOLDER [SECTION.KEY=VALUE …]

One process, no queue, one stage after the other: generate groups in the order of the data until
enough of them are mixed, train on those, load the new weights into the engine, and so on. It shares
with the pipeline the two engines, the prompts with their seeds, and the pure functions of reward,
advantage and mini-batches. FOLDER gets `trained.json`, which holds the token ids of every sample
trained, by batch and ordinal, and the ordinals filtered; and `export/`, the final weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from common.config import Config, load_config
from common.data import Row, load_rows
from common.messages import Prompt, Sample, Version
from common.order import Shuffled
from common.startup import resolve
from common.transport import WeightGroup, send_buckets, serve_store
from generator.engine import Engine
from learner.advantage import group_advantages
from learner.batch import Trajectory, mini_batches
from learner.engine import TrainEngine
from learner.streams import Streams
from learner.timeline import Timeline
from verifier import registry
from verifier.reward import shaped_reward

HOST = "127.0.0.1"
BUCKET_BYTES = 2**20
TIMEOUT_S = 60.0


@dataclass
class Group:
    """One prompt's samples, and which of them are correct."""

    ordinal: int
    prompt: Prompt
    samples: list[Sample]
    correct: list[bool]

    @property
    def mixed(self) -> bool:
        return 0 < sum(self.correct) < len(self.correct)


@dataclass
class Trained:
    """What the loop leaves behind for a comparison."""

    batches: list[dict[int, list[list[int]]]] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)


async def train(config: Config, folder: Path) -> None:
    """The loop."""
    model = Path(config.model.path)
    engine = await Engine.start(config, model)
    trainer = TrainEngine(config, model)
    weights = Weights(engine, trainer)
    prompts = map(_prompts(config, model), itertools.count())
    trained = Trained()
    algorithm = config.algorithm
    for version in range(config.run.batches):
        batch: list[Group] = []
        while missing := algorithm.groups_per_batch - len(batch):
            wave = [generate(engine, next(prompts), config) for _ in range(missing)]
            for group in await asyncio.gather(*wave):
                if group.mixed:
                    batch.append(group)
                else:
                    trained.filtered.append(group.ordinal)
        trained.batches.append(
            {group.ordinal: [s.token_ids.tolist() for s in group.samples] for group in batch}
        )
        trainer.set_learning_rate(version + 1)
        minis = mini_batches(batch, algorithm.updates_per_batch, config.run.seed, version)
        trainer.train_batch(
            [[t for group in mini for t in trajectories(group, config)] for mini in minis], version
        )
        await weights.load(Version(1, version + 1))
    trainer.export_hf(folder / "export", model)
    (folder / "trained.json").write_text(json.dumps(vars(trained)))
    await engine.close()


def _prompts(config: Config, model: Path) -> Callable[[int], Prompt]:
    """Ordinal to prompt, as the learner's dispatcher has it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    data, verifier = config.data, config.verifier
    limits = (data.template, config.max_prompt_tokens, verifier.checker, verifier.boxed)
    rows: list[Row] = load_rows(data.train, tokenizer, *limits)
    order = Shuffled(len(rows), config.run.seed)
    nowhere: Any = None  # there is no server
    streams = Streams(config, nowhere, Timeline(Path(), [0]))

    def prompt(ordinal: int) -> Prompt:
        index = order.row(ordinal)
        return streams.prompt(str(ordinal), ordinal, 0, index, rows[index], published=0)

    return prompt


async def generate(engine: Engine, prompt: Prompt, config: Config) -> Group:
    """The samples of a prompt, each judged."""
    indices = range(prompt.samples)
    samples = await asyncio.gather(*(engine.generate(prompt, index, "") for index in indices))
    correct = []
    for sample in samples:
        options = {
            "boxed": prompt.boxed,
            "exact_arithmetic": config.verifier.exact_arithmetic,
            "truncated": sample.finish_reason == "length",
        }
        verdict = registry.run(prompt.checker, sample.text, prompt.gold, options)
        assert verdict.outcome != "error", verdict
        correct.append(verdict.correct)
    return Group(prompt.ordinal, prompt, samples, correct)


def trajectories(group: Group, config: Config) -> list[Trajectory]:
    """The samples with their advantages."""
    reward, algorithm = config.reward, config.algorithm
    rewards = [
        shaped_reward(
            correct,
            len(sample.token_ids),
            max_tokens=config.sampling.max_tokens,
            cache=reward.overlong_cache,
            factor=reward.overlong_factor,
            correct_reward=reward.correct,
            wrong_reward=reward.wrong,
        )
        for sample, correct in zip(group.samples, group.correct, strict=True)
    ]
    advantages = group_advantages(
        rewards,
        algorithm.advantage_normalization,
        algorithm.advantage_ddof,
        algorithm.advantage_epsilon,
    )
    return [
        Trajectory(
            group=group.ordinal,
            sample=index,
            prompt_ids=group.prompt.token_ids,
            response_ids=sample.token_ids,
            logprobs=sample.logprobs,
            advantage=float(advantages[index]),
            spans=sample.spans,
        )
        for index, sample in enumerate(group.samples)
    ]


class Weights:
    """Takes the trainer's weights over into the engine, while nothing is generated."""

    def __init__(self, engine: Engine, trainer: TrainEngine) -> None:
        self.engine, self.trainer = engine, trainer
        self.store: Any = serve_store(HOST)

    async def load(self, version: Version) -> None:
        prefix = str(version)
        init = {
            "host": HOST, "port": self.store.port, "prefix": prefix, "rank_offset": 1,
            "world": 2, "backend": "gloo", "timeout_s": TIMEOUT_S,
        }  # fmt: skip
        update = {
            "manifest": [[name, list(shape)] for name, shape in self.trainer.manifest()],
            "dtype": "float32", "bucket_bytes": BUCKET_BYTES, "version": prefix,
        }  # fmt: skip
        await self.engine.pause()
        sent = asyncio.to_thread(self._send, prefix)
        await asyncio.gather(sent, self.engine.update(init, update, version))
        await self.engine.resume()

    def _send(self, prefix: str) -> None:
        group = WeightGroup.form("gloo", self.store, prefix, 0, 2, TIMEOUT_S, HOST)
        buckets = (flat for _, flat in self.trainer.buckets(BUCKET_BYTES, torch.float32))
        send_buckets(group, buckets, lambda: True)  # type: ignore[arg-type]
        group.close()


if __name__ == "__main__":
    recipe, folder, *sets = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    asyncio.run(train(resolve(load_config(Path(recipe), sets)), Path(folder)))
