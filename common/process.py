"""Child processes that die with their parent, and process groups that end as one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

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


def kill_group(pgid: int, grace_s: float = 0.0) -> None:
    """End every process of a group: SIGTERM, then SIGKILL once `grace_s` has passed."""
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(ProcessLookupError):
        if grace_s > 0:
            os.killpg(pgid, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(pgid, 0)
            time.sleep(0.05)
        os.killpg(pgid, signal.SIGKILL)


def rss_mib() -> float:
    """Resident memory of this process, in MiB; 0 where /proc is missing."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0
