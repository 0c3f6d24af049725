"""A wire to a server: it forwards, can be cut or fall silent, and can end TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from urllib.parse import urlsplit


class Wire:
    """Forwards a port of its own to the server at `url`; clients speak TLS if `tls` is given."""

    def __init__(self, url: str, tls: ssl.SSLContext | None = None) -> None:
        self._server_port, self._tls = urlsplit(url).port, tls
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent = False
        self.port = 0

    async def __aenter__(self) -> Wire:
        await self.mend()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def through(self, url: str) -> str:
        """The address of the server by way of this wire."""
        return (
            urlsplit(url)
            ._replace(netloc=f"{urlsplit(url).netloc.rpartition('@')[0]}@127.0.0.1:{self.port}")
            .geturl()
        )

    async def mend(self) -> None:
        """Forward, on the port of before."""
        self._silent = False
        self._listener = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, ssl=self._tls
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self._listener.close()
        for end in self._ends:
            end.close()
        self._ends.clear()

    def fall_silent(self) -> None:
        """Swallow what is sent, in both directions: nobody hears that the other end is gone."""
        self._silent = True

    def speak_again(self) -> None:
        """What was swallowed is lost; who waits for an answer waits for ever."""
        self._silent = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.close()
            return
        self._ends |= {writer, outer}
        pumps = {
            asyncio.create_task(self._pump(reader, outer)),
            asyncio.create_task(self._pump(inner, writer)),
        }
        self._tasks |= pumps
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, outer):
            end.close()
            self._ends.discard(end)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                if not self._silent:
                    target.write(data)
                    await target.drain()
