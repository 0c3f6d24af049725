"""Named places at which a test may kill the process: `DAPO_FAILPOINT=name[:count]`.

`failpoint("batch_written")` does nothing unless the variable names it; then the process ends
there as by `kill -9`, at the count-th visit (the first by default). `DAPO_FAILPOINT_DIR`, a
folder, makes each failpoint fire once over restarts: a marker file is left in it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_visits: dict[str, int] = {}


def failpoint(name: str) -> None:
    """Die here if the environment says so."""
    wanted, _, count = os.environ.get("DAPO_FAILPOINT", "").partition(":")
    if wanted != name:
        return
    _visits[name] = _visits.get(name, 0) + 1
    if _visits[name] < int(count or 1):
        return
    folder = os.environ.get("DAPO_FAILPOINT_DIR")
    if folder:
        marker = Path(folder) / name
        if marker.exists():
            return
        marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)
