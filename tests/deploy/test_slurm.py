"""The Slurm scripts on a cluster of two nodes, with the real roles; one test has a real engine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import dump_toml, load_config
from common.status import read_status
from tests.deploy.cluster import Cluster
from tests.deploy.waiting import (
    ARITHMETIC,
    ROOT,
    SMALL,
    TINY,
    batches,
    need,
    newest_checkpoint,
    until,
)

SCRIPTS = ROOT / "deploy" / "slurm"
SUBMIT = str(SCRIPTS / "submit.sh")


def test_shellcheck_finds_nothing_in_the_scripts() -> None:
    need("shellcheck")
    files = sorted(str(path.relative_to(ROOT)) for path in SCRIPTS.iterdir())
    found = subprocess.run(
        ["shellcheck", "--external-sources", *files], cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    need("munged", "slurmctld", "slurmd", "sbatch")
    if os.geteuid() != 0:
        pytest.skip("the daemons of a cluster need root here")
    with Cluster() as started:
        yield started


class SlurmRun:
    """A run that submit.sh starts from a folder of its own."""

    def __init__(
        self, cluster: Cluster, folder: Path, base: Path, recipe: Path, **keys: object
    ) -> None:
        self.cluster, self.folder, self.name = cluster, folder, recipe.stem
        self.dir = folder / "runs" / self.name
        shutil.copytree(ROOT / base, folder / base)
        self.recipe = folder / recipe.name
        config = load_config(recipe, [f"{key}={value}" for key, value in keys.items()])
        self.recipe.write_text(dump_toml(config))

    def submit(self, *options: str, **variables: str) -> dict[str, str]:
        """Job numbers by role."""
        told = subprocess.run(
            [SUBMIT, str(self.recipe), *options], cwd=self.folder,
            env=self.cluster.environment | variables, capture_output=True, text=True,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        return dict(line.split() for line in told.stdout.splitlines())

    def why(self) -> str:
        logs = sorted((self.dir / "logs").glob("slurm-*"))
        said = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([self.cluster.run("squeue"), *said])

    def until_batch(self, number: int) -> None:
        until(f"batch {number}", lambda: len(batches(self.dir)) >= number, self.why)

    def until_state(self, job: str, state: str, restarts: int = 0) -> None:
        def reached() -> bool:
            fields = self.cluster.job(job)
            return fields["JobState"] == state and int(fields["Restarts"]) == restarts

        until(f"job {job} {state} after {restarts} restarts", reached, self.why)

    def generators(self) -> set[str]:
        """Names of the living ones without the process number."""
        state = self.dir / "slurm"
        password = (state / "password").read_text().strip()
        url = (state / "address").read_text().strip().replace("//", f"//:{password}@")
        members = read_status(url, self.name).get("members", {})
        return {name.rpartition(".")[0] for name in members if name.startswith("generator-")}

    def until_generators(self, *jobs: str) -> None:
        names = {f"generator-{job.replace('_', '-')}" for job in jobs}
        until(f"generators {names}", lambda: self.generators() == names, self.why)

    def require_finished(self, job: str, complete: bool = True) -> None:
        """The last job found that the ledger balances, and left nothing in the queue."""
        self.until_state(job, "COMPLETED")
        until("an empty queue", lambda: not self.cluster.run("squeue", "--noheader"), self.why)
        audit = subprocess.run(
            [str(ROOT / ".venv/bin/dapo"), "audit", str(self.dir), "--json"],
            cwd=self.folder, env=self.cluster.environment, capture_output=True, text=True,
        )  # fmt: skip
        assert audit.returncode == 0, audit.stdout + audit.stderr
        rows = {row["step"] for row in batches(self.dir)}
        result = json.loads(audit.stdout)
        assert result["complete"] is complete and result["trained"] == 4 * len(rows), result


@pytest.mark.timeout(1500)
def test_a_run_survives_growing_shrinking_time_limits_and_requeueing(
    cluster: Cluster, base: Path, tmp_path: Path
) -> None:
    run = SlurmRun(cluster, tmp_path, base, TINY)
    jobs = run.submit("--generators", "1")
    assert list(jobs) == ["server", "learner", "verifier", "generator", "finish"]
    assert (run.dir / "slurm" / "password").stat().st_mode & 0o777 == 0o600
    first = f"{jobs['generator']}_1"
    run.until_batch(3)

    again = subprocess.run(
        [SUBMIT, str(run.recipe)], cwd=tmp_path, env=cluster.environment, capture_output=True
    )
    assert again.returncode == 2 and b"in the queue already" in again.stderr

    more = run.submit("--only", "generator", "--generators", "1")["generator"]
    run.until_generators(first, f"{more}_1")
    run.cluster.run("scancel", "--batch", "--signal=TERM", f"{more}_1")
    run.until_state(f"{more}_1", "COMPLETED")
    run.until_generators(first)

    # what slurmctld sends near a time limit
    cluster.run("scancel", "--batch", "--signal=USR1", first)
    run.until_state(first, "RUNNING", restarts=1)
    cluster.run("scontrol", "requeue", first)
    run.until_state(first, "RUNNING", restarts=2)
    run.until_generators(first)

    done = len(batches(run.dir))
    cluster.run("scancel", "--batch", "--signal=USR1", jobs["learner"])
    run.until_state(jobs["learner"], "RUNNING", restarts=1)
    run.until_batch(done + 2)
    said = (run.dir / "logs" / f"slurm-learner-{jobs['learner']}.out").read_text()
    resumed = re.findall(r"resumed.*?checkpoint=(\d+)", said)
    assert resumed and int(resumed[-1]) >= done, said[-2000:]

    run.require_finished(jobs["finish"])
    assert len(json.loads((run.dir / "timeline.json").read_text())) == 2


@pytest.mark.timeout(900)
def test_a_learner_of_two_nodes_meets_by_what_slurm_says_and_saves_when_it_is_told_to_end(
    cluster: Cluster, base: Path, tmp_path: Path
) -> None:
    run = SlurmRun(cluster, tmp_path, base, TINY)
    jobs = run.submit("--nodes", "2")
    run.until_batch(2)
    cluster.run("scancel", "--batch", "--signal=TERM", jobs["learner"])
    run.until_state(jobs["learner"], "COMPLETED")
    assert newest_checkpoint(run.dir) == len(batches(run.dir)) < 60, run.why()
    until("an empty queue", lambda: not cluster.run("squeue", "--noheader"), run.why)


@pytest.mark.timeout(2400)
def test_a_generator_with_vllm_drains_when_a_higher_partition_pre_empts_it_and_comes_back(
    cluster: Cluster, arithmetic_base: Path, tmp_path: Path
) -> None:
    run = SlurmRun(cluster, tmp_path, arithmetic_base, ARITHMETIC, **SMALL | {"run.batches": 1000})
    # a node of its own but for one core, so that who takes a node takes this one
    spare = {"DAPO_SBATCH_GENERATOR": "--partition=spare --cpus-per-task=3"}
    jobs = run.submit(**spare)
    first = f"{jobs['generator']}_1"
    run.until_batch(1)

    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--cpus-per-task=4", "--output=/dev/null",
        "--wrap=sleep 600",
    ).strip()  # fmt: skip
    run.until_state(urgent, "RUNNING")
    run.until_state(first, "PENDING", restarts=1)
    run.until_generators()
    cluster.run("scancel", urgent)
    run.until_state(first, "RUNNING", restarts=1)
    run.until_generators(first)
    (log,) = (run.dir / "logs").glob("slurm-generator-*.out")
    said = log.read_text()
    assert "USR1: draining" in said and "drained; back into the queue" in said, said[-2000:]
    run.until_batch(len(batches(run.dir)) + 1)

    cluster.run("scancel", "--batch", "--signal=TERM", jobs["learner"])
    run.require_finished(jobs["finish"], complete=False)
