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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from common.config import Config
from common.errors import ERROR_MARK, DapoError
from common.process import die_with_parent, signal_group, stop_group
from common.server import EmbeddedServer, free_port
from common.startup import URL_VARIABLE

POLL_S = 0.2
GRACE_S = 12.0
"""For roles to drain after SIGTERM; whoever is left is killed, and all is over within 20 s."""
BUDGET_WINDOW_S = 3600.0


class RoleFailed(DapoError):
    """A role that cannot be started again; the message is what it said last."""


@dataclass
class Role:
    """One process of a run."""

    name: str
    argv: list[str]
    threads: int
    process: subprocess.Popen[bytes] | None = None
    starts: deque[float] = field(default_factory=deque)
    again_at: float = 0.0
    said_before: int = 0  # where this start's output begins in the role's file


class Supervisor:
    """Starts, watches and ends the roles of one run."""

    def __init__(self, config: Config, tell: Callable[[str], None]) -> None:
        self.config, self.tell = config, tell
        self.logs = config.run_dir / "logs"
        self.url = ""
        self.server: EmbeddedServer | None = None
        self.roles = _roles(config)
        self.grace_s = GRACE_S
        self._stop = ""

    def start(self) -> None:
        """The embedded server, if the recipe names none, then every role."""
        self.logs.mkdir(parents=True, exist_ok=True)
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, self._on_signal)
        if self.config.redis.url is None and URL_VARIABLE not in os.environ:
            self.server = EmbeddedServer(self.config.run_dir / "server")
            self.url = self.server.start(self.config.redis.port)
        else:
            from common.startup import redis_url

            self.url = redis_url(self.config)
        _forget_end(self.url, self.config.run.name)
        for role in self.roles:
            self._spawn(role)

    def run(self, tick: Callable[[], None]) -> bool:
        """Watch until the learner is done; True if the run is complete, False if it was stopped.

        Raises:
            RoleFailed: a role cannot be started again.
        """
        learner = self.roles[0]
        while not self._stop:
            tick()
            self._watch_server()
            for role in self.roles:
                self._watch(role)
            assert learner.process is not None
            if learner.process.poll() == 0:
                self._await_others()
                return True
            time.sleep(POLL_S)
        self.tell(f"{self._stop}: stopping; the learner saves a checkpoint first")
        return False

    def end(self) -> None:
        """SIGTERM to all, SIGKILL to who is left; the server goes last."""
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
            delay = min(0.5 * 2 ** (len(role.starts) - 1), 10.0)
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


def _roles(config: Config) -> list[Role]:
    """The learner first: its end is the end of the run."""
    recipe = str(config.run_dir / "config.toml")
    python = [sys.executable, "-m"]
    ranks = config.learner.ranks
    learner = [*python, "learner", recipe]
    if ranks > 1:
        launcher = ["torch.distributed.run", f"--nproc-per-node={ranks}"]
        launcher += [f"--master-port={free_port()}", "-m"]
        learner = [*python, *launcher, "learner", recipe]
    roles = [Role("learner", learner, config.learner.threads)]
    for index in range(config.verifier.count):
        roles.append(Role(f"verifier-{index}", [*python, "verifier", recipe], 1))
    for index in range(config.generator.count):
        argv = [*python, "generator", recipe]
        roles.append(Role(f"generator-{index}", argv, config.generator.threads))
    return roles


def _forget_end(url: str, run: str) -> None:
    """A run that goes on after its end is not over any more."""
    import redis

    from common.broker import address, password_help
    from common.errors import BrokerError

    client = redis.Redis.from_url(url, socket_timeout=5.0)
    try:
        client.delete(f"{{{run}}}:ended")
    except redis.AuthenticationError as error:
        raise BrokerError(password_help(address(url), error)) from None
    except redis.RedisError as error:
        raise BrokerError(f"no server answers at {address(url)}: {error}") from None
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
