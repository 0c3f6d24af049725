"""Child processes that die with their parent, and process groups that end as one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` to this process when the thread that started it ends.

    Linux only; elsewhere nothing happens. Start children from a main thread: the signal
    follows the thread, not the process. A parent that died before the call is noticed by
    the change of the parent's id, so that there is no gap.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def stop_group(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """End a child that leads its own group, and the group: SIGTERM, SIGKILL after `grace_s`."""
    if grace_s > 0 and process.poll() is None:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    # also what the leader left behind when it ended by itself
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def signal_group(pgid: int, sig: int) -> None:
    """Send a signal to a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, sig)


def rss_mib() -> float:
    """Resident memory of this process, in MiB; 0 where /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0
