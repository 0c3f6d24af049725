"""Start-up check of the checkers in files of one's own: whether their code loads.

It is tried as it will run: in a killable process, with the deadline and the memory of a check.
"""

from __future__ import annotations

import asyncio

from common.errors import ConfigError
from common.sections import VerifierSection
from common.subject import Subject
from verifier.pool import CheckerPool


def own_checkers(subject: Subject) -> str:
    """Which checkers the recipe brings along."""
    settings = subject.config.verifier
    require_own_checkers(settings)
    told = [f"{name} is {place}" for name, place in settings.checkers.items()]
    return ", ".join(told) or "none in a file of your own"


def require_own_checkers(settings: VerifierSection) -> None:
    """Load each of `verifier.checkers`, if there are any.

    Raises:
        ConfigError: naming each that is no checker, its file and the remedy.
    """
    if settings.checkers and (faults := asyncio.run(_faults(settings))):
        raise ConfigError("; ".join(faults))


async def _faults(settings: VerifierSection) -> list[str]:
    limits = (settings.slow_deadline_s, settings.slow_memory_mib)
    faults = []
    async with CheckerPool(1, *limits, warm=()) as pool:
        for name, place in settings.checkers.items():
            if fault := await pool.try_out(place):
                faults.append(f"verifier.checkers.{name} = {place!r}: {_told(fault, settings)}")
    return faults


def _told(fault: str, settings: VerifierSection) -> str:
    if fault == "timeout":
        return (
            f"it is not loaded within verifier.slow_deadline_s = {settings.slow_deadline_s:g}; "
            "do less when the file is loaded, or raise it"
        )
    if "MemoryError" in fault or fault.startswith("died"):
        return (
            f"loading it ends its process ({fault}); it has verifier.slow_memory_mib = "
            f"{settings.slow_memory_mib}"
        )
    return fault
