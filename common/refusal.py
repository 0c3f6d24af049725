"""Why a client cannot work at a server, in one line that names the key and the remedy."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Literal
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError

from common.address import QUERY, address
from common.errors import BrokerError, ServerAwayError

PROBE_S = 1.0
"""How long `language` waits for each answer."""
_FORBIDDEN = ("ACL failure", "can't run this command", "can't access at least one of the keys")
"""How servers say that a permission is missing for a command inside a script."""

Language = Literal["", "plain", "tls", "tls with certificates"]


def is_forbidden(error: Exception) -> bool:
    """Whether the server refused a command because its user may not use it."""
    said = str(error)
    return isinstance(error, NoPermissionError) or any(words in said for words in _FORBIDDEN)


def forbidden(where: str, error: Exception) -> BrokerError:
    return BrokerError(
        f"the server at {where} forbids its user what this process has to do ({error}); "
        "deploy/redis/users.acl has the rules of each role"
    )


def refused(url: str, error: Exception) -> BrokerError:
    """Why a client could not begin to work; a `ServerAwayError` if the server may still come.

    Blocks for a second or two where it has to find out what the server speaks.
    """
    where, said = address(url), str(error)
    if isinstance(error, AuthenticationError) or "NOAUTH" in said:
        return BrokerError(
            f"the server at {where} refuses the credentials ({said}); put the password into the "
            "variable DAPO_REDIS_PASSWORD or a file named by redis.password_file, and the user, if "
            "it has one, into DAPO_REDIS_USER"
        )
    if is_forbidden(error):
        return forbidden(where, error)
    return _of_certificates(where, said) or _of_language(url, where) or ServerAwayError(
        f"no Redis-protocol server answers at {where} ({said}); start one there or set redis.url, "
        "or leave redis.url out and use `dapo run` with its embedded server"
    )  # fmt: skip


def _of_certificates(where: str, said: str) -> BrokerError | None:
    if "mismatch" in said and "certificate" in said:
        return BrokerError(
            f"the certificate of the server at {where} is for another host ({said}); write the "
            "name that it is for into redis.url"
        )
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return BrokerError(
            f"the certificate of the server at {where} is not trusted here ({said}); name the file "
            "of the CA that signed it in redis.ca_file"
        )
    return None


def _of_language(url: str, where: str) -> BrokerError | None:
    tls, spoken = urlsplit(url).scheme == "rediss", language(url)
    if spoken.startswith("tls") and not tls:
        return BrokerError(f"the server at {where} speaks TLS; begin redis.url with rediss://")
    if spoken == "plain" and tls:
        return BrokerError(
            f"the server at {where} does not speak TLS; begin redis.url with redis://, or give "
            "the server a tls-port"
        )
    if spoken == "tls with certificates" and QUERY["cert_file"] not in url:
        return BrokerError(
            f"the server at {where} asks for a certificate of the client; name yours in "
            "redis.cert_file and redis.key_file"
        )
    return None


def language(url: str) -> Language:
    """What the server at an address speaks; empty if nobody answers."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return ""
    where = (parts.hostname or "localhost", parts.port or 6379)
    return _tls(where) or _plain(where)


def _tls(where: tuple[str, int]) -> Language:
    """Whether a handshake comes about, whoever is at the other end."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection(where, PROBE_S) as raw,
        context.wrap_socket(raw, server_hostname=where[0]) as connection,
    ):
        try:
            ended = not connection.recv(1)  # in TLS 1.3 a server refuses only after the handshake
        except TimeoutError:
            ended = False
        except OSError:
            ended = True
        return "tls with certificates" if ended else "tls"
    return ""


def _plain(where: tuple[str, int]) -> Language:
    with contextlib.suppress(OSError), socket.create_connection(where, PROBE_S) as connection:
        connection.sendall(b"PING\r\n")
        if connection.recv(1) in (b"+", b"-"):
            return "plain"
    return ""
