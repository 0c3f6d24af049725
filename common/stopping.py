"""How a role's process ends: it is told to by SIGTERM, and it is over by a deadline in any case.

Whatever hangs then (an engine, a peer in a collective, a server that is away) costs no more than
that: past the deadline the stack of every thread goes to stderr and the process exits with 1.
Nothing is lost by it, because nothing is lost by `kill -9`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable

from common.log import get_logger

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CLOSE_S = 30.0
"""For engines, processes and connections to close once the work itself is over."""
log = get_logger(__name__)


def on_stop(act: Callable[[str], None], within_s: float) -> None:
    """At the first SIGTERM or SIGINT call `act` with its name, and end within so many seconds.

    `act` is called in a thread of its own: a handler would have to wait for the main thread to
    come back from C code, and a collective may be where it hangs. Call this in the main thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # without a handler nothing is written to the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    waiting = threading.Thread(target=_await, args=(reader, act, within_s), name="signals")
    waiting.daemon = True
    waiting.start()


def on_stop_in_loop(act: Callable[[], None], within_s: float) -> None:
    """As `on_stop`; `act` is called in the event loop that runs now."""
    loop = asyncio.get_running_loop()

    def tell(name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the end is near anyway
            loop.call_soon_threadsafe(act)

    on_stop(tell, within_s)


def end_within(seconds: float) -> None:
    """End the process after so many seconds if it is still there; a later call starts anew."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def _await(reader: int, act: Callable[[str], None], within_s: float) -> None:
    number = 0
    while number not in SIGNALS:  # the pipe tells of every signal that has a handler
        number = os.read(reader, 1)[0]
    name = signal.Signals(number).name
    end_within(within_s)
    log.info("told to end", signal=name, within_s=within_s)
    act(name)
