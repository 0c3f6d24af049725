"""How a role starts: its configuration, its connection, its name, its signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from common.config import Config, dump_toml, fingerprint
from common.errors import ConfigError

URL_VARIABLE = "DAPO_REDIS_URL"
PASSWORD_VARIABLE = "DAPO_REDIS_PASSWORD"
CACHE = Path("cache")


def base_dir(config: Config) -> Path | None:
    """Folder in which [base] is made: named by its settings, so that a change makes another."""
    if config.base is None:
        return None
    return CACHE / f"{config.base.kind}-{fingerprint(config.base)}"


def resolve(config: Config) -> Config:
    """Put the folder of [base] where paths say `{base}`.

    Raises:
        ConfigError: a path says `{base}` and there is no section [base].
    """
    folder = base_dir(config)

    def fill(path: str) -> str:
        if "{base}" not in path:
            return path
        if folder is None:
            raise ConfigError(f"{path!r} names {{base}}, but the recipe has no section [base]")
        return path.replace("{base}", str(folder))

    heldout = config.data.heldout
    data = config.data.model_copy(
        update={
            "train": [fill(path) for path in config.data.train],
            "heldout": heldout and fill(heldout),
        }
    )
    model = config.model.model_copy(update={"path": fill(config.model.path)})
    return config.model_copy(update={"data": data, "model": model})


def require_model(config: Config) -> Path:
    """The folder of the model.

    Raises:
        ConfigError: it is missing or no Hugging Face folder; the message says how to get it.
    """
    folder = Path(config.model.path)
    if (folder / "config.json").exists():
        return folder
    remedy = "set model.path to a Hugging Face folder"
    if config.base is not None:
        remedy = f"`dapo model RECIPE` makes the {config.base.kind} base, and so does `dapo run`"
    raise ConfigError(f"model folder {folder} is missing or has no config.json; {remedy}")


def redis_url(config: Config) -> str:
    """Address of the server, with the password in it.

    The variable DAPO_REDIS_URL goes before redis.url; the password comes from
    DAPO_REDIS_PASSWORD, or the file named by redis.password_file, and never from the recipe.
    """
    url = os.environ.get(URL_VARIABLE) or config.redis.url
    if not url:
        raise ConfigError(
            f"no server: set redis.url (or the variable {URL_VARIABLE}), or use `dapo run`, "
            "which starts an embedded one"
        )
    password = os.environ.get(PASSWORD_VARIABLE)
    if password is None and config.redis.password_file is not None:
        try:
            password = config.redis.password_file.read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"redis.password_file {config.redis.password_file}: {error.strerror}"
            ) from None
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(f"redis.url must begin with redis:// or rediss://, not {parts.scheme}://")
    if password and not parts.password:
        user = parts.username or ""
        host = parts.netloc.rpartition("@")[2]
        url = urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))
    return url


def member_name(role: str) -> str:
    """Name of this process on the server, new at each start: claims are never inherited."""
    given = os.environ.get("DAPO_MEMBER", f"{role}-{socket.gethostname()}")
    return f"{given}.{os.getpid()}"


def log_file(config: Config) -> Path | None:
    """Where this role logs: a file under `dapo run`, the terminal when started by hand."""
    name = os.environ.get("DAPO_LOG_NAME")
    return config.run_dir / "logs" / f"{name}.jsonl" if name else None


def write_config(config: Config) -> Path:
    """Keep the resolved configuration in the run directory."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    path = config.run_dir / "config.toml"
    path.write_text(dump_toml(config))
    return path


def on_signals(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """Call `act` on SIGTERM and on SIGINT."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, act)
