"""Open groups that somebody has to look after: those that went silent, and those that the server
has forgotten. They get another attempt, for which the samples that are complete are kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from common.entry import ROLLOUTS
from common.log import get_logger
from learner.evaluation import is_problem
from learner.generators import Reports, hear, silent
from learner.groups import OpenGroup

if TYPE_CHECKING:
    from learner.dispatcher import Dispatcher

log = get_logger(__name__)


class Upkeep:
    """Of the groups of a dispatcher and of its examiner."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    async def silence(self, reports: Reports) -> None:
        """Groups without a new token for `silence_s` start anew, unless they wait for a worker."""
        dispatcher, examiner = self.dispatcher, self.dispatcher.examiner
        waiting: dict[str, OpenGroup] = {
            str(ordinal): group for ordinal, group in dispatcher.open.items() if not group.verdict
        }
        evaluation, problems = examiner.evaluation, {}
        if evaluation:
            problems = {evaluation.group(index): index for index in examiner.asked}
            waiting |= {gid: examiner.asked[index] for gid, index in problems.items()}
        now, limit = time.monotonic(), dispatcher.config.admission.silence_s
        hear(waiting, reports, now)
        quiet = silent(waiting, now, limit)
        if not quiet:
            return
        why = f"silent for {limit:g} s"
        for gid in await self._without_a_worker_to_come(quiet):
            if gid not in problems:
                await dispatcher.redo([int(gid)], why)
            elif evaluation and examiner.asked.get(problems[gid]) is waiting[gid]:
                await examiner.ask_again(evaluation, problems[gid], why)

    async def _without_a_worker_to_come(self, quiet: list[str]) -> list[str]:
        """Leaves out those that wait in a stream for a generator or a verifier: that is no fault
        of theirs, and another attempt would wait there too."""
        streams, broker = self.dispatcher.streams, self.dispatcher.broker
        known, unclaimed = await streams.known(), await broker.unclaimed()
        unjudged = (await streams.depths())[ROLLOUTS]
        waiting, states = set(unclaimed), set()
        if unjudged:
            states.add("generated")
        if not self.dispatcher.members["generator"]:
            states.add("dispatched")  # claimed by who died: the next one takes it over
        waiting |= {gid for gid, group in known.items() if group.state in states}
        return [gid for gid in quiet if gid not in waiting]

    async def reconcile(self) -> None:
        """After a lost connection: groups that the server forgot go out again."""
        dispatcher, examiner = self.dispatcher, self.dispatcher.examiner
        mine = list(dispatcher.open)
        evaluation, asked = examiner.evaluation, list(examiner.asked)
        known = await dispatcher.streams.known()
        for gid in known:
            if not is_problem(gid) and dispatcher.has_fate(int(gid)):
                await dispatcher.streams.settle(gid)  # it forgot that it was told to forget
        forgotten = [ordinal for ordinal in mine if str(ordinal) not in known]
        if forgotten:
            log.warning("the server forgot open groups; they go out again", groups=len(forgotten))
            await dispatcher.redo(forgotten, "forgotten by the server")
        for index in asked:
            if evaluation and evaluation.group(index) not in known and index in examiner.asked:
                await examiner.ask(evaluation, index, examiner.asked[index].attempt)
