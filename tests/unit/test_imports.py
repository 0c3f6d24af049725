"""What importing the shared package pulls in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import common

HEAVY = ("torch", "vllm", "deepspeed", "transformers")
NEEDS_TORCH = "transport"
MODULES = sorted(path.stem for path in Path(common.__file__).parent.glob("*.py"))


def loaded_by(statements: str) -> list[str]:
    """Which heavy packages a fresh interpreter has loaded after these statements."""
    code = f"{statements}\nimport sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


def test_importing_common_loads_neither_torch_nor_vllm() -> None:
    assert loaded_by("import common") == []


def test_no_module_of_common_but_the_transport_loads_torch_or_vllm() -> None:
    names = [name for name in MODULES if name not in ("__init__", NEEDS_TORCH)]
    assert "broker" in names
    imports = "\n".join(f"import common.{name}" for name in names)
    if heavy := loaded_by(imports):
        guilty = [name for name in names if loaded_by(f"import common.{name}")]
        pytest.fail(f"{', '.join(heavy)} loaded by {', '.join(guilty)}")


def test_dispatch_and_the_generators_loop_are_imported_without_an_engine() -> None:
    loaded = loaded_by(
        "import learner.dispatcher, generator.main, generator.simulated, verifier.worker"
    )
    assert "vllm" not in loaded
    assert "deepspeed" not in loaded
