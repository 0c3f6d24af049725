"""Ablations on the arithmetic recipe: what each part of DAPO does at this size.

Each variant changes one thing of deploy/recipes/arithmetic.toml and runs once for each seed,
through `dapo run`, for fewer batches than the recipe has: at its end nearly all are above 97 %.
A run that is finished is not run again, so an interrupted series goes on where it was. Prints a
Markdown table; ± is the standard deviation over seeds. Variants that are left out of --variants
are not in it.

    python tests/benchmarks/bench_ablations.py [--batches 20] [--seeds 1 2 3] [--variants …]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.metrics import read_metrics

RECIPE = "deploy/recipes/arithmetic.toml"
VARIANTS: dict[str, list[str]] = {
    "the recipe (S = 1)": [],
    "without clip-higher": ["algorithm.clip_high=0.2"],
    "without dynamic sampling": ["algorithm.dynamic_sampling=false"],
    "sequence-mean loss": ["algorithm.loss_aggregation=sequence"],
    "without overlong shaping": ["reward.overlong_cache=0"],
    "S = 0": ["admission.max_staleness=0"],
    "S = 4": ["admission.max_staleness=4"],
    "4 updates per batch": ["algorithm.updates_per_batch=4"],
    "4 updates, without clip-higher": ["algorithm.updates_per_batch=4", "algorithm.clip_high=0.2"],
}
COLUMNS = {
    "held-out accuracy, %": ("accuracy_after", 100.0),
    "entropy": ("entropy", 1.0),
    "length": ("length", 1.0),
    "at the cap, %": ("at_cap", 100.0),
    "upper clipped, %": ("clip_upper", 100.0),
    "mean staleness": ("staleness", 1.0),
    "groups generated": ("groups", 1.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    given = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in given.variants}
    for seed in given.seeds:  # seeds outside: an interrupted series still compares variants
        for variant in given.variants:
            name = f"{list(VARIANTS).index(variant)}-seed{seed}"
            run_once(name, VARIANTS[variant], seed, given.batches, given.out)
            results[variant].append(figures(given.out / name))
            print(f"{variant}, seed {seed}: {results[variant][-1]}", flush=True)
    print(table(results))


def run_once(name: str, sets: Sequence[str], seed: int, batches: int, out: Path) -> None:
    """Run to the end, unless the run directory says that it got there before."""
    summary = out / name / "report" / "summary.json"
    if summary.exists() and json.loads(summary.read_text())["batches"] == batches:
        return
    every = [f"run.name={name}", f"run.dir={out}", f"run.seed={seed}", f"run.batches={batches}"]
    command = [sys.executable, "-m", "common.cli", "run", RECIPE]
    for item in [*every, *sets]:
        command += ["--set", item]
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.out").open("wb") as output:
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT)


def figures(run: Path) -> dict[str, float]:
    """What the table shows of one run; properties of samples are means over the last 5 batches."""
    summary: dict[str, Any] = json.loads((run / "report" / "summary.json").read_text())
    batches = list(read_metrics(run, "batch"))
    last = batches[-5:]
    return {
        "accuracy_before": summary["accuracy_before"],
        "accuracy_after": summary["accuracy_after"],
        "entropy": _mean(last, "entropy"),
        "length": _mean(last, "length_mean"),
        "at_cap": _mean(last, "at_cap_share"),
        "clip_upper": _mean(batches, "clip_upper"),
        "staleness": _mean(batches, "staleness_mean"),
        "groups": float(sum(summary["fates"].values())),
    }


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(float(row[key]) for row in rows)


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """The mean over seeds, and its standard deviation where there are several.

    The second column is the difference to the first variant with the same seed: seeds make
    different bases, which is most of what the accuracies themselves differ by.
    """
    names = ["variant", "points above the first row, same seed", *COLUMNS]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    first = next(iter(results.values()))
    for variant, runs in results.items():
        pairs = zip(runs, first, strict=True)
        cells = [_cell([100 * (a["accuracy_after"] - b["accuracy_after"]) for a, b in pairs], "+")]
        for key, factor in COLUMNS.values():
            cells.append(_cell([run[key] * factor for run in runs]))
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(values: Sequence[float], sign: str = "") -> str:
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4g}{spread}"


if __name__ == "__main__":
    main()
