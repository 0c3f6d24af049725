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

from common.broker import STREAMS, address
from common.config import load_config
from common.errors import DapoError
from common.startup import redis_url

TIMEOUT_S = 1.0
_LOST = (RedisError, OSError, ValueError)


def read_status(url: str, run: str) -> dict[str, Any]:
    """Members, their last reports, queue depths and the end of a run; `{"error": …}` if lost.

    - `members`: name to role and process of everyone with a lease, that is, alive;
    - `reports`: name to the figures it reported last, with their `time`; those of the dead stay;
    - `streams`: entries in prompts, rollouts, verdicts and among the dead letters;
    - `open`: groups on the server; `published`: the version that may be claimed for, or None;
    - `ended`: why the run is over, or None.
    """
    prefix = f"{{{run}}}:"
    try:
        with _client(url) as client:
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
    """Ordinals of the groups that a run's server holds; None if no server answers.

    The server is the embedded one of the run directory, else the one of its configuration.
    """
    try:
        config = load_config(run_dir / "config.toml")
        embedded = run_dir / "server" / "url"
        url = embedded.read_text().strip() if embedded.exists() else redis_url(config)
        with _client(url) as client:
            names: Any = client.smembers(f"{{{config.run.name}}}:open")
    except (DapoError, *_LOST):
        return None
    return {int(name) for name in names if name.isdigit()}  # e…: groups of an evaluation


@contextlib.contextmanager
def _client(url: str) -> Iterator[Any]:
    """A connection that gives up soon and is closed at the end."""
    client = redis.Redis.from_url(
        url,
        decode_responses=True,
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
    keys = list(client.scan_iter(match=prefix + "*", count=500))
    values = client.mget(keys) if keys else []
    found = {key.removeprefix(prefix): value for key, value in zip(keys, values, strict=True)}
    return _parsed({name: value for name, value in sorted(found.items()) if value})


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
