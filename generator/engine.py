"""The inference engine: with `generator.settings` all that knows vLLM's engine API.

An `Engine` holds one vLLM engine process (or several, under tensor parallelism) and is used from
one asyncio loop. Invariants:

- A sample comes back whole, with log-probs of the distribution that it was sampled from and the
  policy versions of its tokens, or as a `GenerationError`.
- From the start of an update until it has succeeded nothing is generated: a half-updated model
  never makes a token.
- A sample starts from no cached prefix of weights older than its first token's.
- The engine's processes die with this one (see `generator.plugin`). Start it from the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.config import Config
from common.errors import ConfigError, DapoError, RoundError
from common.messages import Prompt, Sample, Span, Version
from common.stop_tokens import stop_token_ids
from generator.gate import Gate
from generator.settings import engine_args, set_environment

Progress = Callable[[int], None]

PROGRESS_INTERVAL_S = 1.0
START = Version(0, 0)


class GenerationError(DapoError):
    """A sample that did not come about; the message says why. It may be tried again."""


class EngineDead(RuntimeError):
    """The engine's processes are gone or hang; this process has to be started again, as after a
    crash."""


class Engine:
    """One vLLM engine. Make it with `Engine.start`."""

    def __init__(
        self, llm: Any, tokenizer: Any, stop_ids: list[int], config: Config, name: str
    ) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._keep_cache = config.generator.keep_kv_cache
        self._name = name
        self._gate = Gate(config.generator.max_samples)
        self._ids = itertools.count()
        self._running: dict[str, Progress | None] = {}
        self._busy = 0
        self._paused = False
        self._updating = False
        self._whole = True
        self._watch = asyncio.create_task(self._watch_progress())
        self.version = START

    @classmethod
    async def start(
        cls, config: Config, model_dir: Path, version: Version = START, name: str = ""
    ) -> Engine:
        """Load the weights of `model_dir` as `version`; returns when the engine can generate.

        Raises:
            ConfigError: the folder has no stop token, or vLLM refuses the model or the settings.
        """
        set_environment(config)
        from transformers import AutoTokenizer
        from vllm.v1.engine.async_llm import AsyncLLM

        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        stop_ids = stop_token_ids(model_dir, tokenizer, config.sampling.stop_tokens)
        try:
            llm = AsyncLLM.from_engine_args(engine_args(config, model_dir))
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"the engine did not start with {model_dir}: {error}") from error
        engine = cls(llm, tokenizer, stop_ids, config, name)
        await engine._set_version(version)
        return engine

    @property
    def busy(self) -> int:
        """Number of samples asked for and not yet answered."""
        return self._busy

    @property
    def on_cpu(self) -> bool:
        """Whether the weights lie in host memory."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    @property
    def dead(self) -> bool:
        """The engine's processes are gone."""
        return bool(self._llm.errored)

    @property
    def whole(self) -> bool:
        """The weights are those of `version`; False from the start of an update to its success."""
        return self._whole

    async def generate(
        self, prompt: Prompt, index: int, salt: str, on_tokens: Progress | None = None
    ) -> Sample:
        """The response number `index` of a prompt.

        Equal (prompt, index) under equal weights draw from equal random numbers. Samples of
        different `salt` share no cached prefix, nor do those of different versions. While it
        runs, `on_tokens` gets the number of tokens so far, about every second and only when it
        grew. Waits while the engine is paused or all its places are taken.

        Raises:
            GenerationError: aborted, refused, the answer is not whole, or the engine is
                half-updated.
            EngineDead: the engine's processes are gone.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=prompt.temperature,
            top_p=prompt.top_p,
            max_tokens=prompt.max_tokens,
            seed=sample_seed(prompt.seed, index),
            stop_token_ids=self._stop_ids,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._busy += 1
        try:
            self._check_whole()
            async with self._gate.place():
                started, version = time.monotonic(), self.version
                output = await self._run(prompt.token_ids, f"{version} {salt}", params, on_tokens)
        finally:
            self._busy -= 1
        sample = self._sample(output.outputs[0], time.monotonic() - started)
        # It was inside before the pause of a round and started after it.
        if output.num_cached_tokens and sample.spans[0][:2] != version:
            raise GenerationError("started from a cached prefix of older weights")
        return sample

    async def probe(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Log-probs, at temperature 1 and without any cache, of `token_ids[1:]` given what is
        before them, under the current weights: an array one shorter than the tokens.

        Call it after `resume`: a paused scheduler takes nothing new. It does not wait for
        running samples to end.

        Raises:
            GenerationError: longer than the context, the answer is not whole, or the engine is
                half-updated.
            EngineDead: the engine's processes are gone.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Asking for prompt log-probs makes vLLM compute every position anew.
        params = SamplingParams(
            temperature=1.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._check_whole()
        output = await self._run(token_ids, f"{self.version} probe", params, None)
        logprobs = np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32)
        if len(logprobs) != len(token_ids) - 1 or not np.isfinite(logprobs).all():
            raise GenerationError(f"probe of {len(token_ids)} tokens: log-probs {logprobs}")
        return logprobs

    async def pause(self) -> None:
        """Stop between two steps; running samples stay and go on after `resume`.

        Their KV cache is kept or cleared as generator.keep_kv_cache says.
        """
        self._gate.shut()
        self._paused = True
        with _deaths():
            await self._llm.pause_generation(mode="keep", clear_cache=not self._keep_cache)

    async def update(
        self, init_info: dict[str, Any] | None, update_info: dict[str, Any], version: Version
    ) -> None:
        """Take part in a weight round, as `version`; call it between `pause` and `resume`.

        Args:
            init_info: fields of `generator.weights.InitInfo`, where the group is a new one.
            update_info: fields of `generator.weights.UpdateInfo`.

        Raises:
            RoundError: of any worker's failure. The engine has left the group and is not `whole`
                until an update with `init_info` has succeeded; samples that wait are failures.
            EngineDead: the engine's processes are gone.
        """
        if not self._paused:
            raise RoundError("the engine has to be paused before an update")
        self._whole, self._updating = False, True
        try:
            with _deaths():
                await self._receive(init_info, update_info)
                await self._set_version(version)
            self._whole = True
        finally:
            self._updating = False
            if not self._whole:
                self._gate.turn_away(GenerationError("the weight round failed"))

    async def _receive(self, init_info: dict[str, Any] | None, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        llm = self._llm
        if init_info is not None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info))
        # Also after a failure: it puts the model in a state from which a round can start.
        await llm.finish_weight_update()
        failures = await llm.collective_rpc("weight_failure")
        if any(failures):
            await llm.shutdown_weight_transfer_engine()
            raise RoundError("; ".join(sorted({text for text in failures if text})))

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            RoundError: the last update failed; only a full round makes the engine whole again.
        """
        if not self._whole:
            raise RoundError("the engine is half-updated and cannot resume; run a full round")
        with _deaths():
            await self._llm.resume_generation()
        self._paused = False
        self._gate.open()

    async def abort_all(self) -> None:
        """End every sample asked for, also while paused; each raises `GenerationError`."""
        self._gate.turn_away(GenerationError("aborted"))
        doomed = set(self._running)
        # Again until they have ended: vLLM ignores ids of requests that are still on their way.
        while doomed := doomed & self._running.keys():
            with _deaths():
                await self._llm.abort(list(doomed))
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End the engine's processes."""
        self._watch.cancel()
        self._llm.shutdown()

    async def _set_version(self, version: Version) -> None:
        await self._llm.update_weight_version(str(version))
        self.version = version

    def _check_whole(self) -> None:
        if not self._whole and not self._updating:
            raise GenerationError("the engine is half-updated; run a full weight round")
        if self._watch.done():
            self._watch.result()  # a callback failed, or vLLM has changed

    async def _run(
        self, token_ids: npt.NDArray[np.int32], salt: str, params: Any, on_tokens: Progress | None
    ) -> Any:
        """The final output of one request."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineGenerateError

        request = f"{self._name or 'sample'}-{next(self._ids)}"
        prompt = tokens_input(token_ids.tolist(), cache_salt=salt)
        self._running[request] = on_tokens
        final = None
        try:
            with _deaths():
                async with contextlib.aclosing(
                    self._llm.generate(prompt, params, request)
                ) as outputs:
                    async for output in outputs:
                        final = output
        except (EngineGenerateError, VLLMClientError) as error:
            raise GenerationError(f"{request}: {error.__cause__ or error}") from error
        finally:
            del self._running[request]
        if final is None or not final.finished:
            raise GenerationError(f"{request}: the engine gave no final output")
        return final

    def _sample(self, output: Any, seconds: float) -> Sample:
        """Check one finished output and turn it into a record."""
        reason = output.finish_reason
        if reason not in ("stop", "length"):
            raise GenerationError(f"finished by {reason!r}, neither stop nor length")
        token_ids = np.asarray(output.token_ids, dtype=np.int32)
        logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
        if len(token_ids) == 0 or len(logprobs) != len(token_ids):
            raise GenerationError(f"{len(token_ids)} tokens with {len(logprobs)} log-probs")
        if not np.isfinite(logprobs).all():
            bad = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise GenerationError(f"log-prob {logprobs[bad]} at token {bad}")
        if not output.weight_versions:
            raise GenerationError("the engine reported no weight versions")
        spans = [Span(*Version.parse(w.version), w.start, w.end) for w in output.weight_versions]
        spoken = token_ids[:-1] if reason == "stop" else token_ids
        return Sample(
            token_ids=token_ids,
            logprobs=logprobs,
            spans=spans,
            finish_reason=reason,
            text=self._tokenizer.decode(spoken, skip_special_tokens=True),
            generator=self._name,
            seconds=seconds,
        )

    async def _watch_progress(self) -> None:
        """Tell each running sample's callback how many tokens there are.

        The counts are read off vLLM's output processor once in a while; having it stream
        every step of every sample would cost work in proportion to the tokens.
        """
        processor = self._llm.output_processor
        reported: dict[str, int] = {}
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            reported = {key: n for key, n in reported.items() if key in self._running}
            for request, on_tokens in list(self._running.items()):
                if on_tokens is None:
                    continue
                states = map(
                    processor.request_states.get, processor.external_req_ids.get(request, ())
                )
                count = sum(state.detokenizer.num_output_tokens() for state in states if state)
                if count > reported.get(request, 0):
                    reported[request] = count
                    on_tokens(count)


@contextlib.contextmanager
def _deaths() -> Iterator[None]:
    """Turn vLLM's error for a dead engine into ours."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDead("the engine process has ended; see its log") from error


def sample_seed(seed: int, index: int) -> int:
    """A 63-bit seed of its own for each sample of a prompt; equal on every machine."""
    text = f"{seed}:{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
