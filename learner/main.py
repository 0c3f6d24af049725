"""Start of one rank of the learner."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from common import log
from common.broker import SOCKET_TIMEOUT_S, Broker
from common.config import Config
from common.data import Row, load_rows
from common.startup import log_file, member_name, redis_url, require_model, write_config


def main(config: Config) -> None:
    """Train until the run is complete or SIGTERM comes."""
    rank = int(os.environ.get("RANK", "0"))
    name = member_name(f"learner-rank{rank}")
    log.configure("learner", name, config.run.name, log_file(config))
    folder, url = require_model(config), redis_url(config)
    client = redis.Redis.from_url(url, socket_timeout=SOCKET_TIMEOUT_S)
    # what can be wrong without the engine is found before it is loaded
    parts = _Rank0(config, folder, url) if rank == 0 else None

    from learner.engine import TrainEngine
    from learner.trainer import Trainer

    engine = TrainEngine(config, folder)
    lead = parts.lead(engine.world) if parts else None
    _on_terminate(lead)
    Trainer(config, engine, client, lead).run()
    if engine.world > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


class _Rank0:
    """What rank 0 needs besides: the lock, the problems, the streams."""

    def __init__(self, config: Config, folder: Path, url: str) -> None:
        from transformers import AutoTokenizer

        from learner.background import Background
        from learner.timeline import RunLock

        self.config, self.url = config, url
        self.lock = RunLock(config.run_dir)
        write_config(config)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.rows = self._load(tokenizer, config.data.train)
        heldout = config.data.heldout
        self.heldout = self._load(tokenizer, [heldout])[: config.eval.problems] if heldout else []
        self.background = Background()
        self.broker = self.background.call(
            Broker.connect(url, config.run.name, config.redis.lease_s)
        )

    def _load(self, tokenizer: Any, paths: list[str]) -> list[Row]:
        verifier, data = self.config.verifier, self.config.data
        limit = self.config.max_prompt_tokens
        return load_rows(paths, tokenizer, data.template, limit, verifier.checker, verifier.boxed)

    def lead(self, world: int) -> Any:
        from common.transport import local_address
        from learner.lead import Lead

        host = self.config.publish.host
        if host == "auto":
            server = urlsplit(self.url)
            host = local_address(server.hostname or "127.0.0.1", server.port or 6379)
        return Lead(self.config, self.broker, self.background, self.rows, self.heldout, host, world)


def _on_terminate(lead: Any) -> None:
    """Rank 0 decides when to stop; the other ranks wait for its turn."""

    def stop(number: int, frame: Any) -> None:
        if lead is not None:
            lead.stopping = signal.Signals(number).name

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
