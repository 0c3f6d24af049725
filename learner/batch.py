"""From trained groups to padded micro-batches: order, split over ranks, plan, collation.

Everything here is a pure function of its arguments, so that every rank, and every replay of a
batch file, arrives at the same optimizer batch. The loss does not depend on how a mini-batch is
split over ranks and micro-batches; only speed and memory do.

Dimensions: B rows of a micro-batch, T padded positions of a row, N response tokens of all rows.
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

Item = TypeVar("Item")
Tokens = npt.NDArray[np.int32]
Reals = npt.NDArray[np.float32]

PAD = 0  # any valid token: nothing attends to a position on its right


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One response of an accepted group, ready to train on.

    `logprobs` are those of the behaviour policy, as recorded at sampling time; spans cover the
    response without gap or overlap. A masked trajectory counts in its group's mean and standard
    deviation and in no loss.
    """

    group: int
    sample: int
    prompt_ids: Tokens
    response_ids: Tokens
    logprobs: Reals
    advantage: float
    spans: Sequence[Span]
    masked: bool = False

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
        """Versions between the policy that sampled each token and `version`, shape (tokens,)."""
        numbers = np.array([version - span.number for span in self.spans], dtype=np.int32)
        return np.repeat(numbers, [span.end - span.start for span in self.spans])

    def trained(self) -> npt.NDArray[np.bool_]:
        """Tokens that count in the loss: none if masked, else those with a finite log-prob."""
        return np.isfinite(self.logprobs) & (not self.masked)


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


def plan_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of sequences of similar length, at most `token_budget` padded tokens a batch.

    Padded tokens are rows × the longest row. The longest come first, so that memory runs out at
    once or never. A sequence above the budget is alone.
    """
    plan: list[list[int]] = []
    room = 0
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        if room == 0:
            plan.append([])
            room = max(1, token_budget // max(1, lengths[index]))
        plan[-1].append(index)
        room -= 1
    return plan


class Rows(NamedTuple):
    """Right-padded sequences and where their responses are.

    `index_N` points into the flattened B·T positions, at the one whose output predicts the
    token in `labels_N`: the last of the prompt for the first token of a response.
    """

    input_ids_BT: Tensor
    index_N: Tensor
    labels_N: Tensor


class MicroBatch(NamedTuple):
    """Rows with what the loss needs of each response token.

    `counted_N` is false in masked trajectories; `old_N` is None where the ratio is against the
    behaviour policy itself.
    """

    rows: Rows
    behaviour_N: Tensor
    old_N: Tensor | None
    advantage_N: Tensor
    counted_N: Tensor
    age_N: Tensor


def pack_rows(pairs: Sequence[tuple[Tokens, Tokens]]) -> Rows:
    """Right-pad (prompt, response) pairs; responses follow each other in `labels_N`."""
    prompts = np.array([len(prompt) for prompt, _ in pairs], dtype=np.int64)
    responses = np.array([len(response) for _, response in pairs], dtype=np.int64)
    totals = prompts + responses
    width = int(totals.max())
    ids_BT = np.full((len(pairs), width), PAD, dtype=np.int64)
    row, column = _coordinates(totals)
    ids_BT[row, column] = np.concatenate([part for pair in pairs for part in pair])
    row, column = _coordinates(responses)
    index_N = row * width + prompts[row] - 1 + column
    labels_N = np.concatenate([response for _, response in pairs]).astype(np.int64)
    return Rows(*(torch.from_numpy(array) for array in (ids_BT, index_N, labels_N)))


def collate(
    trajectories: Sequence[Trajectory], version: int, old: Sequence[Reals] | None = None
) -> MicroBatch:
    """One micro-batch; `old` holds the learner's own log-probs of each response, if scored."""
    lengths = [len(trajectory.response_ids) for trajectory in trajectories]
    advantages = np.array([trajectory.advantage for trajectory in trajectories], dtype=np.float32)
    return MicroBatch(
        pack_rows([(item.prompt_ids, item.response_ids) for item in trajectories]),
        _joined([item.logprobs for item in trajectories], np.float32),
        None if old is None else _joined(old, np.float32),
        torch.from_numpy(np.repeat(advantages, lengths)),
        torch.from_numpy(np.repeat([not item.masked for item in trajectories], lengths)),
        _joined([item.ages(version) for item in trajectories], np.int64),
    )


def idle_micro_batch() -> MicroBatch:
    """Two tokens of which none counts: keeps an idle rank in step with the others."""
    nothing = np.zeros(1, dtype=np.int32)
    idle = Trajectory(
        -1, -1, nothing, nothing, np.zeros(1, np.float32), 0.0, [Span(0, 0, 0, 1)], masked=True
    )
    return collate([idle], version=0)


def _coordinates(lengths: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Row and position within the row of every token of rows with these lengths."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return row, np.arange(len(row)) - starts[row]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype))
