"""Kill, stop and cut the processes of a real run by a seeded schedule, then check its promises.

    python -m tests.chaos.chaos --seed 1 --kills 200            simulated engines
    python -m tests.chaos.chaos --seed 1 --kills 200 --empty    a killed server comes back empty
    python -m tests.chaos.chaos --engine vllm --kills 10        the demo; its accuracy is compared

Learner, verifiers, server and collectives are real in both. Each blow waits for the run's own
progress. Afterwards the run is ended in order and must be complete: one fate for every group, full
batches, the staleness bound, the same weights from a replay, nothing left on the server, and no
process that ended by an exception. Exit status 1 if anything is off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from common.metrics import read_metrics
from tests.chaos.checks import dead_letters, failures, faults
from tests.chaos.rig import ROOT, Stuck, Victim
from tests.chaos.schedule import MIX, blows

HERE = Path(__file__).parent
STALL_S = {"simulated": 180.0, "vllm": 600.0}
END_S = {"simulated": 300.0, "vllm": 1800.0}
LAST_BATCHES = 5
"""Batches of an open-ended run that are trained after the last blow."""


@dataclass
class Outcome:
    """What came of one run."""

    seconds_per_batch: float = 0.0
    batches: int = 0
    struck: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Processes that were killed."""
        return sum(count for name, count in self.struck.items() if name.startswith("kill"))


def undisturbed(options: argparse.Namespace, folder: Path) -> Outcome:
    """The same run without a blow."""
    victim = Victim(recipe(options.engine), folder, "undisturbed")
    victim.start(f"run.batches={options.calm}", *_sets(options))
    return _end(victim, options.engine)


def disturbed(options: argparse.Namespace, folder: Path) -> Outcome:
    """A run that is struck `options.kills` times, or for `options.minutes`."""
    engine = options.engine
    victim = Victim(recipe(engine), folder, "chaos", lose_data=options.empty)
    total = [f"run.batches={options.batches}"] if options.batches else []
    victim.start(*total, *_sets(options))
    until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    try:
        victim.await_batch(1, STALL_S[engine])
        _strike(victim, options, until)
        if not options.batches:
            victim.stop(60.0)
            last = max(int(row["step"]) for row in victim.batches()) + LAST_BATCHES
            victim.start(f"run.batches={last}", *_sets(options))
    except Stuck as stuck:
        victim.kill()
        return Outcome(0.0, len(victim.batches()), victim.struck, [str(stuck)])
    return _end(victim, engine)


def _strike(victim: Victim, options: argparse.Namespace, until: float) -> None:
    """Blows by the schedule, each on the progress of the run."""
    kills = 0
    # a fixed length: the kills, a part of all blows, are due by its middle on average
    share = MIX["kill"] / sum(MIX.values())
    gap = 0.5 * share * options.batches / options.kills if options.batches else 1.0
    for blow in blows(options.seed, gap, spared=frozenset(options.spare)):
        if kills >= options.kills or time.monotonic() >= until:
            return
        if not victim.await_batch(len(victim.batches()) + blow.after, STALL_S[options.engine]):
            return
        pause = time.monotonic() + blow.delay_s
        while time.monotonic() < pause:
            victim.tick()
            time.sleep(0.01)
        if victim.strike(blow):
            kills += blow.kind == "kill"
            print(f"{len(victim.batches()):>6}  {blow}", flush=True)


def _end(victim: Victim, engine: str) -> Outcome:
    """Let it finish, and look at what it leaves."""
    found: list[str] = []
    try:
        status = victim.finish(END_S[engine])
        if status:
            found.append(f"dapo run ended with status {status}: {victim.said()}")
        found += faults(victim.dir)
    except Stuck as stuck:
        found.append(str(stuck))
    finally:
        victim.kill()
    rows = victim.batches()
    span = rows[-1]["time"] - rows[0]["time"] if len(rows) > 1 else 0.0
    return Outcome(span / max(1, len(rows) - 1), len(rows), victim.struck, found)


def recipe(engine: str) -> Path:
    if engine == "simulated":
        return HERE / "simulated.toml"
    return ROOT / "deploy" / "recipes" / "arithmetic.toml"


def _sets(options: argparse.Namespace) -> list[str]:
    own = [] if options.engine == "simulated" else ["generator.count=2", "run.restarts=1000000"]
    return own + options.set


def report(calm: Outcome | None, outcome: Outcome, folder: Path) -> str:
    """What was done, what it cost, and what is wrong."""
    struck = ", ".join(f"{count} × {name}" for name, count in sorted(outcome.struck.items()))
    lines = [f"{outcome.kills} kills in {outcome.batches} batches ({struck})"]
    if calm and calm.seconds_per_batch and outcome.seconds_per_batch:
        share = calm.seconds_per_batch / outcome.seconds_per_batch
        lines.append(
            f"seconds per batch: {calm.seconds_per_batch:.2f} undisturbed, "
            f"{outcome.seconds_per_batch:.2f} under chaos: {share:.0%} of the rate"
        )
    lines += [f"{count} × {why}" for why, count in failures(folder / "chaos").most_common()]
    lines.append(f"{dead_letters(folder / 'chaos')} dead letters")
    lines += [f"FAULT {text}" for text in outcome.faults]
    return "\n".join([*lines, "every promise was kept" if not outcome.faults else "NOT SOUND"])


def compare_accuracy(folder: Path) -> list[str]:
    """The disturbed run must have learned as much, within the noise of the evaluations."""
    after = {}
    for name in ("undisturbed", "chaos"):
        rows = [r for r in read_metrics(folder / name, "eval") if r["label"] == "after"]
        if not rows:
            return [f"{name} has no last evaluation"]
        after[name] = (rows[-1]["accuracy"], rows[-1]["standard_error"])
    (calm, calm_error), (wild, wild_error) = after["undisturbed"], after["chaos"]
    print(f"accuracy: {calm:.3f} ± {calm_error:.3f} undisturbed, {wild:.3f} ± {wild_error:.3f}")
    # two trainings differ by more than the errors of their evaluations
    if calm - wild > 0.02 + 3 * (calm_error**2 + wild_error**2) ** 0.5:
        return [f"accuracy {wild:.3f} instead of {calm:.3f}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--minutes", type=float, help="stop earlier, after so many minutes")
    parser.add_argument("--empty", action="store_true", help="a killed server loses its data")
    parser.add_argument("--batches", type=int, help="batches of the run; default: until the end")
    parser.add_argument("--spare", nargs="*", default=[], help="roles that are not struck")
    parser.add_argument("--calm", type=int, default=30, help="batches of the run to compare with")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--dir", type=Path, help="where the runs are kept")
    options = parser.parse_args()
    if options.engine == "vllm":
        options.batches = options.calm = options.batches or 40
    folder = options.dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    calm = undisturbed(options, folder) if options.calm else None
    outcome = disturbed(options, folder)
    if outcome.kills < options.kills and not options.minutes:
        few = f"the run was over after {outcome.kills} kills: give it more --batches"
        outcome.faults.append(few)
    if calm:
        outcome.faults += [f"undisturbed: {text}" for text in calm.faults]
    if options.engine == "vllm":
        outcome.faults += compare_accuracy(folder)
    print(report(calm, outcome, folder))
    print(f"the runs are in {folder}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
