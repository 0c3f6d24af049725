"""Start-up check of the checkers in files of one's own: whether their code loads.

It is tried as it will run: in a killable process, with the deadline and the memory of a check.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.errors import ConfigError
from common.problem_files import Problem, read_problems
from common.sections import VerifierSection
from common.subject import Subject
from verifier import registry
from verifier.pool import CheckerPool


def own_checkers(subject: Subject) -> str:
    """Which checkers the recipe brings along."""
    settings = subject.config.verifier
    require_own_checkers(settings, subject.config.data.train)
    told = [f"{name} is {place}" for name, place in settings.checkers.items()]
    return ", ".join(told) or "none in a file of your own"


def require_own_checkers(settings: VerifierSection, files: Iterable[str] = ()) -> None:
    """Load each of `verifier.checkers`, if there are any, and have it judge an empty response.

    The gold is that of the first row of each of `files`, if the row is that checker's.

    Raises:
        ConfigError: naming each that is no checker, its file and the remedy; or verifier.checker,
            if nothing has that name.
    """
    registry.install(settings.checkers)
    try:
        registry.get(settings.checker)
    except registry.UnknownChecker as error:
        raise ConfigError(f"verifier.checker = {settings.checker!r}: {error}") from None
    if settings.checkers and (faults := asyncio.run(_faults(settings, _first(settings, files)))):
        raise ConfigError("; ".join(faults))


def _first(settings: VerifierSection, files: Iterable[str]) -> dict[str, Problem]:
    """A row of each checker; files that are not there yet are left out."""
    found: dict[str, Problem] = {}
    for path in map(Path, files):
        if path.is_file() and (problem := next(iter(read_problems(path)), None)):
            found.setdefault(problem.checker or settings.checker, problem)
    return found


async def _faults(settings: VerifierSection, rows: Mapping[str, Problem]) -> list[str]:
    limits = (settings.slow_deadline_s, settings.slow_memory_mib)
    faults = []
    async with CheckerPool(1, *limits, warm=()) as pool:
        for name, place in settings.checkers.items():
            if fault := await pool.try_out(place):
                faults.append(f"verifier.checkers.{name} = {place!r}: {_told(fault, settings)}")
            elif name in rows and rows[name].gold is not None:
                gold = str(rows[name].gold)
                options = {
                    "boxed": settings.boxed,
                    "exact_arithmetic": settings.exact_arithmetic,
                    "truncated": False,
                }
                verdict = await pool.check(name, "", gold, options)
                if verdict.outcome == "error":
                    faults.append(
                        f"verifier.checkers.{name} = {place!r} fails on an empty response to "
                        f"{rows[name].where}, gold {gold!r}: {verdict.reason}"
                    )
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
