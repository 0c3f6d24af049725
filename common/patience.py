"""Waiting for a server that is away: under a budget, and with a line in the log now and then."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from common.errors import ServerLostError
from common.log import get_logger

SAY_S = 10.0
"""Between two lines of the log on the same trouble, however many calls are in it."""
PAUSE_S = (0.05, 2.0)
"""Before the second try, and at most."""
log = get_logger(__name__)


class Patience:
    """How long the server may be away for each call of one process."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._said: dict[str, float] = {}
        self._waiting = False

    def begin(self, what: str) -> Wait:
        """A call begins; `what` names it in the log."""
        return Wait(self, what)

    def say(self, what: str, why: str, since: datetime, waited_s: float, error: Exception) -> None:
        now = time.monotonic()
        if now - self._said.get(why, -SAY_S) < SAY_S:
            return
        self._said[why], self._waiting = now, True
        log.warning("waiting for the server", since=since.isoformat(timespec="seconds"),
                    what=what, why=why, error=str(error), waited_s=round(waited_s, 1),
                    gives_up_in_s=round(self.budget_s - waited_s, 1))  # fmt: skip

    def over(self, waited_s: float) -> None:
        if self._waiting:
            self._waiting = False
            log.info("the server is back", waited_s=round(waited_s, 1))


class Wait:
    """One call that is repeated until the server answers it."""

    def __init__(self, patience: Patience, what: str) -> None:
        self._patience, self._what = patience, what
        self._began: tuple[float, datetime] | None = None
        self._pause = PAUSE_S[0]

    def again(self, why: str, error: Exception) -> float:
        """The call came to nothing: seconds to wait before the next try.

        Raises:
            ServerLostError: the budget is spent.
        """
        if self._began is None:
            self._began = time.monotonic(), datetime.now(UTC)
        waited = time.monotonic() - self._began[0]
        if waited > self._patience.budget_s:
            raise ServerLostError(
                f"waited {waited:.0f} s for the server ({self._what}): {why} ({error}); mend it, "
                "or raise redis.patience_s"
            ) from None
        self._patience.say(self._what, why, self._began[1], waited, error)
        pause, self._pause = self._pause, min(2 * self._pause, PAUSE_S[1])
        return pause

    def over(self) -> None:
        """The call came through."""
        if self._began is not None:
            self._patience.over(time.monotonic() - self._began[0])
