"""A run directory as a learner would leave it, made up from a formula instead of trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.batch_files import BatchFiles, StoredGroup
from common.ledger import Ledger, Line

GROUPS = 16
SIZE = 8
START = 1_700_000_000.0


def write_config(run_dir: Path, batches: int, staleness: int = 2) -> None:
    """The keys that the report, the audit and the live view read."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(
        f'[run]\nname = "{run_dir.name}"\nbatches = {batches}\n\n'
        '[model]\npath = "model"\n\n[data]\ntrain = ["train.jsonl"]\n\n'
        f"[algorithm]\ngroup_size = {SIZE}\ngroups_per_batch = {GROUPS}\n\n"
        f"[admission]\nmax_staleness = {staleness}\n"
    )


def append_rows(run_dir: Path, *rows: dict[str, Any]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def batch_row(version: int, time: float, draw: random.Random, **changes: Any) -> dict[str, Any]:
    """The figures of a batch as `Lead.trained` logs them, with a policy that learns."""
    skill = 0.35 + 0.5 * (1 - math.exp(-version / 45))
    length = 190 - 0.5 * version + draw.gauss(0, 5)
    gap = 2e-3 * math.exp(draw.gauss(0, 0.25))
    raw = skill + draw.gauss(0, 0.03)
    late = int(draw.random() < 0.7) + int(draw.random() < 0.1)
    row = {
        "time": time, "kind": "batch", "step": version, "loss": draw.gauss(0, 0.02),
        "grad_norm": 0.4 + draw.random() / 5, "optimizer_steps": 1.0,
        "entropy": 0.9 * math.exp(-version / 120) + draw.gauss(0, 0.015),
        "probability": 0.8, "clip_upper": 0.004 + draw.random() / 500,
        "clip_lower": 0.002 + draw.random() / 900, "ratio_mean": 1.0, "importance_mean": 1.0,
        "importance_ess": 0.99, "tokens_trained": length * GROUPS * SIZE, "tokens_nonfinite": 0.0,
        "gap_mean": gap, "gap_max": gap * 40, "gap_k3": gap**2, "gap_tokens": 5000.0,
        "gap_by_age": {"0": gap, "1": gap * 6}, "learning_rate": 1e-6, "optimizer_step": version,
        "groups": GROUPS, "samples": GROUPS * SIZE, "accuracy": 0.5 + 0.2 * (raw - 0.5),
        "reward": 0.4 * (raw - 0.5), "penalty": -0.02, "length_mean": length + 9,
        "length_max": 256, "at_cap_share": 0.1 * math.exp(-version / 50), "staleness_max": late,
        "staleness_mean": late * 0.6, "multi_version_samples": 20 * late,
        "by_generator": {"generator-0.11": 70, "generator-1.12": 58}, "attempts": 0,
        "accuracy_raw": raw, "reward_raw": 2 * raw - 1.05, "length_mean_raw": length,
        "no_answer_share": 0.03, "truncated_share": 0.08 * math.exp(-version / 50),
        "acceptance": 0.7, "all_correct_share": 0.2, "all_wrong_share": 0.1,
        "groups_judged": 23, "groups_failed": 0, "train_s": 3.1 + draw.random() / 2,
        "publish_s": 0.5 + draw.random() / 5, "wait_s": 1.6 + abs(draw.gauss(0, 0.6)),
        "rss_mib": 900.0, "prompts": 4, "rollouts": 1, "verdicts": 0,
        "groups_trained": version * GROUPS, "groups_filtered": version * 6, "groups_open": 30,
    }  # fmt: skip
    return row | changes


def eval_row(label: str, step: int, time: float, accuracy: float) -> dict[str, Any]:
    return {
        "time": time, "kind": "eval", "step": step, "label": label, "accuracy": accuracy,
        "standard_error": 0.02, "pass_at_k": min(1.0, accuracy + 0.2), "problems": 256,
        "samples": 1024, "failed": 0, "no_answer_share": 0.03, "truncated_share": 0.05,
        "length_mean": 180.0, "versions": [step],
    }  # fmt: skip


def round_row(number: int, step: int, time: float, **changes: Any) -> dict[str, Any]:
    row = {
        "time": time, "kind": "round", "step": step, "round": f"1.{number}", "members": 2,
        "probe_gap": 3e-4, "seconds": 0.5,
    }  # fmt: skip
    return row | changes


def write_run(run_dir: Path, batches: int = 120) -> None:
    """A complete run: configuration, metrics, ledger, and the last ten batches as batch files."""
    draw, time = random.Random(7), START
    write_config(run_dir, batches)
    rows = [round_row(1, 0, time, probe_gap=2e-4), eval_row("before", 0, time + 20, 0.34)]
    time += 21
    for version in range(1, batches + 1):
        row = batch_row(version, time, draw)
        time += row["wait_s"] + row["train_s"]
        rows.append(row | {"time": time})
        gap = 3e-4 * math.exp(draw.gauss(0, 0.3))
        rows.append(round_row(version + 1, version, time + 0.6, probe_gap=gap))
        if version % 20 == 0 and version < batches:
            accuracy = 0.34 + 0.48 * (1 - math.exp(-version / 45))
            rows.append(eval_row(str(version), version, time + 4, accuracy))
    rows.append(eval_row("after", batches, time + 25, 0.81))
    append_rows(run_dir, *rows)
    _write_fates(run_dir, batches)


def _write_fates(run_dir: Path, batches: int) -> None:
    """Of 22 ordinals to a batch 16 are trained, five filtered and one is stale."""
    lines, ordinals = [], iter(range(batches * 22))
    for version in range(1, batches + 1):
        trained = [next(ordinals) for _ in range(GROUPS)]
        if version > batches - 10:
            store_batch(run_dir, version, trained)
        else:
            lines += [Line(ordinal, 0, "trained", "", version) for ordinal in trained]
        lines += [Line(next(ordinals), 0, "filtered", "all_correct") for _ in range(5)]
        lines.append(Line(next(ordinals), 0, "stale", "no slot"))
    write_ledger(run_dir, lines)


def write_ledger(run_dir: Path, lines: list[Line]) -> None:
    ledger = Ledger(run_dir / "ledger.jsonl")
    ledger.record(lines)
    ledger.close()


def store_batch(run_dir: Path, version: int, ordinals: list[int]) -> None:
    """A batch file; its payloads are empty."""
    files = BatchFiles(run_dir)
    files.begin(version)
    files.write_part(version, 0, [StoredGroup(ordinal, 0, b"", b"", []) for ordinal in ordinals])
    files.commit(version)


def a_group(
    version: int, rewards: Sequence[float] = (1.0, -1.0, -1.2), texts: Sequence[str] = (),
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """A group of RUN/rollouts; a reward below −1 is of a response that was cut off."""
    group = {
        "version": version, "fate": "trained", "reason": "", "attempt": 0, "group": "7",
        "ordinal": 7, "row": 3, "prompt": "What is 2+2?", "gold": "4", "checker": "math",
        "verifier": "v",
    }  # fmt: skip
    samples = [
        {
            "index": index, "outcome": "correct" if reward > 0 else "wrong",
            "text": texts[index] if index < len(texts) else f"Let me see,\nso it is {4 - index}",
            "answer": str(4 - index), "why": "", "reward": 1.0 if reward > 0 else -1.0,
            "shaped_reward": reward, "advantage": reward, "length": 9, "truncated": reward < -1,
            "versions": ["1.11", "1.12"], "generator": "g",
        }
        for index, reward in enumerate(rewards)
    ]  # fmt: skip
    return group | {"samples": samples} | changes
