"""Checks per second per core, and how often each checker is right.

    python tests/benchmarks/bench_verifier.py [LABELLED.jsonl] [--texts 100000]

The labelled file defaults to the shared one beside the project. The strict checker is also
run on random Unicode strings, where an exception ends the benchmark.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verifier import math_answer, math_dapo_compat  # noqa: E402
from verifier.outcome import Verdict  # noqa: E402
from verifier.verify_file import verify_file  # noqa: E402

LABELLED = ROOT.parent / "shared" / "data" / "verifier_labelled_dev.jsonl"
CASES = ROOT / "tests" / "data" / "verifier_cases_dev.jsonl"


def rate(check: Callable[..., Verdict], rows: list[dict], repeats: int) -> float:
    """Checks per second of CPU time in this process."""
    start = time.process_time()
    for _ in range(repeats):
        for row in rows:
            check(row["response"], row["gold"])
    return repeats * len(rows) / (time.process_time() - start)


def random_text(source: random.Random) -> str:
    """Up to 200 characters: any of Unicode, surrogates included, among pieces of answers."""
    pieces = ("Answer: ", "\\boxed{", "}", "{", "$", "34", "\n", "\\frac", "^", "=", "答案：", " ")
    return "".join(
        source.choice(pieces) if source.random() < 0.3 else chr(source.randrange(0x110000))
        for _ in range(source.randrange(200))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("labelled", nargs="?", type=Path, default=LABELLED)
    parser.add_argument("--texts", type=int, default=100_000)
    arguments = parser.parse_args()
    if not arguments.labelled.exists():
        parser.error(f"{arguments.labelled} is missing; name a labelled file")
    lines = arguments.labelled.read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    for name, module, repeats in (
        ("math", math_answer, 10),
        ("math_dapo_compat", math_dapo_compat, 50),
    ):
        print(f"{name:18} {rate(module.check, rows, repeats):10,.0f} checks/s per core")
    verify_file(arguments.labelled, "math_verify", workers=1)  # the caches of the file system
    slow = verify_file(arguments.labelled, "math_verify", workers=1)
    print(f"{'math_verify':18} {slow.n / slow.seconds:10,.0f} checks/s per worker, start included")
    for name in ("math", "math_dapo_compat", "math_verify"):
        for path in (arguments.labelled, CASES):
            report = verify_file(path, name, deadline_s=5)
            print(f"{path.name}: {report.to_text().splitlines()[0]}")
            print(report.to_text().splitlines()[1])
    source = random.Random(0)
    texts = [random_text(source) for _ in range(arguments.texts)]
    start = time.process_time()
    for text in texts:
        math_answer.check(text, "34", exact_arithmetic=True)
        math_answer.check(f"Answer: {text}", "34", exact_arithmetic=True)
    seconds = time.process_time() - start
    print(
        f"{2 * len(texts):,} checks of random Unicode texts without an exception in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
