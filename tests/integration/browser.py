"""A real browser that a test drives: Chromium without a window, by its debugging protocol.

The protocol runs over a pipe (https://chromedevtools.github.io/devtools-protocol/), so that no
port is opened and what is asked of a page is not subject to the page's own policy.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.process import die_with_parent, stop_group

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LIMIT_S = 90.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab. `said` are the messages of its console and log, `asked` the addresses it fetched."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._id = read, write, 0
        self._buffer, self._session = b"", ""
        self._events: list[str] = []
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, address: str, width: int, dark: bool = False) -> None:
        """Load a page at a width; returns once it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=800, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self._events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._hear()

    def value(self, script: str) -> Any:
        """What a script says in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (reply := self._hear()).get("id") != self._id:
            pass
        assert "error" not in reply, f"{method}: {reply['error']}"
        result: dict[str, Any] = reply["result"]
        return result

    def _hear(self) -> dict[str, Any]:
        """The next message of the browser; events are noted."""
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._read], [], [], left)
            part = os.read(self._read, 2**16) if ready else b""
            assert part, "the browser does not answer"
            self._buffer += part
        data, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Log.entryAdded":
            self.said.append(params["entry"]["text"])
        elif event in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(params))
        elif event == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])


@contextlib.contextmanager
def browser(program: str, profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, which ends with the block."""
    to_child, commands = os.pipe()
    replies, from_child = os.pipe()
    child = subprocess.Popen(
        # the browser reads commands from file 3 and answers on file 4
        ["bash", "-c", f'exec "$@" 3<&{to_child} 4>&{from_child}', "-", program, *FLAGS,
         f"--user-data-dir={profile}"],
        pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    os.close(to_child)
    os.close(from_child)
    try:
        yield Page(replies, commands)
    finally:
        stop_group(child)
        os.close(commands)
        os.close(replies)
