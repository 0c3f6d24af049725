"""The watchdog of a run that makes no progress: it names the stage that is dead or starved."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

from common.log import get_logger
from learner.conductor import Turn
from learner.dispatcher import Dispatcher
from learner.progress import Progress
from learner.pulse import Pulse

WATCH_S = 1.0
WAIT = Turn("wait")
log = get_logger(__name__)


class StallWatch:
    """Runs in the event loop: the main thread may be in a collective that a rank does not come to.

    `turn` is what the main thread does just now.
    """

    def __init__(self, progress: Progress, dispatcher: Dispatcher, pulse: Pulse) -> None:
        self.progress, self.dispatcher, self.pulse = progress, dispatcher, pulse
        self.turn = WAIT

    async def run(self) -> None:
        """Say what is waited for, and since when, each time nothing was done for the limit."""
        said_at = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_S)
            silent, now = self.progress.since_s(), time.monotonic()
            if min(silent, now - said_at) < self.progress.stall_limit():
                continue
            said_at = now
            began = datetime.now(UTC) - timedelta(seconds=silent)
            log.error("no progress", since=began.isoformat(timespec="seconds"),
                      since_s=round(silent), waiting_for=self.waiting_for(),
                      generators=self.dispatcher.generators)  # fmt: skip

    def waiting_for(self) -> str:
        """The stage that nothing comes from, in words."""
        members = self.dispatcher.members
        if missing := [role for role in ("generator", "verifier") if not members[role]]:
            return " and ".join(f"a {role}: none holds a lease" for role in missing)
        if quiet := self.pulse.quiet():
            return f"rank {', '.join(map(str, quiet))} of the learner: no sign of life"
        if self.turn.do != "wait":
            return f"the end of `{self.turn.do}`, at version {self.turn.version}"
        return self.dispatcher.waiting_for() or "an evaluation"
