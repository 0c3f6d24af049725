"""Start of a generator process."""

from __future__ import annotations

import asyncio

from common import log
from common.broker import Broker
from common.config import Config
from common.startup import log_file, member_name, on_signals, redis_url, require_model
from generator.engine import Engine
from generator.worker import GeneratorWorker


def main(config: Config) -> None:
    """Generate until the run is over or SIGTERM comes."""
    name = member_name("generator")
    log.configure("generator", name, config.run.name, log_file(config))
    asyncio.run(_run(config, name))


async def _run(config: Config, name: str) -> None:
    folder = require_model(config)
    # first the server, which answers at once, then the engine, which takes a while
    broker = await Broker.connect(redis_url(config), config.run.name, config.redis.lease_s)
    engine = await Engine.start(config, folder, name=name)
    worker = GeneratorWorker(config, broker, engine, name)
    on_signals(asyncio.get_running_loop(), worker.drain)
    try:
        await worker.run()
    finally:
        await engine.close()
        await broker.close()
