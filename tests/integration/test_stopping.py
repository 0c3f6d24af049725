"""A process that is told to end is over by its deadline, whatever it hangs in."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HANGS = """
import threading, time
from common.stopping import end_within, on_stop, on_stop_in_loop

def hang():
    print("hangs", flush=True)
    time.sleep(600)

{body}
"""
DEAF = "on_stop(lambda name: print(name, flush=True), 0.5); hang()"
LOOP = """
import asyncio
async def main():
    on_stop_in_loop(lambda: print("never", flush=True), 0.5)
    hang()
asyncio.run(main())
"""
IN_C = """
import torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
on_stop(lambda name: print(name, flush=True), 0.5)
print("hangs", flush=True)
store.wait(["nobody sets it"], timedelta(seconds=600))
"""
AT_THE_END = "end_within(0.5); print('hangs', flush=True); time.sleep(600)"


@pytest.mark.parametrize(
    ("body", "told"),
    [(DEAF, "SIGTERM"), (LOOP, ""), (IN_C, "SIGTERM")],
    ids=["main-thread", "event-loop", "in-C"],
)
def test_a_process_that_hangs_ends_by_its_deadline_and_says_where(body: str, told: str) -> None:
    with _started(body) as process:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told in out and "never" not in out
    assert "Timeout (0:00:00.5" in err and "most recent call first" in err


def test_a_process_that_hangs_after_its_work_ends_by_itself() -> None:
    with _started(AT_THE_END) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "most recent call first" in err


def test_a_loop_is_told_once_and_the_process_ends_in_order() -> None:
    body = """
import asyncio
async def main():
    over = asyncio.Event()
    on_stop_in_loop(over.set, 60.0)
    print("hangs", flush=True)
    await over.wait()
    print("in order", flush=True)
asyncio.run(main())
"""
    with _started(body) as process:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "in order" in out


def _started(body: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS.format(body=body)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    while "hangs" not in process.stdout.readline():
        assert process.poll() is None, process.communicate()[1]
    return process
