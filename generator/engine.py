"""The inference engine: the only file that knows vLLM's engine API.

An `Engine` holds one vLLM engine process (or several, under tensor parallelism) and is used from
one asyncio loop. Invariants:

- A sample comes back whole, with log-probs of the distribution that it was sampled from and the
  policy versions of its tokens, or as a `GenerationError`.
- From the start of an update until it has succeeded nothing can be generated: a half-updated
  model never makes a token.
- The engine's processes die with this one (see `generator.plugin`). Start it from the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from common.config import Config
from common.errors import ConfigError, DapoError, RoundError
from common.messages import Prompt, Sample, Span, Version
from generator.plugin import BACKEND, QUEUE_SLEEP

Progress = Callable[[int], None]

PROGRESS_INTERVAL_S = 1.0
START = Version(0, 0)


class GenerationError(DapoError):
    """A sample that did not come about; the message says why. It may be tried again."""


class EngineDead(DapoError):
    """The engine's processes are gone; this process has to be started again."""


class Engine:
    """One vLLM engine. Make it with `Engine.start`."""

    def __init__(
        self, llm: Any, tokenizer: Any, stop_ids: list[int], clear_cache: bool, name: str
    ) -> None:
        self._llm = llm
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._clear_cache = clear_cache
        self._name = name
        self._ids = itertools.count()
        self._running: dict[str, Progress | None] = {}
        self._paused = False
        self._whole = True
        self._watch = asyncio.create_task(self._watch_progress())
        self.version = START

    @classmethod
    async def start(
        cls,
        config: Config,
        model_dir: Path,
        version: Version = START,
        name: str = "",
    ) -> Engine:
        """Load the weights of `model_dir` as `version`; returns when the engine can generate.

        Raises:
            ConfigError: the folder has no stop token, or vLLM refuses the model or the settings.
        """
        _set_environment(config)
        from transformers import AutoTokenizer
        from vllm.v1.engine.async_llm import AsyncLLM

        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        stop_ids = stop_token_ids(model_dir, tokenizer.eos_token_id)
        try:
            llm = AsyncLLM.from_engine_args(_engine_args(config, model_dir))
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(f"the engine did not start with {model_dir}: {error}") from error
        engine = cls(llm, tokenizer, stop_ids, not config.generator.keep_kv_cache, name)
        await engine._set_version(version)
        return engine

    @property
    def busy(self) -> int:
        """Number of samples asked for and not yet answered."""
        return len(self._running)

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
        different `salt` share no cached prefix; use the policy version. While it runs,
        `on_tokens` gets the number of tokens so far, about every second and only when it grew.
        While the engine is paused this waits.

        Raises:
            GenerationError: aborted, refused, or the answer is not whole.
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
        started = time.monotonic()
        output = await self._run(prompt.token_ids, salt, params, on_tokens)
        return self._sample(output.outputs[0], time.monotonic() - started)

    async def probe(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Log-probs, at temperature 1 and without any cache, of `token_ids[1:]` given what is
        before them, under the current weights: an array one shorter than the tokens.

        Call it after `resume`: a paused scheduler takes nothing new.

        Raises:
            GenerationError: longer than the context, or the answer is not whole.
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
        output = await self._run(token_ids, f"probe {self.version}", params, None)
        logprobs = np.asarray(output.prompt_logprobs.logprobs, dtype=np.float32)
        if len(logprobs) != len(token_ids) - 1 or not np.isfinite(logprobs).all():
            raise GenerationError(f"probe: {len(logprobs)} finite log-probs expected")
        return logprobs

    async def pause(self) -> None:
        """Stop between two steps; running samples stay and go on after `resume`.

        Their KV cache is kept or cleared as generator.keep_kv_cache says.
        """
        with self._deaths():
            await self._llm.pause_generation(mode="keep", clear_cache=self._clear_cache)
        self._paused = True

    async def update(
        self, init_info: dict[str, Any] | None, update_info: dict[str, Any], version: Version
    ) -> None:
        """Take part in a weight round, as `version`; call it between `pause` and `resume`.

        Args:
            init_info: fields of `generator.weights.InitInfo`, where the group is a new one.
            update_info: fields of `generator.weights.UpdateInfo`.

        Raises:
            RoundError: of any worker's failure. The engine has left the group and is no longer
                `whole` until an update with `init_info` has succeeded.
            EngineDead: the engine's processes are gone.
        """
        from vllm.distributed.weight_transfer.base import (
            WeightTransferInitRequest,
            WeightTransferUpdateRequest,
        )

        if not self._paused:
            raise RoundError("the engine has to be paused before an update")
        self._whole = False
        with self._deaths():
            if init_info is not None:
                await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info))
            # Also after a failure: it puts the model in a state from which a round can start.
            await self._llm.finish_weight_update()
            failures = await self._llm.collective_rpc("weight_failure")
            if any(failures):
                await self._llm.shutdown_weight_transfer_engine()
                raise RoundError("; ".join(sorted({text for text in failures if text})))
            await self._set_version(version)
        self._whole = True

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            RoundError: the last update failed; only a full round makes the engine whole again.
        """
        if not self._whole:
            raise RoundError("the engine is half-updated and cannot resume; run a full round")
        with self._deaths():
            await self._llm.resume_generation()
        self._paused = False

    async def abort_all(self) -> None:
        """End every running sample, also while paused; each raises `GenerationError`."""
        if self._running:
            await self._llm.abort(list(self._running))

    async def close(self) -> None:
        """End the engine's processes."""
        self._watch.cancel()
        self._llm.shutdown()

    async def _set_version(self, version: Version) -> None:
        await self._llm.update_weight_version(str(version))
        self.version = version

    async def _run(
        self, token_ids: npt.NDArray[np.int32], salt: str, params: Any, on_tokens: Progress | None
    ) -> Any:
        """The final output of one request."""
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if not self._whole:
            raise GenerationError("the engine is half-updated; run a full weight round")
        request = f"{self._name or 'sample'}-{next(self._ids)}"
        prompt = TokensPrompt(prompt_token_ids=token_ids.tolist(), cache_salt=salt)
        self._running[request] = on_tokens
        final = None
        try:
            async with contextlib.aclosing(self._llm.generate(prompt, params, request)) as outputs:
                async for output in outputs:
                    final = output
        except EngineDeadError as error:
            raise EngineDead("the engine process has ended; see its log") from error
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

        The counts are read off vLLM's output processor once in a while, because streaming
        every step to every sample costs far more than generating without it.
        """
        processor = self._llm.output_processor
        reported: dict[str, int] = {}
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            reported = {key: n for key, n in reported.items() if key in self._running}
            for request, on_tokens in list(self._running.items()):
                if on_tokens is None:
                    continue
                states = processor.external_req_ids.get(request, ())
                count = sum(
                    processor.request_states[key].detokenizer.num_output_tokens() for key in states
                )
                if count > reported.get(request, 0):
                    reported[request] = count
                    on_tokens(count)

    @contextlib.contextmanager
    def _deaths(self) -> Any:
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


def stop_token_ids(model_dir: Path, eos_token_id: int | None) -> list[int]:
    """Every token that ends a response: of the tokenizer and of the generation config.

    Raises:
        ConfigError: there is none, so that no response would ever end.
    """
    stops = set() if eos_token_id is None else {eos_token_id}
    path = model_dir / "generation_config.json"
    if path.exists():
        listed = json.loads(path.read_text()).get("eos_token_id")
        stops.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if not stops:
        raise ConfigError(
            f"{model_dir} names no end-of-sequence token, so that no response would ever end; "
            "set eos_token_id in its tokenizer or generation_config.json"
        )
    return sorted(stops)


def _set_environment(config: Config) -> None:
    """What vLLM and its processes read from the environment; before vllm is imported."""
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(config.generator.threads),
        # Binding would put the engines of one machine on the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    os.environ.update(fixed)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.generator.tensor_parallel > 1:
        os.environ.setdefault(QUEUE_SLEEP, "0.0005")


def _engine_args(config: Config, model_dir: Path) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    generator = config.generator
    settings: dict[str, Any] = {}
    if current_platform.is_cpu():
        settings["kv_cache_memory_bytes"] = math.ceil(generator.kv_cache_gib * 2**30)
        # A prompt prefilled in parts rewinds its sample's random generator, which on a CPU
        # ends the whole engine ("CPU Generator does not use offset").
        settings["enable_chunked_prefill"] = False
        if generator.tensor_parallel == 1:
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            # The class, since vLLM turns the name "uni" into its multi-process executor, which
            # starves whoever shares the machine.
            settings["distributed_executor_backend"] = UniProcExecutor
    else:
        settings["gpu_memory_utilization"] = generator.gpu_memory_utilization
    return AsyncEngineArgs(
        model=str(model_dir),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=config.model.dtype,
        seed=config.run.seed,
        max_model_len=config.model.max_length,
        max_num_seqs=generator.max_samples,
        tensor_parallel_size=generator.tensor_parallel,
        enforce_eager=generator.enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="generator.weights.WeightReport",
        disable_log_stats=True,
        **settings,
    )
