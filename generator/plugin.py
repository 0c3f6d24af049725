"""The vLLM plugin (group `vllm.general_plugins`): loaded in every process of an engine.

It makes the weight-transfer backend "dapo" known, and makes the engine's processes die with
the process that owns them: a killed generator would otherwise leave an engine of gigabytes
behind that still takes part in broadcasts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time

from common.process import die_with_parent

BACKEND = "dapo"
QUEUE_SLEEP = "DAPO_ENGINE_QUEUE_SLEEP_S"

_ENGINE_PROCESSES = ("EngineCore", "VllmWorker")


def register() -> None:
    """Called by vLLM, once or several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "generator.weights", "BroadcastEngine")
    if multiprocessing.current_process().name.startswith(_ENGINE_PROCESSES):
        _die_with_owner()
        _calm_queues()


def _die_with_owner() -> None:
    die_with_parent()
    owner = multiprocessing.parent_process()
    if owner is not None and os.getppid() != owner.pid:
        os.kill(os.getpid(), signal.SIGKILL)  # it died while this process was starting


def _calm_queues() -> None:
    """Sleep between looks at a queue where `QUEUE_SLEEP` says for how long (seconds).

    vLLM's processes wait for each other in a loop around sched_yield, which takes the cores of a
    small machine away from whoever computes.
    """
    pause = float(os.environ.get(QUEUE_SLEEP, "0"))
    if pause > 0:
        from vllm.distributed.device_communicators import shm_broadcast

        shm_broadcast.sched_yield = lambda: time.sleep(pause)
