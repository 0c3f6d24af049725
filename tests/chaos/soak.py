"""Run the pipeline undisturbed for a long time and measure whether anybody's memory grows.

    python -m tests.chaos.soak --minutes 60

Engines are simulated, the rest is real. The resident memory of every role is sampled, and a line is
fitted to it by least squares after a warm-up; a slope is printed for each role, and for the server.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from tests.chaos.chaos import recipe
from tests.chaos.rig import Stuck, Victim

EVERY_S = 10.0
STALL_S = 180.0
WARM_UP = 0.25
"""Share of the time that is left out of the fit: caches and allocators fill."""


@dataclass
class Memory:
    """Resident memory of one role over time: seconds since the start, MiB."""

    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)

    def slope(self) -> float:
        """MiB per hour after the warm-up; nan where there are too few samples."""
        first = int(len(self.seconds) * WARM_UP)
        hours = np.asarray(self.seconds[first:]) / 3600
        if len(hours) < 3:
            return float("nan")
        return float(np.polyfit(hours, self.mib[first:], 1)[0])


def sample(victim: Victim, memory: dict[str, Memory], now: float) -> None:
    """One reading of every role's own process."""
    for name, processes in victim.roles().items():
        try:
            mib = processes[0].memory_info().rss / 2**20
        except psutil.NoSuchProcess:
            continue
        series = memory.setdefault(name, Memory())
        series.seconds.append(now)
        series.mib.append(mib)


def soak(folder: Path, minutes: float, sets: list[str]) -> dict[str, Memory]:
    """Run for so many minutes after the first batch, then end in order.

    Raises:
        Stuck: the run stopped making progress.
    """
    victim = Victim(recipe("simulated"), folder, "soak")
    victim.start(*sets)
    memory: dict[str, Memory] = {}
    try:
        victim.await_batch(1, STALL_S)
        began = time.monotonic()
        while (now := time.monotonic() - began) < 60 * minutes:
            sample(victim, memory, now)
            victim.await_batch(len(victim.batches()) + 1, STALL_S)
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began - now)))
        victim.stop(60.0)
    finally:
        victim.kill()
    print(f"{len(victim.batches())} batches in {minutes:g} minutes")
    return memory


def table(memory: dict[str, Memory]) -> str:
    rows = [
        f"{name:<14}{series.mib[0]:>9.1f}{series.mib[-1]:>9.1f}{max(series.mib):>9.1f}"
        f"{series.slope():>+12.1f}"
        for name, series in sorted(memory.items())
    ]
    return "\n".join(["role          MiB first     last     most  MiB an hour", *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--dir", type=Path, help="where the run is kept")
    options = parser.parse_args()
    folder = options.dir or Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        print(table(soak(folder, options.minutes, options.set)))
    except Stuck as stuck:
        print(f"STUCK {stuck}")
        return 1
    print(f"the run is in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
