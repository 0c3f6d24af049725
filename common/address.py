"""The address of the server, and how it is put together.

An address carries all that a client needs: user, password, and the files of certificates, as
`ssl_…` in its query, which redis-py reads. So each client takes one string, which is secret; what
may be shown of it is `address`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, quote, urlencode, urlsplit, urlunsplit

from common.errors import ConfigError

SCHEMES = ("redis", "rediss", "unix")
QUERY = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}
"""Keys of [redis] and their names in the query of an address."""


def address(url: str) -> str:
    """host:port of an address, without the credentials; the path of a socket."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def read_address(url: str) -> SplitResult:
    """The parts of an address.

    Raises:
        ConfigError: it is none. The message does not repeat it: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        broken = parts.port == 0
    except ValueError:
        broken = True
    if broken or parts.scheme not in SCHEMES:
        raise ConfigError(
            "redis.url (or the variable DAPO_REDIS_URL) is no address of a server; write it as "
            "redis://HOST:PORT/0, or rediss://HOST:PORT/0 for TLS"
        )
    return parts


def holds_password(url: str) -> bool:
    """Whether an address names a password.

    Raises:
        ConfigError: it is no address.
    """
    parts = read_address(url)
    return parts.password is not None or "password" in parse_qs(parts.query)


def with_credentials(url: str, user: str, password: str) -> str:
    """Put user and password into an address; those that it names already stay.

    Raises:
        ConfigError: the address is none.
    """
    parts = read_address(url)
    user = parts.username or quote(user, safe="")
    password = parts.password or quote(password, safe="")
    if not user and not password:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{host}"))


def with_certificates(url: str, files: Mapping[str, Path | None]) -> str:
    """Put the files of certificates (see `QUERY`) into the query of an address.

    Raises:
        ConfigError: one of them cannot be read or holds no certificate, or the address is not for
            TLS, so that they would have no effect.
    """
    given = {key: str(path.absolute()) for key, path in files.items() if path is not None}
    parts = read_address(url)
    if not given:
        return url
    if parts.scheme != "rediss":
        keys = " and ".join(f"redis.{key}" for key in given)
        raise ConfigError(
            f"{keys}: the address of the server is not for TLS; begin redis.url (or the variable "
            "DAPO_REDIS_URL) with rediss://"
        )
    _require_certificates(given)
    query = {QUERY[key]: path for key, path in given.items()}
    query |= {name: values[0] for name, values in parse_qs(parts.query).items()}
    return urlunsplit(parts._replace(query=urlencode(query)))


def _require_certificates(files: Mapping[str, str]) -> None:
    for key, path in files.items():
        try:
            Path(path).open().close()
        except OSError as error:
            raise ConfigError(f"redis.{key} {path}: {error.strerror}") from None
    context = ssl.create_default_context()
    if "ca_file" in files:
        try:
            context.load_verify_locations(files["ca_file"])
        except ssl.SSLError:
            raise ConfigError(
                f"redis.ca_file {files['ca_file']} holds no certificate; it has to be in PEM"
            ) from None
    if "cert_file" in files:
        cert, key = files["cert_file"], files["key_file"]
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except (ssl.SSLError, ValueError):
            raise ConfigError(
                f"redis.cert_file {cert} and redis.key_file {key} are not a certificate and its "
                "key; both have to be in PEM, the key without a passphrase"
            ) from None


def _no_passphrase() -> str:
    """An encrypted key would be asked for at the terminal."""
    raise ValueError("the key has a passphrase")
