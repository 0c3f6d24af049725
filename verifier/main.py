"""Start of a verifier process."""

from __future__ import annotations

import asyncio

from common import log
from common.config import Config
from common.connection import connect
from common.own_checks import require_own_checkers
from common.startup import log_file, member_name
from common.stopping import CLOSE_S, end_within, on_stop_in_loop
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker


def main(config: Config) -> None:
    """Judge until the run is over or SIGTERM comes."""
    name = member_name("verifier")
    log.configure("verifier", name, config.run.name, log_file(config))
    require_own_checkers(config.verifier)
    asyncio.run(_run(config, name))


async def _run(config: Config, name: str) -> None:
    settings = config.verifier
    broker = await connect(config)
    pool = CheckerPool(settings.slow_workers, settings.slow_deadline_s, settings.slow_memory_mib)
    worker = VerifierWorker(config, broker, pool, name)
    worker.prometheus.serve(config.metrics.host, config.metrics.port)
    on_stop_in_loop(worker.drain, settings.slow_deadline_s + CLOSE_S)
    try:
        await worker.run()
    finally:
        end_within(CLOSE_S)
        await pool.close()
        await broker.close()
