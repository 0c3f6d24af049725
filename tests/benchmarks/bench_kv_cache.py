"""The KV cache of running samples across a weight update: kept, or computed again.

    python tests/benchmarks/bench_kv_cache.py [--batches 12] [--set section.key=value]

Runs the arithmetic recipe both ways, then trains each run's archived batches again in this
process, which leads to the same weights, and scores every batch with the weights it was
trained on before each step. So each token has the learner's log-prob beside the one recorded:

current, whole   tokens of the current version in samples of one version: rounding alone
current, joined  those behind an update that came in mid-sample: with a kept cache their prefix was
                 computed by older weights, with a recomputed one it was not
age n            tokens sampled n versions ago: the policy itself has moved

k3 is the mean of r − 1 − log r, r = learner / engine: an estimate of KL(engine ‖ learner).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.batch_files import BatchFiles  # noqa: E402
from common.config import Config, load_config  # noqa: E402
from common.messages import Sample, Verdict, decode  # noqa: E402
from common.metrics import read_metrics  # noqa: E402
from learner.assemble import Item, response_tokens, split, trajectories  # noqa: E402
from learner.batch import Trajectory  # noqa: E402
from learner.engine import TrainEngine  # noqa: E402

RECIPE = ROOT / "deploy" / "recipes" / "arithmetic.toml"
MODES = {"kept": True, "recomputed": False}


class Tokens(NamedTuple):
    """One row per token trained: learner − engine, age in versions, in a sample of several."""

    delta_N: npt.NDArray[np.float64]
    age_N: npt.NDArray[np.int32]
    joined_N: npt.NDArray[np.bool_]


@dataclass
class Result:
    tokens: Tokens
    joined_samples: int
    samples: int
    figures: dict[str, str]


def run(folder: Path, name: str, sets: list[str]) -> Path:
    """One `dapo run`; its directory."""
    words = [w for key in [f"run.dir={folder}", f"run.name={name}", *sets] for w in ("--set", key)]
    command = [sys.executable, "-m", "common.cli", "run", str(RECIPE), *words]
    with (folder / f"{name}.txt").open("w") as out:
        subprocess.run(command, stdout=out, stderr=out, cwd=ROOT, check=True)
    return folder / name


def replay(config: Config) -> Iterator[tuple[int, list[list[Trajectory]], TrainEngine]]:
    """(version, mini-batches, engine) for each archived batch, before it is trained."""
    engine = TrainEngine(config, Path(config.model.path))
    files = BatchFiles(config.run_dir)
    for version in range(config.run.batches):
        groups = {group.ordinal: group for group in files.load(version + 1)}
        items = [
            Item(g.ordinal, g.attempt, response_tokens(decode(Verdict, g.verdict)))
            for g in groups.values()
        ]
        minis = [
            [t for item in mini[0] for t in trajectories(groups[item.ordinal], config)]
            for mini in split(items, config, version, world=1)
        ]
        yield version, minis, engine
        engine.set_learning_rate(version + 1)
        engine.train_batch(minis, version)
    check = config.run_dir / "replayed"
    engine.export_hf(check, Path(config.model.path))
    ours, theirs = (load_file(f / "model.safetensors") for f in (check, config.run_dir / "export"))
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    print(f"{config.run.name}: replayed and published weights differ by {worst:.2g} at most")


def measure(config: Config) -> Result:
    """Gaps of every token trained, and the figures of the run."""
    parts: list[Tokens] = []
    joined_samples = samples = 0
    for version, minis, engine in replay(config):
        rows = [trajectory for mini in minis for trajectory in mini]
        pairs = [(row.prompt_ids, row.response_ids) for row in rows]
        scores = engine.score(pairs, config.sampling.temperature)
        for row, own in zip(rows, scores, strict=True):
            joined = len(row.spans) > 1
            joined_samples, samples = joined_samples + joined, samples + 1
            delta = own.astype(np.float64) - row.logprobs
            ages = replace(row, kept_cache=False).ages(version)  # of the policy that sampled
            parts.append(Tokens(delta, ages, np.full(len(delta), joined)))
    tokens = Tokens(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    return Result(tokens, joined_samples, samples, figures(config))


def figures(config: Config) -> dict[str, str]:
    """What the run's own records say; the first batch and the first round pay for the start."""
    batches = list(read_metrics(config.run_dir, "batch"))
    rounds = [r for r in read_metrics(config.run_dir, "round") if r["members"] and r["step"]]
    accuracy = {r["label"]: r for r in read_metrics(config.run_dir, "eval")}
    seconds = batches[-1]["time"] - batches[0]["time"]
    tokens = sum(
        (row["length_mean_raw"] or 0.0) * row["groups_judged"] * config.algorithm.group_size
        for row in batches[1:]
    )
    after = accuracy["after"]
    return {
        "tokens/s generated": f"{tokens / seconds:.0f}",
        "seconds per batch": f"{seconds / (len(batches) - 1):.2f}",
        "seconds per publication, median": f"{median(r['seconds'] for r in rounds):.3f}",
        "milliseconds per token in a sample": _pace(config),
        "accuracy before": f"{accuracy['before']['accuracy']:.3f}",
        "accuracy after": f"{after['accuracy']:.3f} ± {after['standard_error']:.3f}",
    }


def _pace(config: Config) -> str:
    """Of samples of one version, and of those that an update came into."""
    files = BatchFiles(config.run_dir)
    paces: tuple[list[float], list[float]] = ([], [])
    for version in range(2, config.run.batches + 1):
        for group in files.load(version):
            for sample in (decode(Sample, data) for data in group.samples):
                pace = 1000 * sample.seconds / len(sample.token_ids)
                paces[len(sample.spans) > 1].append(pace)
    return " / ".join(f"{median(values):.1f}" if values else "–" for values in paces)


def table(results: dict[str, Result]) -> str:
    """All measures side by side."""
    rows: dict[str, list[str]] = {"samples of several versions": []}
    for result in results.values():
        rows["samples of several versions"].append(f"{result.joined_samples} of {result.samples}")
        delta, age, joined = result.tokens
        chosen = {"current, whole": (age == 0) & ~joined, "current, joined": (age == 0) & joined}
        chosen |= {f"age {n}": age == n for n in range(1, int(age.max()) + 1)}
        chosen["all tokens"] = np.ones(len(age), dtype=bool)
        for name, mask in chosen.items():
            rows.setdefault(f"gap, {name}", []).append(_gap(delta[mask]))
        for name, value in result.figures.items():
            rows.setdefault(name, []).append(value)
    head = f"{'':36}" + "".join(f"{mode:>44}" for mode in results)
    lines = [f"{name:36}" + "".join(f"{v:>44}" for v in values) for name, values in rows.items()]
    return "\n".join([head, *lines])


def _gap(delta: npt.NDArray[np.float64]) -> str:
    if not len(delta):
        return "no tokens"
    k3 = np.expm1(delta) - delta
    size = np.abs(delta)
    return f"mean {size.mean():.1e} max {size.max():.1e} k3 {k3.mean():.0e} ({len(delta)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--folder", type=Path, help="keep the runs there")
    arguments = parser.parse_args()
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="kv-cache-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    for mode, keep in MODES.items():
        sets = [
            f"run.batches={arguments.batches}",
            "checkpoint.archive_batches=true",
            f"generator.keep_kv_cache={json.dumps(keep)}",
            *arguments.set,
        ]
        if not (folder / mode / "export").exists():
            run(folder, mode, sets)
        results[mode] = measure(load_config(folder / mode / "config.toml"))
    print(table(results))


if __name__ == "__main__":
    main()
