"""Whether the role of this container is well; exit status 0 or 1, and one line that says why.

    health.py server PASSWORD_FILE     the server answers, and has read its data
    health.py role PORT                the role's loop has reported its figures at PORT

A role without its server reports nothing and is not well. Whether one that was well hangs is told
by its lease: see `dapo status`.
"""

from __future__ import annotations

import socket
import sys
import urllib.request
from pathlib import Path

LIMIT_S = 5.0
FIGURE = "\ndapo_rss_bytes{"
"""Of every role, from its first report on."""


def server(password_file: str, port: int = 6379) -> str:
    """What is wrong with the server on this machine; empty if nothing is."""
    password = Path(password_file).read_text().strip()
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
        with connection.makefile("rb") as replies:
            answers = [replies.readline().decode().strip() for _ in range(2)]
    return "" if answers == ["+OK", "+PONG"] else "the server answers " + ", ".join(answers)


def role(port: int) -> str:
    """What is wrong with the role on this machine; empty if nothing is."""
    address = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(address, timeout=LIMIT_S) as answer:
        figures = answer.read().decode()
    return "" if FIGURE in figures else "no report yet"


def main(kind: str, *words: str) -> int:
    try:
        wrong = server(words[0], *map(int, words[1:])) if kind == "server" else role(int(words[0]))
    except OSError as error:
        wrong = f"no answer: {error}"
    print(wrong or "well")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
