"""An engine without a model: `generator.engine = "simulated"`.

Everything around inference is real: claims, payloads, leases, retries, and weight rounds, whose
buckets arrive over gloo, are checked and thrown away. So a deployment, its network and its
failures can be rehearsed on machines without a GPU, with many generators, and in seconds.

What it pretends: a policy that is uniform over the vocabulary, so that every token has the
log-probability -ln(vocabulary); responses of lognormal length at `generator.simulated_*`'s pace,
mean and share of right answers. A right answer is the gold, which travels with the prompt for the
verifier. Equal (seed of the prompt, index) give equal samples. A learner should train on them with
a small learning rate: they are noise, and make noise of its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from common.buckets import plan_buckets
from common.config import Config
from common.errors import ConfigError, RoundError
from common.messages import Prompt, Sample, Span, Version
from generator.engine import START, GenerationError, sample_seed
from generator.gate import Gate
from generator.interface import Progress

STEP_S = 0.02
"""Time between two steps of decoding."""
REPORT_S = 1.0
SIGMA = 0.5
"""Standard deviation of the logarithm of a length."""


@dataclass(frozen=True)
class Draft:
    """A response as it was drawn, before any time was spent on it."""

    length: int
    finish_reason: Literal["stop", "length"]
    text: str
    token_ids: npt.NDArray[np.int32]


def draft(prompt: Prompt, index: int, vocabulary: int, mean: float, accuracy: float) -> Draft:
    """Draw the response number `index` of a prompt.

    One whose length reaches the cap is cut there and gives no answer.
    """
    rng = np.random.default_rng(sample_seed(prompt.seed, index))
    drawn = max(1, round(rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA)))
    # a digit more is another number, whatever the gold
    answer = prompt.gold if rng.random() < accuracy else f"{prompt.gold}1"
    length = min(drawn, prompt.max_tokens)
    token_ids = rng.integers(0, vocabulary, length, dtype=np.int32)
    if drawn >= prompt.max_tokens:
        return Draft(length, "length", "", token_ids)
    return Draft(length, "stop", f"Answer: {answer}", token_ids)


@dataclass(eq=False)
class Running:
    """A sample that is being decoded, and which version made which of its tokens."""

    length: int
    on_tokens: Progress | None
    done: asyncio.Future[None]
    tokens: float = 0.0
    spans: list[Span] = field(default_factory=list)
    reported: tuple[float, int] = (0.0, 0)

    def grow(self, tokens: float, version: Version) -> None:
        """Tokens by `version`, up to the length."""
        start = int(self.tokens)
        self.tokens = min(self.tokens + tokens, float(self.length))
        end = int(self.tokens)
        if end == start:
            return
        last = self.spans[-1] if self.spans else None
        if last and last[:2] == version:
            self.spans[-1] = last._replace(end=end)
        else:
            self.spans.append(Span(*version, start, end))

    def report(self, now: float) -> None:
        count = int(self.tokens)
        if self.on_tokens and now - self.reported[0] >= REPORT_S and count > self.reported[1]:
            self.reported = (now, count)
            self.on_tokens(count)


class SimulatedEngine:
    """See the module; the contract is `generator.interface.SamplingEngine`'s."""

    on_cpu = True

    def __init__(self, config: Config, vocabulary: int, version: Version, name: str) -> None:
        self._settings, self._vocabulary, self._name = config.generator, vocabulary, name
        self._gate = Gate(config.generator.max_samples)
        self._running: set[Running] = set()
        self._sink = WeightSink()
        self._paused = False
        self._whole = True
        self._decoding = asyncio.create_task(self._decode())
        self.version = version

    @classmethod
    async def start(
        cls, config: Config, model_dir: Path, version: Version = START, name: str = ""
    ) -> SimulatedEngine:
        """Ready at once; of the model only the size of its vocabulary is read.

        Raises:
            ConfigError: the folder's config.json names no vocabulary.
        """
        import common.transport  # noqa: F401  # loads torch: now, and not in the first round

        return cls(config, vocabulary_size(model_dir), version, name)

    async def generate(
        self, prompt: Prompt, index: int, salt: str, on_tokens: Progress | None = None
    ) -> Sample:
        """Spend the time of decoding; there is no cache that `salt` could keep apart."""
        settings = self._settings
        self._check_whole()
        async with self._gate.place():
            started = time.monotonic()
            drawn = draft(
                prompt, index, self._vocabulary,
                settings.simulated_length, settings.simulated_accuracy,
            )  # fmt: skip
            done = asyncio.get_running_loop().create_future()
            running = Running(drawn.length, on_tokens, done)
            self._running.add(running)
            try:
                await done
            finally:
                self._running.discard(running)
        logprob = -math.log(self._vocabulary)
        return Sample(
            token_ids=drawn.token_ids,
            logprobs=np.full(drawn.length, logprob, dtype=np.float32),
            spans=running.spans,
            finish_reason=drawn.finish_reason,
            text=drawn.text,
            generator=self._name,
            seconds=time.monotonic() - started,
        )

    async def probe(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Nothing: there is no model. The learner of a simulated run does without."""
        self._check_whole()
        return np.empty(0, dtype=np.float32)

    async def pause(self) -> None:
        self._gate.shut()
        self._paused = True

    async def update(
        self, init_info: dict[str, Any] | None, update_info: dict[str, Any], version: Version
    ) -> None:
        """Receive every bucket of the round, check its digest, and take the version's name."""
        if not self._paused:
            raise RoundError("the engine has to be paused before an update")
        self._whole = False
        try:
            await _in_thread(lambda: self._sink.receive(init_info, update_info))
            self._whole, self.version = True, version
        finally:
            if not self._whole:
                self._gate.turn_away(GenerationError("the weight round failed"))

    async def resume(self) -> None:
        if not self._whole:
            raise RoundError("the engine is half-updated and cannot resume; run a full round")
        self._paused = False
        self._gate.open()

    async def abort_all(self) -> None:
        self._gate.turn_away(GenerationError("aborted"))
        for running in self._running:
            if not running.done.done():
                running.done.set_exception(GenerationError("aborted"))

    async def close(self) -> None:
        self._decoding.cancel()
        self._sink.leave()

    def _check_whole(self) -> None:
        if not self._whole and not self._paused:
            raise GenerationError("the engine is half-updated; run a full weight round")
        if self._decoding.done():
            self._decoding.result()  # a callback failed

    async def _decode(self) -> None:
        """Steps of the whole batch, as an engine makes them; none while paused."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(STEP_S)
            now = time.monotonic()
            step, last = self._settings.simulated_tokens_per_second * (now - last), now
            if self._paused:
                continue
            for running in list(self._running):
                running.grow(step, self.version)
                running.report(now)
                if running.tokens >= running.length and not running.done.done():
                    running.done.set_result(None)


class WeightSink:
    """The receiving end of weight rounds, for buckets that nobody needs."""

    def __init__(self) -> None:
        self._group: Any = None

    def receive(self, init_info: dict[str, Any] | None, update_info: dict[str, Any]) -> None:
        """Blocks until every bucket was here. After a failure this end has left the group.

        Raises:
            RoundError: as `common.transport.receive_buckets`, or no group was formed.
        """
        import torch

        from common.transport import receive_buckets

        if init_info is not None:
            self.leave()
            self._group = _join(**init_info)
        group = self._group
        if group is None:
            raise RoundError("this engine is in no weight group")
        width = getattr(torch, update_info["dtype"]).itemsize
        sizes = [math.prod(shape) * width for _, shape in update_info["manifest"]]
        plan = [
            sum(sizes[i] for i in bucket)
            for bucket in plan_buckets(sizes, update_info["bucket_bytes"])
        ]
        try:
            for _ in receive_buckets(group, plan, torch.device("cpu")):
                pass
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _join(
    host: str, port: int, prefix: str, world: int, rank_offset: int, backend: str, timeout_s: float
) -> Any:
    """The group that the learner's `go` describes."""
    from common.transport import WeightGroup, join_store, local_address

    if backend != "gloo":
        raise RoundError(f"a simulated engine takes weights over gloo, not {backend}")
    store = join_store(host, port, timeout_s)
    own = local_address(host, port)
    return WeightGroup.form("gloo", store, prefix, rank_offset, world, timeout_s, own)


async def _in_thread(work: Callable[[], None]) -> None:
    """Run a blocking call; one that hangs does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error = None
        try:
            work()
        except BaseException as problem:
            error = problem
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    await done


def vocabulary_size(model_dir: Path) -> int:
    """Number of token ids of a Hugging Face folder's model.

    Raises:
        ConfigError: its config.json names none.
    """
    settings = json.loads((model_dir / "config.json").read_text())
    size = settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"{model_dir / 'config.json'} has no vocab_size; is it a causal model?")
    return size
