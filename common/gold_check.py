"""Golds of slow checkers, tried out before a run: does a checker credit its own gold?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from verifier.outcome import Verdict
from verifier.pool import CheckerPool


def check_golds(asked: Sequence[tuple[str, str]]) -> list[Verdict]:
    """The verdict of each (checker, gold) on a response that answers with the gold.

    `error` means that the checker cannot work with it; what is merely not credited may be due to
    a checker that expects responses of another form.
    """
    return asyncio.run(_check(asked))


async def _check(asked: Sequence[tuple[str, str]]) -> list[Verdict]:
    async with CheckerPool(warm=tuple({name for name, _ in asked})) as pool:
        checks = (
            pool.check(name, f"\\boxed{{{gold}}}", gold, {"boxed": True}) for name, gold in asked
        )
        return list(await asyncio.gather(*checks))
