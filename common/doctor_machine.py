"""What this machine has: memory, disks, limits, clock."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from common.disk import fsync_dir, replace_durable
from common.errors import CheckpointError, DiskError
from common.finding import Found, Site, fault, note, ok
from common.machine import this_machine

GIB = 2**30
MEMORY_GIB, DISK_GIB, SHARED_GIB = 4.0, 20.0, 1.0
"""Free amounts below which a small model runs into trouble."""
LEAST_DISK_GIB = 1.0
OPEN_FILES = (256, 1024)
"""Limits of open files below which there is a fault, or a note."""
FSYNC_S = 0.1
SKEW_S = 2.0
SHARED = Path("/dev/shm")


def processor(site: Site) -> Found:
    """Cores that this process may use, and what engines need of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    busy = f"; load {load:.1f}: others work here too" if load > 1.5 * (cores or 1) else ""
    text = f"{cores} cores{busy}"
    return note(text) if busy else ok(text)


def memory(site: Site) -> Found:
    """Memory that is free, within the limit of a container."""
    total = this_machine().host
    free = min(psutil.virtual_memory().available, total)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free < MEMORY_GIB * GIB:
        return note(f"{text}; an engine and a learner of a small model need {MEMORY_GIB:.0f}: end "
                    "other processes, or raise the container's limit")  # fmt: skip
    return ok(text)


def shared_memory(site: Site) -> Found:
    """/dev/shm, through which engine processes and NCCL talk."""
    if not SHARED.is_dir():
        return fault(f"{SHARED} is missing; mount a tmpfs there")
    space = shutil.disk_usage(SHARED)
    text = f"{space.free / GIB:.1f} of {space.total / GIB:.1f} GiB free"
    if space.free < SHARED_GIB * GIB:
        return note(f"{text}, too little for tensor parallelism and NCCL; in a container: "
                    "--shm-size=8g")  # fmt: skip
    return ok(text)


def disk(site: Site) -> Found:
    """Room for run directories."""
    space = shutil.disk_usage(_existing(site.folder))
    text = f"{space.free / GIB:.1f} GiB free in {site.folder}"
    if space.free < LEAST_DISK_GIB * GIB:
        return fault(f"{text}; free space, or set run.dir to another disk")
    if space.free < DISK_GIB * GIB:
        return note(f"{text}; checkpoints of a large model need more: checkpoint.keep_last")
    return ok(text)


def durable_files(site: Site) -> Found:
    """Locks, renames and fsync where run directories are: what the ledger is built on."""
    from learner.timeline import RunLock

    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_existing(site.folder)) as name:
            folder = Path(name)
            first = RunLock(folder)
            try:
                RunLock(folder)
            except CheckpointError as error:
                if "another learner" not in str(error):
                    return fault(str(error))
            else:
                return fault(f"two locks on one file in {site.folder} hold at once; mount it with "
                             "locks (NFS without nolock), or set run.dir elsewhere")  # fmt: skip
            del first
            started = time.monotonic()
            replace_durable(folder / "probe", b"x" * 4096)
            fsync_dir(folder)
            took = time.monotonic() - started
    except (CheckpointError, DiskError) as error:
        return fault(str(error))
    except OSError as error:
        return fault(f"{site.folder} cannot be written ({error.strerror}); change its owner, or "
                     "set run.dir to another folder")  # fmt: skip
    text = f"locks exclude, renames and fsync work in {site.folder}; a durable write {took:.3f} s"
    if took > FSYNC_S:
        return note(f"{text}, which is slow: each batch needs several; use a local disk")
    return ok(text)


def open_files(site: Site) -> Found:
    """How many files a process may have open: sockets are files too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**63 if soft == resource.RLIM_INFINITY else soft
    text = f"{soft} (ulimit -n)" if limit < 2**63 else "no limit"
    remedy = f"raise it: `ulimit -n {max(OPEN_FILES[1], 65536)}`, LimitNOFILE= in systemd"
    if limit < OPEN_FILES[0]:
        return fault(f"{text} is too few for a learner's sockets; {remedy}")
    return note(f"{text}; {remedy}") if limit < OPEN_FILES[1] else ok(text)


def clock(site: Site) -> Found:
    """This clock against that of the file system, and of the recipe's server."""
    skews = {"the file system": _file_skew(site.folder)} | _server_skew(site)
    off = {name: skew for name, skew in skews.items() if abs(skew) > SKEW_S}
    if off:
        told = ", ".join(f"{skew:+.1f} s from {name}" for name, skew in off.items())
        return note(f"{told}: ages in `dapo status` are off by that; synchronise the clocks (NTP)")
    return ok(f"agrees with {' and '.join(skews)}")


def _file_skew(folder: Path) -> float:
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=_existing(folder)) as file:
        file.write(b"now")
        file.flush()
        return time.time() - os.stat(file.name).st_mtime


def _server_skew(site: Site) -> dict[str, float]:
    """Seconds that this clock is ahead of the recipe's server, by half the way there and back."""
    from redis.exceptions import RedisError

    from common.startup import URL_VARIABLE, redis_url
    from common.status import look_up

    if site.config is None or not (site.config.redis.url or os.environ.get(URL_VARIABLE)):
        return {}
    try:
        with look_up(redis_url(site.config)) as client:
            before = time.time()
            seconds, micros = client.time()
            here = (before + time.time()) / 2
    except (OSError, RedisError):
        return {}  # another check says that it does not answer
    return {"the server": here - float(seconds) - float(micros) / 1e6}


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())
