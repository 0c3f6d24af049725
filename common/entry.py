"""Streams of a run by name, and their entries as the server gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PROMPTS, ROLLOUTS, VERDICTS = "prompts", "rollouts", "verdicts"
STREAMS = (PROMPTS, ROLLOUTS, VERDICTS)
NAME_BYTES = 200
"""What is read of the name of a group; none is longer."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a stream, claimed by `owner`.

    `group` is the id of its group, empty where it names none. `deliveries` counts the workers that
    it was given to, this one included: all before died without a result.
    """

    id: str
    data: bytes
    group: str = ""
    owner: str = ""
    deliveries: int = 1


def read_entries(reply: Any, owner: str) -> list[Entry]:
    """Entries of one stream; those deleted while pending come with empty fields and are left."""
    batches = reply.values() if isinstance(reply, dict) else [b for _, b in reply or []]
    flat: list[Any] = []
    for batch in batches:
        # RESP3 wraps the entries of a stream once more
        flat += batch[0] if batch and isinstance(batch[0], list) else batch
    return [read_entry(item, owner) for item in flat if item[1]]


def read_entry(item: Any, owner: str) -> Entry:
    """An entry out of (id, fields) or (id, fields, deliveries)."""
    id_, fields, *count = item
    pairs = (
        fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    )
    data, group = pairs.get(b"r", b""), pairs.get(b"g", b"")[:NAME_BYTES]
    return Entry(id_.decode(), data, group.decode(errors="replace"), owner, *map(int, count))
