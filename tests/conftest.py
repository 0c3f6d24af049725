"""What all tests share: a real server, a run of their own on it, a small configuration."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import settings

from common.broker import Broker
from common.config import Config, parse_config
from common.server import EmbeddedServer

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
_runs = itertools.count()

# hypothesis' deadline of 200 ms per example is an assertion on time
settings.register_profile("project", deadline=None)
settings.load_profile("project")


class MakeConfig(Protocol):
    """Builds a valid configuration; keywords are sections, merged over the small ones."""

    def __call__(self, **sections: dict[str, Any]) -> Config: ...


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One embedded server for the whole session; tests keep apart by their run's name."""
    embedded = EmbeddedServer(tmp_path_factory.mktemp("server"), maxmemory_mib=256)
    embedded.start()
    yield embedded
    embedded.stop(0.0)


@pytest.fixture
def run_name() -> str:
    """A run that no other test uses."""
    return f"run-{next(_runs)}"


@pytest.fixture
async def broker(server: EmbeddedServer, run_name: str) -> AsyncIterator[Broker]:
    """A connection to the session's server, in a fresh run."""
    connected = await Broker.connect(server.url, run_name, lease_s=1.0)
    yield connected
    await connected.close()


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A minimal configuration whose run directory is this test's own."""

    def make(**sections: dict[str, Any]) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": str(tmp_path / "runs"), "name": "test"},
            "model": {"path": "model", "max_length": 64},
            "data": {"train": ["train.jsonl"]},
            "sampling": {"max_tokens": 32},
            "algorithm": {"group_size": 4, "groups_per_batch": 4},
        }
        for name, keys in sections.items():
            tree[name] = tree.get(name, {}) | keys
        return parse_config(tree, "test")

    return make


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real problem files; tests that need it are skipped where it is missing."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the data files are not here: {SHARED_DATA} is missing")
    return SHARED_DATA
