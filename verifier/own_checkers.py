"""Checkers in a file of one's own: FILE.py:FUNCTION, as a recipe or the command line names them.

Code is loaded from a file only because the recipe (`verifier.checkers`) or an option names that
file. A data row can name a checker by the name that the recipe gives it, and never a file: data
must not be able to run code. It is loaded in the killable processes of `verifier/pool.py` alone;
every other process knows the names.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from verifier.outcome import Verdict, error

_PLACE = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")
_OPTIONS = {"boxed": True, "exact_arithmetic": False, "truncated": False}
"""What a verifier passes by name; another version may pass more."""


class CheckerFault(Exception):
    """A file or function that is no checker; the text says why and what to do."""


def is_place(text: str) -> bool:
    """Whether a text is of the form FILE.py:FUNCTION."""
    return _PLACE.fullmatch(text) is not None


def judge(place: str, response: str, gold: str, **options: Any) -> Any:
    """The result of the function at `place`. Raises CheckerFault, and what the function raises."""
    return load(place)(response, gold, **options)


def try_out(place: str) -> Verdict:
    """Load what is at `place`; the outcome is "error", with the reason, if it is no checker."""
    try:
        load(place)
    except CheckerFault as fault:
        return error(str(fault))
    return Verdict("correct")


@lru_cache(maxsize=64)
def load(place: str) -> Any:
    """The function at `place`; its file is run once in a process.

    Raises:
        CheckerFault: there is no such file or function, the file fails, or the function does not
            take what a checker is given.
    """
    found = _PLACE.fullmatch(place)
    if found is None:
        raise CheckerFault("write it as FILE.py:FUNCTION")
    path, name = Path(found["file"]), found["function"]
    if not path.is_file():
        raise CheckerFault(f"there is no file {path}; paths are relative to the working directory")
    function = getattr(_module(path), name, None)
    if not callable(function):
        raise CheckerFault(f"{path} has no function {name}; define it, or name another")
    try:
        inspect.signature(function).bind("response", "gold", **_OPTIONS)
    except (TypeError, ValueError) as problem:
        raise CheckerFault(
            f"{name} in {path} cannot be called as a checker is ({problem}); write it as "
            f"def {name}(response, gold, **options)"
        ) from None
    return function


def _module(path: Path) -> Any:
    """The file as a module of its own; it is not found by `import`, nor are its neighbours."""
    name = f"own_checkers.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # as its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except Exception as problem:  # foreign code
        raise CheckerFault(f"{path} fails when it is loaded: {_told(problem, path)}") from problem
    return module


def _told(problem: Exception, path: Path) -> str:
    """The error, with the line of the file at which it arose."""
    trace, line = problem.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f" (line {line})" if line else ""
    return f"{type(problem).__name__}: {problem}{where}"
