"""How token losses become the loss of an optimizer batch: one scale for each response.

The loss is Σ s·ℓ over the trained tokens of all ranks and micro-batches, where s is the same for
every token of a response and depends on counts of the whole optimizer batch alone. So the loss
does not depend on how the batch is split or packed.

A token counts if its trajectory is not masked and its behaviour log-prob is finite. What does
not count is in no numerator and in no denominator: a response or a group without a token that
counts is not one of the responses or groups that are averaged over, rather than a zero among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from common.algorithm import Aggregation
from learner.batch import Trajectory


class Counts(NamedTuple):
    """Tokens that count, and the responses and groups with at least one of them."""

    tokens: int
    responses: int
    groups: int


def counts(items: Sequence[Trajectory]) -> Counts:
    """Counts of one rank's part; those of all ranks are their sums, as groups are never split."""
    tokens = [item.trained_tokens for item in items]
    groups = {item.group for item, count in zip(items, tokens, strict=True) if count}
    return Counts(sum(tokens), sum(count > 0 for count in tokens), len(groups))


def token_scales(
    items: Sequence[Trajectory], total: Counts, aggregation: Aggregation, constant: float
) -> list[float]:
    """The factor s of the tokens of each response in the loss of the optimizer batch.

    `total` are the counts of the whole optimizer batch, `items` whole groups of it. With n_i
    tokens that count in response i and n_g in its group:

    token     1 / tokens                DAPO as verl computes it: all tokens count the same
    group     1 / (n_g · groups)        DAPO, arXiv 2503.14476, equation 8, averaged over groups
    sequence  1 / (n_i · responses)     GRPO, arXiv 2402.03300, equation 3
    constant  1 / (constant · responses)    Dr. GRPO, arXiv 2503.20783

    A response without a token that counts has factor 0. The factors of all tokens that count add
    up to 1, but for `constant`.
    """
    own = [item.trained_tokens for item in items]
    of_group: Counter[int] = Counter()
    for item, tokens in zip(items, own, strict=True):
        of_group[item.group] += tokens
    denominators: dict[Aggregation, list[float]] = {
        "token": [total.tokens] * len(items),
        "group": [of_group[item.group] * total.groups for item in items],
        "sequence": [tokens * total.responses for tokens in own],
        "constant": [constant * total.responses] * len(items),
    }
    chosen = denominators[aggregation]
    return [1.0 / number if tokens else 0.0 for number, tokens in zip(chosen, own, strict=True)]
