"""Sequences as rows of a micro-batch: which go together, and how they lie.

padded: one row for each sequence, filled up on the right. Under causal attention no real position
sees a padded one, so nothing has to be masked and SDPA keeps its fast causal path.
packed: all sequences in one row, positions counted from 0 in each. From positions that start again
transformers recognises where a sequence ends: flash-attention then gets lengths, other kinds of
attention a dense mask, which is right but slow.

Dimensions: B rows, T positions of a row, N response tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Tokens = npt.NDArray[np.int32]
Layout = Literal["padded", "packed"]

PAD = 0  # any valid token: nothing attends to a position on its right


class Rows(NamedTuple):
    """Sequences and where their responses are.

    `position_ids_BT` is None where every row counts from 0. `index_N` points into the flattened
    B·T positions, at the one whose output predicts the token in `labels_N`: the last of the prompt
    for the first token of a response.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor | None
    index_N: Tensor
    labels_N: Tensor

    def to(self, device: torch.device) -> Rows:
        return Rows(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]


def plan_micro_batches(
    lengths: Sequence[int], token_budget: int, layout: Layout = "padded"
) -> list[list[int]]:
    """Indices of sequences of similar length, at most `token_budget` positions a micro-batch.

    Positions are rows × the longest row, or the sum of lengths where sequences are packed. The
    longest come first, so that memory runs out at once or never. A sequence above the budget is
    alone.
    """
    plan: list[list[int]] = []
    longest = total = 0
    for index in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = lengths[index]
        count = len(plan[-1]) + 1 if plan else 1
        positions = total + length if layout == "packed" else count * longest
        if not plan or positions > token_budget:
            plan.append([])
            longest, total = length, 0
        plan[-1].append(index)
        total += length
    return plan


def lay_out(pairs: Sequence[tuple[Tokens, Tokens]], layout: Layout = "padded") -> Rows:
    """Rows of (prompt, response) pairs; responses follow each other in `labels_N`."""
    prompts = np.array([len(prompt) for prompt, _ in pairs], dtype=np.int64)
    responses = np.array([len(response) for _, response in pairs], dtype=np.int64)
    totals = prompts + responses
    tokens = np.concatenate([part for pair in pairs for part in pair]).astype(np.int64)
    sequence, position = _coordinates(totals)
    if layout == "packed":
        starts = np.cumsum(totals) - totals
        ids_BT, positions = tokens[None], torch.from_numpy(position[None])
    else:
        width = int(totals.max())
        starts = np.arange(len(pairs)) * width
        ids_BT, positions = np.full((len(pairs), width), PAD, dtype=np.int64), None
        ids_BT[sequence, position] = tokens
    sequence, position = _coordinates(responses)
    index_N = starts[sequence] + prompts[sequence] - 1 + position
    labels_N = np.concatenate([response for _, response in pairs]).astype(np.int64)
    ids, index, labels = (torch.from_numpy(array) for array in (ids_BT, index_N, labels_N))
    return Rows(ids, positions, index, labels)


def _coordinates(lengths: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Sequence, and position within it, of every token of sequences with these lengths."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return sequence, np.arange(len(sequence)) - starts[sequence]
