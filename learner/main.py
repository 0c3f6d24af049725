"""Start of one rank of the learner."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from common import log
from common.calls import SOCKET_TIMEOUT_S
from common.checks import require_sound
from common.config import Config
from common.connection import connect
from common.exporters import exporters_of
from common.metrics import Metrics
from common.prometheus import Prometheus
from common.startup import log_file, member_name, redis_url, require_model, write_config
from common.stopping import CLOSE_S, end_within, on_stop


def main(config: Config) -> None:
    """Train until the run is complete or SIGTERM comes."""
    rank = int(os.environ.get("RANK", "0"))
    name = member_name(f"learner-rank{rank}")
    log.configure("learner", name, config.run.name, log_file(config))
    folder, url = require_model(config), redis_url(config)
    if rank == 0:
        require_sound(config)
    client = redis.Redis.from_url(url, socket_timeout=SOCKET_TIMEOUT_S)
    # what can be wrong without the engine is found before it is loaded
    parts = _Rank0(config, folder, url) if rank == 0 else None

    from learner.engine import TrainEngine
    from learner.pulse import Pulse
    from learner.trainer import Trainer

    engine = TrainEngine(config, folder)
    pulse = Pulse.of_this_process()
    lead = parts.lead(engine.world, pulse) if parts else None
    # rank 0 decides when to stop; the other ranks wait for its turn
    on_stop(lead.stop if lead else lambda _: None, config.learner.stop_s)
    Trainer(config, engine, client, lead).run()
    end_within(CLOSE_S)
    if engine.world > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


class _Rank0:
    """What rank 0 needs besides: the lock, the problems, the streams."""

    def __init__(self, config: Config, folder: Path, url: str) -> None:
        from transformers import AutoTokenizer

        from learner.background import Background
        from learner.problems import load_problems
        from learner.progress import Progress
        from learner.timeline import RunLock

        self.config, self.url = config, url
        self.lock = RunLock(config.run_dir)
        write_config(config)
        prometheus = Prometheus("learner", "learner")
        prometheus.serve(config.metrics.host, config.metrics.port)
        self.metrics = Metrics(config.run_dir, [prometheus, *exporters_of(config)])
        self.progress = Progress(config, prometheus)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.rows, self.heldout = load_problems(config, tokenizer)
        self.background = Background(config.redis.patience_s)
        self.broker = self.background.call(connect(config))
        # before the engine is loaded: workers that start meanwhile would go home at once
        self.background.call(self.broker.forget_end())

    def lead(self, world: int, pulse: Any) -> Any:
        from common.transport import local_address
        from learner.lead import Lead

        host = self.config.publish.host
        if host == "auto":
            server = urlsplit(self.url)
            host = local_address(server.hostname or "127.0.0.1", server.port or 6379)
        return Lead(
            self.config, self.broker, self.background, self.rows, self.heldout, host, world,
            self.metrics, self.progress, pulse,
        )  # fmt: skip
