"""From trained groups to micro-batches: order, split over ranks, collation.

Everything here is a pure function of its arguments, so that every rank, and every replay of a
batch file, arrives at the same optimizer batch. The loss does not depend on how a mini-batch is
split over ranks and micro-batches; only speed and memory do.

Dimension N: the response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.messages import Span
from learner.rows import Layout, Rows, Tokens, lay_out

Item = TypeVar("Item")
Reals = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response of an accepted group, ready to train on.

    `logprobs` are those of the behaviour policy, as recorded at sampling time; spans cover the
    response without gap or overlap. A masked trajectory counts in its group's mean and standard
    deviation and in no loss. With `kept_cache` the engine kept its KV cache across updates, so
    that tokens behind one in mid-response depend on the older weights too.
    """

    group: int
    sample: int
    prompt_ids: Tokens
    response_ids: Tokens
    logprobs: Reals
    advantage: float
    spans: Sequence[Span]
    masked: bool = False
    kept_cache: bool = False

    def __post_init__(self) -> None:
        where = f"trajectory {self.group}/{self.sample}"
        if len(self.prompt_ids) == 0:
            raise ValueError(f"{where} has an empty prompt; the first token has no context")
        if len(self.logprobs) != len(self.response_ids):
            raise ValueError(
                f"{where}: {len(self.logprobs)} log-probs for {len(self.response_ids)} tokens"
            )
        if sum(span.end - span.start for span in self.spans) != len(self.response_ids):
            raise ValueError(f"{where}: version spans {list(self.spans)} do not cover the response")

    @property
    def tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    def ages(self, version: int) -> Tokens:
        """Versions between the oldest policy behind each token and `version`, shape (tokens,).

        That is the one that sampled it; with a kept cache, the oldest of the response.
        """
        numbers = np.array([version - span.number for span in self.spans], dtype=np.int32)
        if self.kept_cache:
            numbers[:] = numbers.max(initial=0)
        return np.repeat(numbers, [span.end - span.start for span in self.spans])

    def trained(self) -> npt.NDArray[np.bool_]:
        """Tokens that count in the loss: none if masked, else those with a finite log-prob."""
        return np.isfinite(self.logprobs) & (not self.masked)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained().sum())


def token_count(item: Trajectory | Sequence[Trajectory]) -> int:
    """Tokens of a trajectory or of a whole group."""
    if isinstance(item, Trajectory):
        return item.tokens
    return sum(trajectory.tokens for trajectory in item)


def mini_batches(groups: Sequence[Item], updates: int, seed: int, version: int) -> list[list[Item]]:
    """Cut the groups of a batch into `updates` equal mini-batches of whole groups.

    The order is shuffled by (run seed, version) and by nothing else: pass the groups in the
    order of the batch's manifest, and a replay sees the same mini-batches.
    """
    if updates < 1 or len(groups) % updates:
        raise ValueError(f"{len(groups)} groups do not divide into {updates} equal mini-batches")
    order = np.random.default_rng([seed, version]).permutation(len(groups))
    return [[groups[index] for index in part] for part in np.split(order, updates)]


def share(
    items: Sequence[Item], world: int, rank: int, tokens: Callable[[Item], int] | None = None
) -> list[Item]:
    """The items of one mini-batch that `rank` trains, balanced by tokens, in their order.

    Largest first to the least loaded rank, the lowest of equals. `tokens` counts an item's
    tokens; by default items are trajectories or groups of them. Ranks may get nothing.
    """
    count: Callable[[Any], int] = tokens or token_count
    sizes = np.array([count(item) for item in items], dtype=np.int64)
    load = np.zeros(world, dtype=np.int64)
    owner = np.zeros(len(items), dtype=np.int64)
    for index in np.argsort(-sizes, kind="stable"):
        owner[index] = load.argmin()
        load[owner[index]] += sizes[index]
    return [items[index] for index in np.flatnonzero(owner == rank)]


class MiniBatch(NamedTuple):
    """This rank's part of what one optimizer step trains on.

    For each trajectory: the factor of its tokens in the loss (`aggregation.token_scales`), and the
    log-probs of its response under the learner's policy at the start of the batch and under the
    reference policy, where the loss needs them.
    """

    items: Sequence[Trajectory]
    scales: Sequence[float]
    start: Sequence[Reals] | None = None
    reference: Sequence[Reals] | None = None


class MicroBatch(NamedTuple):
    """Rows with what the loss needs of each response token.

    `counted_N` is false in masked trajectories, `response_N` numbers the trajectories from 0 to
    `responses` − 1. `start_N` and `reference_N` are None where the mini-batch has none.
    """

    rows: Rows
    responses: int
    response_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    counted_N: Tensor
    age_N: Tensor
    scale_N: Tensor
    start_N: Tensor | None
    reference_N: Tensor | None

    def to(self, device: torch.device) -> MicroBatch:
        rows, responses, *columns = self
        moved = [None if column is None else column.to(device) for column in columns]
        return MicroBatch(rows.to(device), responses, *moved)  # type: ignore[arg-type]


def collate(
    mini: MiniBatch, chosen: Sequence[int], version: int, layout: Layout = "padded"
) -> MicroBatch:
    """The micro-batch of the chosen trajectories; `version` is the policy's before the batch."""
    items = [mini.items[index] for index in chosen]
    lengths = [len(item.response_ids) for item in items]

    def each(values: Sequence[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=dtype), lengths))

    def scored(logprobs: Sequence[Reals] | None) -> Tensor | None:
        return None if logprobs is None else _joined([logprobs[i] for i in chosen], np.float32)

    return MicroBatch(
        rows=lay_out([(item.prompt_ids, item.response_ids) for item in items], layout),
        responses=len(items),
        response_N=each(range(len(items)), np.int64),
        behaviour_N=_joined([item.logprobs for item in items], np.float32),
        advantage_N=each([item.advantage for item in items], np.float32),
        counted_N=each([not item.masked for item in items], np.bool_),
        age_N=_joined([item.ages(version) for item in items], np.int64),
        scale_N=each([mini.scales[index] for index in chosen], np.float32),
        start_N=scored(mini.start),
        reference_N=scored(mini.reference),
    )


def idle_micro_batch() -> MicroBatch:
    """Two tokens of which none counts: keeps an idle rank in step with the others."""
    nothing = np.zeros(1, dtype=np.int32)
    idle = Trajectory(
        -1, -1, nothing, nothing, np.zeros(1, np.float32), 0.0, [Span(0, 0, 0, 1)], masked=True
    )
    return collate(MiniBatch([idle], [0.0]), [0], version=0)


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))
