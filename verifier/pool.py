from __future__ import annotations
from typing import Any
from verifier import math_answer
from verifier.outcome import Verdict


class CheckerPool:
    def __init__(self, *args: Any) -> None: ...

    async def check(self, name: str, text: str, gold: str, options: dict[str, Any]) -> Verdict:
        return math_answer.check(text, gold, **options)

    async def close(self) -> None: ...
