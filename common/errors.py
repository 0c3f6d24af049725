"""One hierarchy for what can go wrong and is the user's or the operator's to mend.

A `DapoError` is printed as one message, without a traceback, and ends the process with its
`status`. Its text names the key, the file or the address and says what to do about it.
"""

from __future__ import annotations

from typing import ClassVar

ERROR_MARK = "dapo: "
"""Begins the line that a process prints of an error that a person can mend."""


PASSING = 75
"""EX_TEMPFAIL of sysexits.h: the same start may succeed later, so that a service manager tries."""


class DapoError(Exception):
    """Something a person can mend; the message says how."""

    status: ClassVar[int] = 2
    """Exit status of a process that it ends; with 2 a service manager does not start it again."""


class ConfigError(DapoError):
    """A key or a value of the configuration, or a combination that makes no sense."""


class DataError(DapoError):
    """A row of a data file; the message names the file and the row."""


class MessageError(DapoError):
    """Bytes from the wire that are no valid record of the kind expected."""


class BrokerError(DapoError):
    """The Redis-protocol server: unreachable, refused, or in a state that forbids the call."""


class ServerAwayError(BrokerError):
    """No server answers at the address; it may still come."""


class ServerLostError(BrokerError):
    """The server stayed away for redis.patience_s."""

    status = PASSING


class FencedError(BrokerError):
    """Another learner has taken the run over; this one must stop at once."""


class CheckpointError(DapoError):
    """A checkpoint or a batch file that is missing, torn or of another run."""


class RunTakenError(CheckpointError):
    """Another learner holds the run directory, or a dead node's lock is not dropped yet."""

    status = PASSING


class DiskError(DapoError):
    """A write to the disk that failed: it is full, read-only, or broken."""


class RoundError(DapoError):
    """A weight round that did not complete; the survivors run it again."""


class NumericalError(DapoError):
    """A loss, a gradient or a weight that is not finite."""
