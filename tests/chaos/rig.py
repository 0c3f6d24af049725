"""A `dapo run` that is struck: its processes, its progress, and the blows themselves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.chaos.schedule import Blow

ROOT = Path(__file__).parents[2]
ANSWER_S = 2.0


class Stuck(Exception):
    """The run made no progress, or ended before its time."""


class Victim:
    """A run in the background. `lose_data`: a killed server comes back empty."""

    def __init__(self, recipe: Path, folder: Path, name: str, lose_data: bool = False) -> None:
        self.recipe, self.folder, self.name, self.lose_data = recipe, folder, name, lose_data
        self.dir = folder / name
        self.struck: dict[str, int] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._sets: tuple[str, ...] = ()
        self._stopped: list[tuple[float, list[psutil.Process]]] = []
        self._read = 0
        self._batches: list[dict[str, Any]] = []

    # --- its life ---------------------------------------------------------------------------------

    def start(self, *sets: str) -> None:
        """`dapo run`; a run that was there goes on."""
        self._sets = sets
        keys = [f"run.dir={self.folder}", f"run.name={self.name}", *sets]
        words = [part for key in keys for part in ("--set", key)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DAPO_")}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{self.name}.txt").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "common.cli", "run", str(self.recipe), *words],
                stdout=out, stderr=out, cwd=ROOT, env=environment, start_new_session=True,
            )  # fmt: skip

    def await_batch(self, count: int, stall_s: float) -> bool:
        """Wait until so many batches were trained in all; False if the run is complete before.

        Raises:
            Stuck: none was for `stall_s` seconds, or the run has failed.
        """
        seen, since = len(self.batches()), time.monotonic()
        while (now := len(self.batches())) < count:
            self.tick()
            if now > seen:
                seen, since = now, time.monotonic()
            if self._sup.poll() == 0:
                return False
            if self._sup.returncode is not None:
                raise Stuck(f"the run ended with status {self._sup.returncode}: {self.said()}")
            if time.monotonic() - since > stall_s:
                raise Stuck(f"no batch after number {now} for {stall_s:g} s: {self.said()}")
            time.sleep(0.02)
        return True

    def stop(self, timeout_s: float) -> None:
        """Ctrl-C: a checkpoint is saved and every process ends."""
        self._go_on(float("inf"))
        self._sup.send_signal(signal.SIGINT)
        self._wait(timeout_s)

    def finish(self, timeout_s: float) -> int:
        """Wait for the end; the status of `dapo run`."""
        self._go_on(float("inf"))
        return self._wait(timeout_s)

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.process and self.process.poll() is None:
            left = self._children()
            self._sup.kill()
            psutil.wait_procs(left, timeout=10)

    def _wait(self, timeout_s: float) -> int:
        try:
            return self._sup.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Stuck(f"the run did not end within {timeout_s:g} s: {self.said()}") from None

    def tick(self) -> None:
        """Let processes go on whose time has come."""
        self._go_on(time.monotonic())

    def _go_on(self, now: float) -> None:
        due = [item for item in self._stopped if item[0] <= now]
        self._stopped = [item for item in self._stopped if item[0] > now]
        for _, processes in due:
            for process in processes:
                _signal(process, signal.SIGCONT)

    # --- what it says -----------------------------------------------------------------------------

    @property
    def _sup(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def said(self) -> str:
        return (self.folder / f"{self.name}.txt").read_text(errors="replace")[-600:]

    def batches(self) -> list[dict[str, Any]]:
        """The rows of its batches so far."""
        path = self.dir / "metrics.jsonl"
        if path.exists() and path.stat().st_size > self._read:
            with path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                if b'"kind": "batch"' in line:
                    self._batches.append(json.loads(line))
        return self._batches

    # --- processes --------------------------------------------------------------------------------

    def _children(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._sup.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Living processes by role, each with what it has started at the end of the list."""
        found: dict[str, list[psutil.Process]] = {}
        try:
            direct = psutil.Process(self._sup.pid).children()
        except psutil.NoSuchProcess:
            return found
        for process in direct:
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_server = "valkey" in process.name()
                name = process.environ().get("DAPO_LOG_NAME", "")
            except psutil.Error:
                continue
            if is_server:
                found["server"] = [process]
            elif name:
                found[name] = [process]
        return found

    # --- blows ------------------------------------------------------------------------------------

    def strike(self, blow: Blow) -> bool:
        """Do it; False if there is nobody to be struck just now."""
        acts = {"kill": self._kill, "stop": self._stop_for, "cut": self._cut}
        done = acts[blow.kind](blow)
        if done:
            key = f"{blow.kind} {blow.target}"
            self.struck[key] = self.struck.get(key, 0) + 1
        return done

    def _target(self, blow: Blow) -> psutil.Process | None:
        roles = self.roles()
        names = sorted(name for name in roles if name.partition("-")[0] == blow.target)
        return roles[names[blow.pick % len(names)]][0] if names else None

    def _kill(self, blow: Blow) -> bool:
        if blow.target == "supervisor":
            return self._kill_everything()
        process = self._target(blow)
        if process is None:
            return False
        if blow.target == "server" and self.lose_data:
            # the server goes on writing into files without a name, and finds none when it is back
            shutil.rmtree(self.dir / "server" / "appendonlydir", ignore_errors=True)
        return _signal(process, signal.SIGKILL)

    def _kill_everything(self) -> bool:
        """The supervisor dies and takes everyone along; the same command starts all again."""
        family = self._children()
        self._sup.kill()
        self._sup.wait()
        _, alive = psutil.wait_procs(family, timeout=10)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if alive:
            raise Stuck(f"outlived the supervisor: {[' '.join(p.cmdline()) for p in alive]}")
        self._stopped.clear()
        self.start(*self._sets)
        return True

    def _stop_for(self, blow: Blow) -> bool:
        process = self._target(blow)
        if process is None or not _signal(process, signal.SIGSTOP):
            return False
        self._stopped.append((time.monotonic() + blow.seconds, [process]))
        return True

    def _cut(self, blow: Blow) -> bool:
        """Close connections on the server's side."""
        try:
            url = (self.dir / "server" / "url").read_text()
            with redis.Redis.from_url(url, socket_timeout=ANSWER_S) as client:
                if blow.target == "clients":
                    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    return True
                own = client.client_id()
                ids = sorted(int(c["id"]) for c in client.client_list() if int(c["id"]) != own)
                if ids:
                    client.client_kill_filter(_id=str(ids[blow.pick % len(ids)]))
                return bool(ids)
        except (OSError, redis.RedisError):
            return False


def _signal(process: psutil.Process, number: signal.Signals) -> bool:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True
