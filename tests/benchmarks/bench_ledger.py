"""How long a long run's ledger takes to write, to open and to audit, and a checkpoint to check.

    python tests/benchmarks/bench_ledger.py [FOLDER] [--groups 1000000] [--checkpoint-mib 1024]

FOLDER is on the file system to be measured; by default a temporary one.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from common.audit import audit  # noqa: E402
from common.ledger import Ledger, Line  # noqa: E402
from learner.checkpoint import Checkpoints  # noqa: E402

BATCH = 512
"""Groups that get their fate at a time."""


@contextmanager
def timed(what: str, amount: float, unit: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate = f"{amount / wall:,.0f} {unit}/s"
    print(f"{what:<12}{wall:8.2f} s   cpu {cpu:6.2f} s   {rate:>20}   peak {peak:,.0f} MiB")


def lines(first: int, groups: int) -> list[Line]:
    """Two of three groups trained, the others filtered."""
    return [
        Line(o, 0, "trained", "", first // BATCH) if o % 3 else Line(o, 0, "filtered", "all_wrong")
        for o in range(first, min(groups, first + BATCH))
    ]


def measure_ledger(folder: Path, groups: int) -> None:
    path = folder / "ledger.jsonl"
    with timed("write", groups, "groups"):
        ledger = Ledger(path)
        for first in range(0, groups, BATCH):
            ledger.record(lines(first, groups))
        ledger.close()
    with timed("open", groups, "groups"):
        Ledger(path).close()
    with timed("audit", groups, "groups"):
        result = audit(folder, None)
    assert result.balanced and result.dispatched == groups


def measure_checkpoint(folder: Path, mib: int) -> None:
    checkpoints = Checkpoints(folder, 1)
    checkpoints.begin(1)
    for index in range(4):
        with (checkpoints.unfinished(1) / f"part-{index}").open("wb") as file:
            for _ in range(mib // 4):
                file.write(os.urandom(2**20))
    with timed("seal", mib, "MiB"):
        checkpoints.commit(1, {})
    with timed("check", mib, "MiB"):
        assert checkpoints.newest_valid() == 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--checkpoint-mib", type=int, default=1024)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure_ledger(Path(folder), args.groups)
        measure_checkpoint(Path(folder), args.checkpoint_mib)


if __name__ == "__main__":
    main()
