"""A Slurm cluster of two nodes on this machine, its daemons in the foreground and all its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from common.process import die_with_parent, stop_group
from common.server import free_port

SETTINGS = """
ClusterName=test
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=5
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
NodeName=n1 NodeAddr=127.0.0.1 Port={n1} CPUs=4
NodeName=n2 NodeAddr=127.0.0.1 Port={n2} CPUs=4
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=n1,n2 PriorityTier=2 PreemptMode=OFF Default=YES MaxTime=INFINITE
PartitionName=spare Nodes=n1,n2 PriorityTier=1 GraceTime=120 MaxTime=INFINITE
PartitionName=urgent Nodes=n1,n2 PriorityTier=3 PreemptMode=OFF MaxTime=INFINITE
"""


class Cluster:
    """Started and ended by `with`; `environment` is what Slurm's commands need."""

    def __init__(self) -> None:
        # a short path, because sockets allow no long one
        self.dir = Path(tempfile.mkdtemp(prefix="dapo-slurm-", dir="/tmp"))
        self.conf = self.dir / "slurm.conf"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("DAPO_", "SLURM_"))}
        self.environment = clean | {"SLURM_CONF": str(self.conf)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        subprocess.run(
            ["scancel", "--user=root", "--signal=KILL", "--full"],
            env=self.environment, capture_output=True, timeout=30,
        )  # fmt: skip
        for daemon in reversed(self._daemons):
            stop_group(daemon, 5.0)
        _end_steps(self.dir)
        shutil.rmtree(self.dir, ignore_errors=True)

    def run(self, *command: str, **variables: str) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            command, env=self.environment | variables, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Fields of `scontrol show job`."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def _start(self) -> None:
        (self.dir / "state").mkdir()
        key = self.dir / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        ports = {name: free_port() for name in ("ctld", "n1", "n2")}
        # the scripts take their ports from the job's number: two clusters here must not meet
        names = {"host": socket.gethostname(), "first": 1 + secrets.randbelow(9000)}
        self.conf.write_text(SETTINGS.format(dir=self.dir, **names, **ports))
        paths = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid",
                 "log-file": "munge.log", "seed-file": "munge.seed"}  # fmt: skip
        options = [f"--{name}={self.dir / file}" for name, file in paths.items()]
        self._daemon("munged", "--foreground", "--force", "--num-threads=2", *options)
        self._await(lambda: (self.dir / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-f", str(self.conf))
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-f", str(self.conf), "-N", node)
        self._await(lambda: self._idle() == 2)

    def _daemon(self, *command: str) -> None:
        with (self.dir / f"{command[0]}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=out, start_new_session=True, preexec_fn=die_with_parent,
                )
            )  # fmt: skip

    def _idle(self) -> int:
        told = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%t"],
            env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        return told.stdout.split().count("idle")

    def _await(self, ready: object) -> None:
        assert callable(ready)
        deadline = time.monotonic() + 60
        while not ready():
            dead = [d.args for d in self._daemons if d.poll() is not None]
            assert not dead and time.monotonic() < deadline, f"no cluster: {dead}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        files = [*self.dir.glob("*.log"), *self.dir.glob("*.out")]
        return "\n".join(f"{f.name}: {f.read_text(errors='replace')[-1500:]}" for f in files)


def _end_steps(folder: Path) -> None:
    """slurmstepd leaves its daemon's group; what still runs out of this cluster's folder ends."""
    import psutil

    marker = f"SLURM_CONF={folder}/slurm.conf".encode()
    for process in psutil.process_iter():
        try:
            own = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if marker in own:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
