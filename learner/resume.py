"""What a learner goes on from after any end: a checkpoint, and the batches to train again.

The disk alone decides. A batch file is written before its batch is trained, and the ledger's lines
before anything is forgotten, so checkpoint, batch files and ledger can be held against each other.
"""

from __future__ import annotations

from typing import NamedTuple

from common.batch_files import BatchFiles
from common.errors import CheckpointError
from common.ledger import Ledger
from learner.checkpoint import Checkpoints


class Resume(NamedTuple):
    """The newest valid checkpoint (None: the base model), and the batches after it in order."""

    checkpoint: int | None
    batches: list[int]


def plan_resume(checkpoints: Checkpoints, files: BatchFiles, ledger: Ledger) -> Resume:
    """Clear away what a crash left half done, and say where to go on.

    Raises:
        CheckpointError: what is there does not lead to where the run was; the message says what
            is missing and how to mend it. Nothing is trained from a state that contradicts itself.
    """
    files.clean()
    checkpoint = checkpoints.recover()
    folded = max((line.batch or 0 for line in ledger.fates.values()), default=0)
    batches = files.after(checkpoint or 0, folded)
    if checkpoint is not None:
        _require_frontier(checkpoints, checkpoint, files, ledger)
    return Resume(checkpoint, batches)


def frontier(ledger: Ledger, in_files: set[int]) -> dict[str, int]:
    """What a checkpoint's manifest says of the ledger: how many groups had a fate.

    `in_files` are the ordinals of batch files. Another thread may be recording meanwhile.
    """
    return {"fates": len(ledger.fates) + len(in_files - ledger.fates.keys())}


def _require_frontier(
    checkpoints: Checkpoints, checkpoint: int, files: BatchFiles, ledger: Ledger
) -> None:
    """A ledger that knows less than it did is older than the checkpoint: it was put back."""
    then = checkpoints.facts(checkpoint).get("fates", 0)
    in_files = {line.ordinal for line in files.fates(files.versions())}
    now = frontier(ledger, in_files)["fates"]
    if now < then:
        raise CheckpointError(
            f"{ledger.path} and {files.root} know the fate of {now} groups; {then} had one when "
            f"{checkpoints.path(checkpoint)} was written, so the ledger is the older of the two. "
            "Restore it from a backup, or `dapo export` the run and start a new one from there"
        )
