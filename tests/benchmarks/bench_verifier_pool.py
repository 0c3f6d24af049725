"""Groups per second through verifier processes, from the stream of rollouts to that of verdicts.

    python tests/benchmarks/bench_verifier_pool.py [--groups 128] [--verifiers 1 2]

Each figure is that of a server of its own with N processes `python -m verifier`. Groups are
16 responses of 8,000 tokens and about 30,000 characters. Their payloads are on the server
before the clock starts; it runs from the moment that the first group is handed to the verifiers,
all of which are ready by then, to the last verdict.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.broker import Broker  # noqa: E402
from common.config import Config, load_config  # noqa: E402
from common.entry import PROMPTS, VERDICTS, Entry  # noqa: E402
from common.messages import (  # noqa: E402
    Prompt,
    Rollout,
    Sample,
    Span,
    Verdict,
    Version,
    decode,
    encode,
)
from common.server import EmbeddedServer  # noqa: E402
from learner.streams import Streams  # noqa: E402
from learner.timeline import Timeline  # noqa: E402

SAMPLES, TOKENS, CHARACTERS = 16, 8000, 30_000
VOCABULARY = 150_000
DEADLINE_S = 40.0
GENERATOR = "generator"
RECIPE = """
[run]
name = "bench"
dir = "{folder}"

[model]
path = "model"
max_length = 10240

[data]
train = ["train.jsonl"]

[sampling]
max_tokens = 8192

[algorithm]
group_size = 16

[reward]
overlong_cache = 2048
"""
SENTENCES = (
    "So we need to count the pairs $(a, b)$ with $a + b = {0}$ and $a \\leq {1}$.",
    "Wait, let me check that again: {0} times {1} is {2}, which is not divisible by {3}.",
    "By symmetry the answer is $\\frac{{{0}}}{{{1}}}$ of the total, i.e. \\boxed{{{2}}} at first.",
    "Hmm, if $x = {0}$ then $x^2 - {1}x + {2} = {3}$, so that case gives nothing new.",
    "Therefore the remainder modulo {0} must be {1}.\n\nNow consider the second case.",
    "The answer: it should be somewhere between {0} and {1}, as {2} is too large.",
)


def response(dice: random.Random, answer: int) -> str:
    """A long chain of thought that ends in a claim."""
    parts: list[str] = []
    size = 0
    while size < CHARACTERS:
        numbers = [dice.randrange(2, 1000) for _ in range(4)]
        parts.append(dice.choice(SENTENCES).format(*numbers))
        size += len(parts[-1]) + 1
    return f"{' '.join(parts)}\n\nAnswer: {answer}"


def payloads(seed: int, gold: int) -> list[bytes]:
    """The samples of one group, every second one right."""
    dice, arrays = random.Random(seed), np.random.default_rng(seed)
    return [
        encode(
            Sample(
                token_ids=arrays.integers(0, VOCABULARY, TOKENS, dtype=np.int32),
                logprobs=-arrays.exponential(0.3, TOKENS).astype(np.float32),
                spans=[Span(1, 0, 0, TOKENS // 2), Span(1, 1, TOKENS // 2, TOKENS)],
                finish_reason="stop",
                text=response(dice, gold + index % 2),
                generator=GENERATOR,
                seconds=60.0,
            )
        )
        for index in range(SAMPLES)
    ]


async def generate(config: Config, broker: Broker, count: int) -> tuple[list[Entry], int]:
    """Dispatch groups and write their payloads; the claimed prompts and the bytes written."""
    config.run_dir.mkdir(parents=True)
    timeline = Timeline.open(config.run_dir)
    timeline.begin(0)
    streams = Streams(config, broker, timeline)
    version = Version(timeline.incarnation, 0)
    await broker.publish(timeline.incarnation, str(version))
    variants = [payloads(seed, gold=34) for seed in range(8)]
    size = 0
    for ordinal in range(count):
        prompt = Prompt(
            group=str(ordinal), ordinal=ordinal, attempt=0, evaluation=False, row=0,
            samples=SAMPLES, least=version, token_ids=np.arange(200, dtype=np.int32), seed=0,
            temperature=1.0, top_p=1.0, max_tokens=config.sampling.max_tokens, gold="34",
            checker="math", boxed=True, text="What is it?",
        )  # fmt: skip
        await streams.put(prompt)
        group = variants[ordinal % len(variants)]
        writes = (broker.put_sample(prompt.group, 0, i, data) for i, data in enumerate(group))
        assert all(await asyncio.gather(*writes))
        size += sum(map(len, group))
    entries = await broker.claim_prompts(str(version), GENERATOR, count)
    assert len(entries) == count, f"{len(entries)} of {count} prompts on {PROMPTS}"
    return entries, size


async def hand_on(broker: Broker, entry: Entry) -> None:
    """Tell the verifiers that a group is complete."""
    prompt = decode(Prompt, entry.data)
    rollout = Rollout(prompt.group, prompt.ordinal, prompt.attempt, GENERATOR, "")
    ids = (entry.id, GENERATOR, prompt.group, prompt.attempt)
    assert await broker.advance(*ids, ("dispatched", "generated"), encode(rollout))


async def verdicts_of(broker: Broker) -> list[Verdict]:
    entries: Any = await broker.client.xrange(broker.key(VERDICTS))
    return [decode(Verdict, fields[b"r"]) for _, fields in entries]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(folder: Path, verifiers: int, groups: int) -> None:
    """One line of figures."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=folder))
    config = load_config(recipe)
    server = EmbeddedServer(folder / "server", maxmemory_mib=2048)
    server.start()
    started: list[subprocess.Popen[bytes]] = []
    broker = await Broker.connect(server.url, config.run.name)
    try:
        since = time.monotonic()
        entries, size = await generate(config, broker, groups)
        filling = time.monotonic() - since
        for _ in range(verifiers):
            started.append(start_verifier(recipe, server.url))
        async with asyncio.timeout(DEADLINE_S):
            while len(await broker.members("verifier")) < verifiers:
                assert all(process.poll() is None for process in started)
                await asyncio.sleep(0.05)
        watched = [psutil.Process(process.pid) for process in started]
        assert server.process is not None
        watched.append(psutil.Process(server.process.pid))
        idle_mib = [process.memory_info().rss / 2**20 for process in watched]
        before = [cpu_s(process) for process in watched]
        most = list(idle_mib)

        begin = time.monotonic()
        await asyncio.gather(*(hand_on(broker, entry) for entry in entries))
        async with asyncio.timeout(DEADLINE_S):
            while await broker.client.xlen(broker.key(VERDICTS)) < groups:
                now = [process.memory_info().rss / 2**20 for process in watched]
                most = [max(pair) for pair in zip(most, now, strict=True)]
                await asyncio.sleep(0.02)
        seconds = time.monotonic() - begin
        spent = [cpu_s(process) - start for process, start in zip(watched, before, strict=True)]
        verdicts = await verdicts_of(broker)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        await broker.close()
        server.stop(0.0)
    assert {verdict.fate for verdict in verdicts} == {"accepted"}, verdicts[0].reason
    shares = [sum(v.verifier.endswith(f".{p.pid}") for v in verdicts) for p in started]
    print(
        f"{verifiers} verifier(s), {groups} groups ({groups * SAMPLES} samples, "
        f"{size / 1e6:.0f} MB) in {seconds:.2f} s:\n"
        f"  {groups / seconds:.1f} groups/s, {groups * SAMPLES / seconds:,.0f} samples/s, "
        f"{size / 1e6 / seconds:.0f} MB/s"
    )
    for index in range(verifiers):
        print(
            f"  verifier {index}: {shares[index]} groups, {spent[index]:.2f} CPU s "
            f"({1000 * spent[index] / max(1, shares[index] * SAMPLES):.2f} ms/sample), "
            f"RSS {idle_mib[index]:.0f} MiB idle, {most[index]:.0f} MiB at most"
        )
    print(
        f"  server: {spent[-1]:.2f} CPU s, RSS {most[-1]:.0f} MiB; "
        f"payloads written at {size / 1e6 / filling:.0f} MB/s",
        flush=True,
    )


def start_verifier(recipe: Path, url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "verifier", str(recipe)],
        cwd=ROOT,
        env=os.environ | {"DAPO_REDIS_URL": url},
        stdout=subprocess.DEVNULL,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--verifiers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    if arguments.groups < 1 or min(arguments.verifiers) < 1:
        parser.error("--groups and --verifiers must be at least 1")
    each = len(payloads(0, 34)[0])
    print(
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; groups of {SAMPLES} responses "
        f"of {TOKENS:,} tokens, {each / 1000:.0f} kB each"
    )
    for verifiers in arguments.verifiers:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(Path(folder), verifiers, arguments.groups))


if __name__ == "__main__":
    main()
