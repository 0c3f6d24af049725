"""`dapo doctor`: whether this machine can run the system, one line for each thing looked at.

What is tried is tried for real (a server, a collective, a lock), in folders that are deleted, and
nothing is left running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from common.doctor_machine import (
    clock,
    disk,
    durable_files,
    memory,
    open_files,
    processor,
    shared_memory,
)
from common.doctor_software import (
    collectives,
    compiler,
    embedded_server,
    gpus,
    named_server,
    packages,
    plugin,
    python,
)
from common.errors import DapoError
from common.finding import Finding, Found, Site

Check = Callable[[Site], Found | None]

CHECKS: Mapping[str, Check] = {
    "python": python,
    "packages": packages,
    "vllm plugin": plugin,
    "compiler": compiler,
    "processor": processor,
    "gpu": gpus,
    "collectives": collectives,
    "embedded server": embedded_server,
    "server": named_server,
    "run directory": durable_files,
    "disk": disk,
    "memory": memory,
    "shared memory": shared_memory,
    "open files": open_files,
    "clock": clock,
}


def examine(site: Site, checks: Mapping[str, Check] = CHECKS) -> Iterator[Finding]:
    """Each finding as soon as it is made; a check that does not apply has none."""
    for name, check in checks.items():
        try:
            found = check(site)
        except (DapoError, OSError) as error:
            found = "FAULT", str(error)
        if found is not None:
            yield Finding(name, *found)
