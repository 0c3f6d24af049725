"""What the generator's loop, and its part in weight rounds, need of an engine.

`generator.engine` has the one that generates, `generator.simulated` the one that only pretends.
An engine is used from one asyncio loop. Whatever it is:

- a sample comes back whole or as a `GenerationError`, and no token is made from the start of an
  update until it has succeeded;
- a running sample stays over a pause and goes on after `resume`, with the weights of then: its
  spans say which version made which token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from common.messages import Prompt, Sample, Version

Progress = Callable[[int], None]
"""Called with the number of tokens so far, about every second and only when it grew."""


class SamplingEngine(Protocol):
    """An engine that holds the weights of `version`."""

    version: Version

    @property
    def on_cpu(self) -> bool:
        """Whether the weights lie in host memory."""

    async def generate(
        self, prompt: Prompt, index: int, salt: str, on_tokens: Progress | None = None
    ) -> Sample:
        """The response number `index` of a prompt; waits while paused or full.

        Raises:
            GenerationError: it did not come about and may be tried again.
            EngineDead: this process has to be started again.
        """

    async def probe(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Log-probs of `token_ids[1:]`; empty from an engine that has no model to ask.

        Raises:
            GenerationError, EngineDead: as for `generate`.
        """

    async def pause(self) -> None:
        """Stop between two steps."""

    async def update(
        self, init_info: dict[str, Any] | None, update_info: dict[str, Any], version: Version
    ) -> None:
        """Take part in a weight round while paused.

        Raises:
            RoundError: it failed; only an update with `init_info` makes the engine whole again.
        """

    async def resume(self) -> None:
        """Go on. Raises RoundError if the last update failed."""

    async def abort_all(self) -> None:
        """End every sample asked for; each raises `GenerationError`."""

    async def close(self) -> None:
        """Free what the engine holds."""
