"""How a role starts: its configuration, its connection, its name."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from common.address import QUERY, with_certificates, with_credentials
from common.config import Config, dump_toml, fingerprint
from common.disk import make_dir, replace_durable
from common.errors import ConfigError
from common.model_facts import public_name
from common.sections import RedisSection

URL_VARIABLE = "DAPO_REDIS_URL"
USER_VARIABLE = "DAPO_REDIS_USER"
PASSWORD_VARIABLE = "DAPO_REDIS_PASSWORD"
PASSWORD_FILE_VARIABLE = "DAPO_REDIS_PASSWORD_FILE"
CACHE = Path("cache")


def base_dir(config: Config) -> Path | None:
    """Folder in which [base] is made: named by its settings, so that a change makes another."""
    if config.base is None:
        return None
    return CACHE / f"{config.base.kind}-{fingerprint(config.base)}"


def resolve(config: Config) -> Config:
    """Put the folder of [base] where paths say `{base}`, and make places of checkers absolute.

    A role that is started in another directory with the configuration of the run finds its checker.

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
            "heldout": heldout and [fill(path) for path in heldout],
        }
    )
    model = config.model.model_copy(update={"path": fill(config.model.path)})
    own = {name: str(Path(place).absolute()) for name, place in config.verifier.checkers.items()}
    verifier = config.verifier.model_copy(update={"checkers": own})
    return config.model_copy(update={"data": data, "model": model, "verifier": verifier})


def require_model(config: Config) -> Path:
    """The folder of the model.

    Raises:
        ConfigError: it is missing or no Hugging Face folder; the message says how to get it.
    """
    folder = Path(config.model.path)
    if (folder / "config.json").exists():
        return folder
    remedy = "set model.path to a Hugging Face folder"
    if name := public_name(folder):
        remedy = f"get it with `hf download {name} --local-dir {folder}`, or {remedy}"
    if config.base is not None:
        remedy = f"`dapo model RECIPE` makes the {config.base.kind} base, and so does `dapo run`"
    raise ConfigError(f"model folder {folder} is missing or has no config.json; {remedy}")


def redis_url(config: Config) -> str:
    """Address of the server with all that a client needs, which makes it a secret.

    The variable DAPO_REDIS_URL goes before redis.url. What it does not name comes from
    DAPO_REDIS_USER, and from DAPO_REDIS_PASSWORD or the file named by DAPO_REDIS_PASSWORD_FILE or
    redis.password_file, in this order; never from the recipe, which is kept in the run directory.

    Raises:
        ConfigError: there is none, it is no address, or a file that belongs to it cannot be read.
    """
    settings = config.redis
    url = os.environ.get(URL_VARIABLE) or settings.url
    if not url:
        raise ConfigError(
            f"no server: set redis.url (or the variable {URL_VARIABLE}), or use `dapo run`, "
            "which starts an embedded one"
        )
    url = with_credentials(url, os.environ.get(USER_VARIABLE, ""), _password(settings))
    return with_certificates(url, {key: getattr(settings, key) for key in QUERY})


def _password(settings: RedisSection) -> str:
    if password := os.environ.get(PASSWORD_VARIABLE):
        return password
    named, path = PASSWORD_FILE_VARIABLE, os.environ.get(PASSWORD_FILE_VARIABLE)
    if not path:
        if settings.password_file is None:
            return ""
        named, path = "redis.password_file", str(settings.password_file)
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "it is no text")
        raise ConfigError(f"{named} {path}: {why}") from None


def member_name(role: str) -> str:
    """Name of this process on the server, new at each start: claims are never inherited.

    The id of a process alone is not new: a container that is started again has the same ones.
    """
    given = os.environ.get("DAPO_MEMBER", f"{role}-{socket.gethostname()}")
    return f"{given}.{os.getpid()}-{secrets.token_hex(3)}"


def log_file(config: Config) -> Path | None:
    """Where this role logs: a file under `dapo run`, the terminal when started by hand."""
    name = os.environ.get("DAPO_LOG_NAME")
    return config.run_dir / "logs" / f"{name}.jsonl" if name else None


def write_config(config: Config) -> Path:
    """Keep the resolved configuration in the run directory."""
    make_dir(config.run_dir)
    path = config.run_dir / "config.toml"
    replace_durable(path, dump_toml(config).encode())
    return path
