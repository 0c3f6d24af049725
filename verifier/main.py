"""Start of a verifier process."""

from __future__ import annotations

import asyncio

from common import log
from common.broker import Broker
from common.config import Config
from common.startup import log_file, member_name, on_signals, redis_url
from verifier.pool import CheckerPool
from verifier.worker import VerifierWorker


def main(config: Config) -> None:
    """Judge until the run is over or SIGTERM comes."""
    name = member_name("verifier")
    log.configure("verifier", name, config.run.name, log_file(config))
    asyncio.run(_run(config, name))


async def _run(config: Config, name: str) -> None:
    settings = config.verifier
    broker = await Broker.connect(redis_url(config), config.run.name, config.redis.lease_s)
    pool = CheckerPool(settings.slow_workers, settings.slow_deadline_s, settings.slow_memory_mib)
    worker = VerifierWorker(config, broker, pool, name)
    on_signals(asyncio.get_running_loop(), worker.drain)
    try:
        await worker.run()
    finally:
        await pool.close()
        await broker.close()
