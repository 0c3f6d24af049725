"""The examiner of `dapo eval`: the learner's place, held by one whose weights never change.

The dispatcher has nothing to train and an evaluation to put to the generators. Each problem's
result is appended to `problems.jsonl` when it comes, so that an end by force keeps it, and an
examiner that is started again goes on after it. `result.json` is written at the end, the early one
by a signal included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from itertools import chain
from typing import Any

from common import log
from common.broker import Broker
from common.config import Config
from common.connection import connect
from common.data import Row
from common.disk import replace_durable
from common.ledger import Ledger
from common.messages import Version
from common.results import ProblemResult, by_file, read_results, to_line, write_results
from common.startup import log_file, member_name, require_model
from common.stopping import CLOSE_S, end_within, on_stop_in_loop
from learner.dispatcher import Dispatcher
from learner.evaluation import Evaluation
from learner.heldout import load_heldout
from learner.timeline import Timeline

REPORT_S = 1.0
PROBLEMS, RESULT = "problems.jsonl", "result.json"


def main(config: Config, version: Version) -> None:
    """Evaluate until every problem has its result or SIGTERM comes."""
    from transformers import AutoTokenizer

    name = member_name("examiner")
    log.configure("examiner", name, config.run.name, log_file(config))
    tokenizer = AutoTokenizer.from_pretrained(require_model(config), local_files_only=True)
    heldout = load_heldout(config, tokenizer)
    asyncio.run(_run(config, version, heldout))


async def _run(config: Config, version: Version, heldout: dict[str, list[Row]]) -> None:
    broker = await connect(config)
    examination = Examination(config, broker, version, heldout)
    on_stop_in_loop(examination.stop, CLOSE_S)
    try:
        await examination.run()
    finally:
        end_within(CLOSE_S)
        await broker.close()


class Examination:
    """One evaluation of frozen weights, published as `version`."""

    def __init__(
        self, config: Config, broker: Broker, version: Version, heldout: dict[str, list[Row]]
    ) -> None:
        self.config, self.broker, self.version = config, broker, version
        self.planned = {name: len(rows) for name, rows in heldout.items()}
        self.evaluation = Evaluation("val", heldout, self._keep)
        timeline = Timeline(config.run_dir / "timeline.json", [])  # incarnation 0: no learner
        self.ledger = Ledger(config.run_dir / "server" / "ledger.jsonl")  # which stays empty
        rows = list(chain(*heldout.values()))
        self.dispatcher = Dispatcher(config, broker, self.ledger, timeline, rows)
        done = read_results(config.run_dir / PROBLEMS)
        self.evaluation.restore(done)
        write_results(config.run_dir / PROBLEMS, done)  # without a torn last line
        self._records = (config.run_dir / PROBLEMS).open("a")
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Put every problem to the generators, and write what came of it."""
        await self.dispatcher.start(self.version.number, [])
        async with self.broker.lease("examiner", "examiner", {}):
            streams = asyncio.create_task(self.dispatcher.run())
            try:
                while not self.evaluation.done and not self._over.is_set():
                    await self._begin()
                    await self._report()
                    await self._pause(streams)
            finally:
                streams.cancel()
                await asyncio.gather(streams, return_exceptions=True)
        self._write()
        await self._report()
        await self.broker.end("complete" if self.evaluation.done else "stopped")

    def stop(self) -> None:
        """End now, with the problems that are done."""
        self._over.set()

    async def _begin(self) -> None:
        """Begin when the first engine is there, so that the rate is not that of loading it."""
        # again and again: a server may have been emptied
        await self.broker.publish(self.version.incarnation, str(self.version))
        if self.dispatcher.generators and self.dispatcher.examiner.evaluation is None:
            await self.dispatcher.examiner.begin(self.evaluation)

    async def _report(self) -> None:
        """Figures for the line that shows the progress."""
        done = self.evaluation.results
        status = {
            "role": "examiner", "time": time.time(), "problems": sum(self.planned.values()),
            "done": len(done), "samples": sum(result.samples for result in done.values()),
            "generators": self.dispatcher.generators,
        }  # fmt: skip
        await self.broker.report("examiner", status)

    async def _pause(self, streams: asyncio.Task[None]) -> None:
        """Until the next report or the end; raises what ended the streams."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self._over.wait()
        if streams.done():
            streams.result()

    def _keep(self, result: ProblemResult) -> None:
        self._records.write(to_line(result))
        self._records.flush()
        if self.evaluation.done:
            self._over.set()

    def _write(self) -> None:
        """The records in the order of the data, and the figures."""
        results = self.evaluation.ordered()
        self._records.close()
        write_results(self.config.run_dir / PROBLEMS, results)
        found = {
            **facts(self.config, self.version),
            "complete": self.evaluation.done,
            "planned": self.planned,
            "files": by_file(results, self.config.run.seed),
        }
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
        replace_durable(self.config.run_dir / RESULT, text.encode())


def facts(config: Config, version: Version) -> dict[str, Any]:
    """What was evaluated, and how."""
    return {
        "model": config.model.path,
        "version": str(version),
        "dtype": config.model.dtype,
        "engine": config.generator.engine,
        "data": config.data.heldout,
        "template": config.data.template,
        "k": config.eval.samples,
        "temperature": config.eval.temperature,
        "top_p": config.eval.top_p,
        "max_tokens": config.sampling.max_tokens,
        "seed": config.run.seed,
    }
