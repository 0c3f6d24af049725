"""What the server says of a run, for whoever looks on: a short, synchronous read of its keys.

Nothing depends on it and nothing is written. A server that is lost is an answer, not an error.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from common.address import address
from common.config import load_config
from common.entry import STREAMS
from common.errors import BrokerError, ConfigError, DapoError
from common.startup import redis_url

TIMEOUT_S = 1.0
_LOST = (RedisError, OSError, ValueError)


def read_status(url: str, run: str) -> dict[str, Any]:
    """Members, their last reports, queue depths and the end of a run; `{"error": …}` if lost.

    - `members`: name to role, process and `lease_age_s` (seconds since the lease was renewed) of
      everyone with a lease, that is, alive;
    - `reports`: name to the figures it reported last, with their `time`; those of the dead stay;
    - `streams`: entries in prompts, rollouts, verdicts and among the dead letters;
    - `open`: groups on the server; `published`: the version that may be claimed for, or None;
    - `ended`: why the run is over, or None.
    """
    prefix = f"{{{run}}}:"
    try:
        with look_up(url) as client:
            pipe = client.pipeline(transaction=False)
            for stream in (*STREAMS, "dead"):
                pipe.xlen(prefix + stream)
            pipe.hgetall(prefix + "status")
            pipe.scard(prefix + "open")
            pipe.get(prefix + "published")
            pipe.get(prefix + "ended")
            *lengths, reports, groups, published, ended = pipe.execute()
            members = _members(client, prefix + "lease:")
    except _LOST as error:
        return {"error": f"no answer from the server at {_where(url)}: {error}"}
    return {
        "time": time.time(),
        "members": members,
        "reports": _parsed(reports),
        "streams": dict(zip((*STREAMS, "dead"), lengths, strict=True)),
        "open": groups,
        "published": published or None,
        "ended": ended or None,
    }


def open_groups(run_dir: Path) -> set[int] | None:
    """Ordinals of the groups that a run's server holds; None if no server answers."""
    try:
        url, run = server_of(run_dir)
        with look_up(url) as client:
            names: Any = client.smembers(f"{{{run}}}:open")
    except (DapoError, *_LOST):
        return None
    return {int(name) for name in names if name.isdigit()}  # e…: groups of an evaluation


def server_of(run_dir: Path) -> tuple[str, str]:
    """Address and run name: of the run directory's embedded server, else of its configuration.

    Raises:
        ConfigError: the directory has no configuration, or that names no server.
    """
    config = load_config(run_dir / "config.toml")
    embedded = run_dir / "server" / "url"
    url = embedded.read_text().strip() if embedded.exists() else redis_url(config)
    return url, config.run.name


def target_of(target: str, run: str | None) -> tuple[Path | None, str, str]:
    """Run directory (None if it is not known), address and run name of what a command names.

    `target` is a run directory, or the address of a server; `run` chooses among its runs.

    Raises:
        ConfigError: it is neither, or the server has no run of that name, or several.
        BrokerError: the server does not answer.
    """
    if "://" not in target:
        folder = Path(target).resolve()
        if not folder.is_dir():
            raise ConfigError(
                f"{target} is neither a run directory nor a redis:// address; see runs/"
            )
        url, name = server_of(folder)
        return folder, url, run or name
    try:
        with look_up(target) as client:
            found = {
                key[1:].partition("}")[0]
                for pattern in ("{*}:status", "{*}:lease:*")
                for key in client.scan_iter(match=pattern, count=1000)
            }
    except _LOST as error:
        raise BrokerError(f"no answer from the server at {_where(target)}: {error}") from None
    if run is None and len(found) == 1:
        return None, target, found.pop()
    if run is None or run not in found:
        names = ", ".join(sorted(found)) or "no run"
        raise ConfigError(f"the server has {names}; name one with --run")
    return None, target, run


@contextlib.contextmanager
def look_up(url: str, text: bool = True) -> Iterator[Any]:
    """A connection that gives up soon and is closed at the end; replies are text, or bytes."""
    client = redis.Redis.from_url(
        url,
        decode_responses=text,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        yield client
    finally:
        client.close()


def _members(client: Any, prefix: str) -> dict[str, dict[str, Any]]:
    """Who holds a lease. A run's name has no character that means something in a pattern."""
    keys = sorted(client.scan_iter(match=prefix + "*", count=500))
    pipe = client.pipeline(transaction=False)
    for key in keys:
        pipe.get(key)
        pipe.pttl(key)
    replies = pipe.execute()
    names = [key.removeprefix(prefix) for key in keys]
    values, left_ms = replies[::2], dict(zip(names, replies[1::2], strict=True))
    found = _parsed({name: value for name, value in zip(names, values, strict=True) if value})
    for name, info in found.items():
        info["lease_age_s"] = round(max(0.0, info.get("lease_s", 0.0) - left_ms[name] / 1000), 1)
    return found


def _parsed(records: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Records that are JSON objects; anything else is left out."""
    parsed = {}
    for name, text in records.items():
        with contextlib.suppress(ValueError):
            if isinstance(record := json.loads(text), dict):
                parsed[name] = record
    return parsed


def _where(url: str) -> str:
    try:
        return address(url)
    except ValueError:
        return "an address that cannot be read"
