"""From chosen groups to trajectories: who fetches what, and the advantages.

A pure function of the batch decides which rank trains which group, so that a replay of the batch
file, also on another number of ranks, sees the same mini-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.batch_files import StoredGroup
from common.config import Config
from common.errors import MessageError
from common.messages import Prompt, Sample, Verdict, decode
from learner.advantage import group_advantages
from learner.batch import Trajectory, mini_batches, share


class Item(NamedTuple):
    """A group as the plan sees it. `tokens` is what balances the ranks."""

    ordinal: int
    attempt: int
    tokens: int


def response_tokens(verdict: Verdict) -> int:
    return sum(sample.length for sample in verdict.samples)


def split(
    items: Sequence[Item], config: Config, version: int, world: int
) -> list[list[list[Item]]]:
    """The groups of each mini-batch by rank: `[update][rank]`. `version` is the one trained on."""
    ordered = sorted(items)
    minis = mini_batches(ordered, config.algorithm.updates_per_batch, config.run.seed, version)
    return [
        [share(mini, world, rank, lambda item: item.tokens) for rank in range(world)]
        for mini in minis
    ]


def require_trainable(group: StoredGroup, config: Config, vocabulary: int) -> None:
    """Refuse what would end every rank: the payloads come from outside, and weeks may depend on it.

    Raises:
        MessageError: a record that cannot be read, a token id that the model does not have, a
            sequence above model.max_length, or samples of other number or length than were judged.
    """
    limit = config.max_message_bytes
    prompt = decode(Prompt, group.prompt, limit)
    verdict = decode(Verdict, group.verdict, limit)
    if len(verdict.samples) != len(group.samples):
        raise MessageError(f"{len(group.samples)} samples, but {len(verdict.samples)} were judged")
    for judged, payload in zip(verdict.samples, group.samples, strict=True):
        sample = decode(Sample, payload, limit)
        length = len(prompt.token_ids) + len(sample.token_ids)
        if len(sample.token_ids) != judged.length:
            raise MessageError(f"{len(sample.token_ids)} tokens, but {judged.length} were judged")
        if length > config.model.max_length:
            raise MessageError(f"{length} tokens are above {config.model.max_length}")
        highest = max(int(ids.max(initial=0)) for ids in (prompt.token_ids, sample.token_ids))
        if highest >= vocabulary:
            raise MessageError(f"token {highest} in a vocabulary of {vocabulary}")


def trajectories(group: StoredGroup, config: Config) -> list[Trajectory]:
    """The responses of a group with their advantages, ready to train on.

    The overlong filter masks those that the engine cut at the cap, after the advantages are made.
    """
    algorithm = config.algorithm
    limit = config.max_message_bytes
    prompt = decode(Prompt, group.prompt, limit)
    verdict = decode(Verdict, group.verdict, limit)
    samples = [decode(Sample, payload, limit) for payload in group.samples]
    rewards = [judged.reward for judged in verdict.samples]
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
            prompt_ids=prompt.token_ids,
            response_ids=sample.token_ids,
            logprobs=sample.logprobs,
            advantage=float(advantages[index]),
            spans=sample.spans,
            masked=algorithm.overlong_filter and sample.finish_reason == "length",
            kept_cache=config.generator.keep_kv_cache,
        )
        for index, sample in enumerate(samples)
    ]
