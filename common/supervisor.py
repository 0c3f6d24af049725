"""`dapo run`: every role of a run on this machine, each its own process, watched and restarted.

Invariants:
- Each role leads a session of its own; its whole group is killed before it is started again.
- Every child dies with this process, however this process dies.
- A role that ended with an error that a person must mend is not started again; one that crashed
  is, under a budget. When the budget is gone, everything ends and says why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from common.config import Config
from common.errors import ERROR_MARK, DapoError
from common.machine import gpu_names, place
from common.process import die_with_parent, signal_group, stop_group
from common.server import EmbeddedServer, free_port
from common.startup import URL_VARIABLE

POLL_S = 0.2
GRACE_S = 12.0
"""For roles to drain after SIGTERM; whoever is left is killed, and all is over within 20 s."""
BUDGET_WINDOW_S = 3600.0
BACKOFF_WINDOW_S = 60.0
"""Starts within it lengthen the pause before the next; one crash an hour costs half a second."""


class RoleFailed(DapoError):
    """A role that cannot be started again; the message is what it said last."""


@dataclass
class Role:
    """One process of a run."""

    name: str
    argv: list[str]
    threads: int
    gpus: int = 0  # how many it uses, where there are any
    visible: str | None = None  # CUDA_VISIBLE_DEVICES; None leaves it as it is
    process: subprocess.Popen[bytes] | None = None
    starts: deque[float] = field(default_factory=deque)
    again_at: float = 0.0
    said_before: int = 0  # where this start's output begins in the role's file


class Supervisor:
    """Starts, watches and ends the roles of one run.

    The end of the first role is the end of the run; `at_stop` says what it does when told to stop.
    """

    def __init__(
        self, config: Config, tell: Callable[[str], None], roles: list[Role] | None = None,
        at_stop: str = "the learner saves a checkpoint first",
    ) -> None:  # fmt: skip
        self.config, self.tell, self.at_stop = config, tell, at_stop
        self.logs = config.run_dir / "logs"
        self.url = ""
        self.server: EmbeddedServer | None = None
        self.roles = roles or training_roles(config)
        self.grace_s = GRACE_S
        self._stop = ""

    def start(self) -> None:
        """The embedded server, if the recipe names none, then every role."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, self._on_signal)
        if self.config.redis.url is None and URL_VARIABLE not in os.environ:
            redis = self.config.redis
            self.server = EmbeddedServer(self.config.run_dir / "server", redis.maxmemory_mib)
            self.url = self.server.start(self.config.redis.port)
        else:
            from common.startup import redis_url

            self.url = redis_url(self.config)
        _forget_end(self.url, self.config.run.name)
        self._place()
        for role in self.roles:
            self._spawn(role)

    def _place(self) -> None:
        """Give each role GPUs of its own; left to themselves all would take the first one."""
        names = gpu_names()
        if names:
            places = place(names, [role.gpus for role in self.roles])
            for role, chosen in zip(self.roles, places, strict=True):
                role.visible = ",".join(chosen)

    def run(self, tick: Callable[[], None]) -> bool:
        """Watch until the first role is done; True if it is, False if the run was stopped.

        Raises:
            RoleFailed: a role cannot be started again.
        """
        first = self.roles[0]
        while not self._stop:
            tick()
            self._watch_server()
            for role in self.roles:
                self._watch(role)
            assert first.process is not None
            if first.process.poll() == 0:
                self._await_others()
                return True
            time.sleep(POLL_S)
        self.tell(f"{self._stop}: stopping; {self.at_stop}")
        return False

    def end(self) -> None:
        """SIGTERM to all, SIGKILL to who is left; the server goes last."""
        with contextlib.suppress(DapoError):
            self._watch_server()  # who finishes what it holds needs it
        for role in self.roles:
            if role.process:
                signal_group(role.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + self.grace_s
        for role in self.roles:
            if role.process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    role.process.wait(max(0.0, deadline - time.monotonic()))
                stop_group(role.process)
        if self.server:
            self.server.stop()

    def _await_others(self) -> None:
        """The roles see the end of the run by themselves within a second or two."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if all(role.process and role.process.poll() is not None for role in self.roles):
                return
            time.sleep(POLL_S)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = signal.Signals(number).name

    def _spawn(self, role: Role) -> None:
        environment = os.environ | {
            URL_VARIABLE: self.url,
            "DAPO_LOG_NAME": role.name,
            "DAPO_MEMBER": role.name,
            "OMP_NUM_THREADS": str(role.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        if role.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = role.visible
        with (self.logs / f"{role.name}.out").open("ab") as out:
            role.said_before = out.tell()
            role.process = subprocess.Popen(
                role.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        role.starts.append(time.monotonic())

    def _watch_server(self) -> None:
        """Start a dead embedded server again where it was: the roles wait and come back."""
        if self.server is None or self.server.process is None:
            return
        status = self.server.process.poll()
        if status is not None:
            self.tell(f"the embedded server ended with status {status}; starting it again")
            stop_group(self.server.process)
            self.server.start(urlsplit(self.url).port)

    def _watch(self, role: Role) -> None:
        """Start a crashed role again, or give the run up."""
        assert role.process is not None
        status = role.process.poll()
        if status is None or status == 0 or self._stop:
            return
        now = time.monotonic()
        if role.again_at == 0.0:
            stop_group(role.process)
            words, for_a_person = self._last_words(role)
            if for_a_person:
                raise RoleFailed(words)
            why = f"{role.name} ended with status {status}: {words}"
            while role.starts and now - role.starts[0] > BUDGET_WINDOW_S:
                role.starts.popleft()
            if len(role.starts) > self.config.run.restarts:
                raise RoleFailed(
                    f"{why}; it was started {len(role.starts)} times within an hour "
                    f"(run.restarts = {self.config.run.restarts}); see {self.logs / role.name}.out"
                )
            delay = restart_delay(now - start for start in role.starts)
            role.again_at = now + delay
            self.tell(f"{why}; starting it again in {delay:.1f} s")
        elif now >= role.again_at:
            role.again_at = 0.0
            self._spawn(role)

    def _last_words(self, role: Role) -> tuple[str, bool]:
        """What a role said at its end, and whether that is for a person to mend.

        torchrun hides the status of its ranks, so the message itself is looked for.
        """
        with (self.logs / f"{role.name}.out").open("rb") as file:
            file.seek(role.said_before)
            lines = file.read().decode(errors="replace").strip().splitlines()
        for line in reversed(lines):
            if line.startswith(ERROR_MARK):
                return line.removeprefix(ERROR_MARK), True
        told = [line for line in lines if line.strip("=- ")]
        return (told[-1] if told else "it said nothing"), False


def restart_delay(ages: Iterable[float]) -> float:
    """Seconds to wait before a crashed role is started again, given the ages of its starts."""
    recent = sum(age < BACKOFF_WINDOW_S for age in ages)
    return min(0.5 * 2.0 ** (min(recent, 10) - 1), 10.0) if recent else 0.5


def training_roles(config: Config) -> list[Role]:
    """The learner first: its end is the end of the run."""
    recipe = str(config.run_dir / "config.toml")
    python = [sys.executable, "-m"]
    ranks = config.learner.ranks
    learner = [*python, "learner", recipe]
    if ranks > 1:
        launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}"]
        launcher += [f"--master-port={free_port()}", "-m"]
        learner = [*python, *launcher, "learner", recipe]
    return [Role("learner", learner, config.learner.threads, ranks), *_workers(config)]


def evaluation_roles(config: Config, version: str) -> list[Role]:
    """The examiner in the learner's place, and generators that serve frozen weights."""
    frozen = ("--frozen", version)
    argv = [sys.executable, "-m", "common.cli", "examiner"]
    examiner = Role("examiner", [*argv, str(config.run_dir / "config.toml"), *frozen], 1)
    return [examiner, *_workers(config, *frozen)]


def _workers(config: Config, *of_generators: str) -> list[Role]:
    recipe = str(config.run_dir / "config.toml")
    generator = config.generator
    gpus = generator.tensor_parallel if generator.engine == "vllm" else 0
    roles = []
    for index in range(config.verifier.count):
        roles.append(Role(f"verifier-{index}", [sys.executable, "-m", "verifier", recipe], 1))
    for index in range(generator.count):
        argv = [sys.executable, "-m", "generator", recipe, *of_generators]
        roles.append(Role(f"generator-{index}", argv, generator.threads, gpus))
    return roles


def _forget_end(url: str, run: str) -> None:
    """A run that goes on after its end is not over any more."""
    import redis

    from common.refusal import refused

    client = redis.Redis.from_url(url, socket_timeout=5.0)
    try:
        client.delete(f"{{{run}}}:ended")
    except redis.RedisError as error:
        raise refused(url, error) from None
    finally:
        client.close()


def link_latest(run_dir: Path) -> None:
    """`runs/latest` points to the run that was started last."""
    link = run_dir.parent / "latest"
    with contextlib.suppress(OSError):
        temporary = link.with_name(".latest")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(run_dir.name)
        temporary.rename(link)
