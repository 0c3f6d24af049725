"""Start of a generator process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common import log
from common.broker import Broker
from common.config import Config
from common.connection import connect
from common.errors import ConfigError
from common.messages import Version
from common.startup import log_file, member_name, require_model
from common.stopping import CLOSE_S, end_within, on_stop_in_loop
from generator.engine import START
from generator.interface import SamplingEngine
from generator.worker import GIVE_BACK_S, GeneratorWorker


def main(config: Config, frozen: Version | None = None) -> None:
    """Generate until the run is over or SIGTERM comes.

    With `frozen` the weights of model.path are served as that version: for an evaluation.
    """
    name = member_name("generator")
    log.configure("generator", name, config.run.name, log_file(config))
    asyncio.run(_run(config, name, frozen))


async def _run(config: Config, name: str, frozen: Version | None) -> None:
    folder = require_model(config)
    # first the server, which answers at once, then the engine, which takes a while
    broker = await connect(config)
    if frozen is not None:
        await _refuse_training(config, broker, frozen)
    engine = await _start(config, folder, name, frozen or START)
    worker = GeneratorWorker(config, broker, engine, name, frozen is not None)
    worker.prometheus.serve(config.metrics.host, config.metrics.port)
    on_stop_in_loop(worker.drain, config.generator.drain_s + GIVE_BACK_S + CLOSE_S)
    try:
        await worker.run()
    finally:
        end_within(CLOSE_S)
        await engine.close()
        await broker.close()


async def _refuse_training(config: Config, broker: Broker, frozen: Version) -> None:
    published = await broker.published()
    if published not in (None, str(frozen)):
        raise ConfigError(
            f"run {config.run.name} has published version {published}, which frozen weights are "
            "not; --frozen is for the generators of an evaluation, leave it out"
        )


async def _start(config: Config, folder: Path, name: str, version: Version) -> SamplingEngine:
    """The kind of engine that the configuration asks for."""
    if config.generator.engine == "simulated":
        from generator.simulated import SimulatedEngine

        return await SimulatedEngine.start(config, folder, version, name)
    from generator.engine import Engine

    return await Engine.start(config, folder, version, name)
