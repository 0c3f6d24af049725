"""Named places at which a test may kill or halt the process: `DAPO_FAILPOINT=name[:count],…`.

`failpoint("batch_written")` does nothing unless the variable names it; then the process ends
there as by `kill -9`, at the count-th visit (the first by default). With `DAPO_FAILPOINT_HALT_S`
the thread stands still for so many seconds instead, and goes on. `DAPO_FAILPOINT_DIR`, a folder,
makes each failpoint fire once over all processes and restarts: a marker file is left in it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_visits: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Die or halt here if the environment says so."""
    if name not in os.environ.get("DAPO_FAILPOINT", ""):
        return
    count = _wanted().get(name)
    if count is None:
        return
    _visits[name] = _visits.get(name, 0) + 1
    if _visits[name] < count or not _first(name):
        return
    if halt_s := os.environ.get("DAPO_FAILPOINT_HALT_S"):
        time.sleep(float(halt_s))
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def _wanted() -> dict[str, int]:
    """The visit at which each failpoint fires, by name."""
    wanted = {}
    for item in os.environ.get("DAPO_FAILPOINT", "").split(","):
        name, _, count = item.partition(":")
        wanted[name] = int(count or 1)
    return wanted


def _first(name: str) -> bool:
    """Whether nobody has fired it before, as far as markers are kept."""
    folder = os.environ.get("DAPO_FAILPOINT_DIR")
    if not folder:
        return True
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
