"""Samples of kept rollouts: which are asked for, in which order, and as text to read."""

from __future__ import annotations

import heapq
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from common.rollout_log import Group

Sample = dict[str, Any]
"""A sample of a group, with what the group says beside it."""
Order = Literal["newest", "best", "worst"]
WIDTH = 88
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Wanted:
    """Which samples; None is any."""

    fate: str | None = None
    outcome: str | None = None
    truncated: bool | None = None

    def has(self, sample: Sample) -> bool:
        asked = {"fate": self.fate, "outcome": self.outcome, "truncated": self.truncated}
        return all(value is None or sample.get(key) == value for key, value in asked.items())


def select(
    groups: Iterable[Group], wanted: Wanted, order: Order = "newest", limit: int | None = None
) -> list[Sample]:
    """At most `limit` samples.

    `newest` keeps the order of the groups. `best` and `worst` take one sample of each group, by
    its shaped reward, and then those groups whose sample is the best, or the worst.
    """
    fitting = ([s for s in _samples(group) if wanted.has(s)] for group in groups)
    if order == "newest":
        return list(islice((sample for group in fitting for sample in group), limit))
    choose: Callable[..., Any] = max if order == "best" else min
    judged = ([s for s in group if s.get("shaped_reward") is not None] for group in fitting)
    picked = [choose(group, key=_reward) for group in judged if group]
    take = heapq.nlargest if order == "best" else heapq.nsmallest
    return take(len(picked) if limit is None else limit, picked, key=_reward)


def _reward(sample: Sample) -> float:
    return float(sample["shaped_reward"])


def _samples(group: Group) -> Iterator[Sample]:
    shared = {key: value for key, value in group.items() if key != "samples"}
    return (shared | {"group_samples": len(group["samples"])} | s for s in group["samples"])


def facts(sample: Sample) -> list[tuple[str, str]]:
    """What is known of a sample besides its texts, in words."""
    reward, shaped = sample.get("reward"), sample.get("shaped_reward")
    advantage = sample.get("advantage")
    shaping = f", shaped {_number(shaped)}" if shaped != reward else ""
    rows = [
        ("outcome", _outcome(sample)),
        ("answer", str(sample.get("answer") or "none found")),
        ("gold", str(sample.get("gold", ""))),
        ("reward", "" if reward is None else _number(reward) + shaping),
        ("advantage", "" if advantage is None else f"{advantage:+.3f}"),
        ("tokens", f"{sample.get('length', 0):,}" + ", cut off" * bool(sample.get("truncated"))),
        ("policy versions", " to ".join(dict.fromkeys(sample.get("versions") or []))),
        ("generator", str(sample.get("generator", ""))),
    ]
    return [(name, value) for name, value in rows if value]


def heading(sample: Sample) -> str:
    """Where a sample stands: batch, fate, group."""
    reason = sample.get("reason")
    fate = f"{sample.get('fate')} ({reason})" if reason else str(sample.get("fate"))
    place = f"group {sample.get('group')}, sample {sample.get('index')}"
    return f"batch {sample.get('version')} · {fate} · {place}"


def as_text(samples: Iterable[Sample]) -> str:
    """Samples one below the other; the prompt where another group begins."""
    blocks: list[str] = []
    last: Any = None
    for sample in samples:
        group = (sample.get("version"), sample.get("group"), sample.get("attempt"))
        told = " · ".join(f"{name} {value}" for name, value in facts(sample))
        lines = [f"━━ {heading(sample)}", *textwrap.wrap(told, WIDTH)]
        if group != last:
            lines += ["┌ prompt", *_quoted(sample.get("prompt"))]
        lines += ["┌ response", *_quoted(sample.get("text"))]
        blocks.append("\n".join(lines))
        last = group
    return printable("\n\n".join(blocks))


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters and changes of direction as escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _quoted(text: Any) -> list[str]:
    return [f"│ {line}" for line in str(text or "").split("\n")]


def _outcome(sample: Sample) -> str:
    outcome, why = sample.get("outcome"), sample.get("why")
    if outcome is None:
        return "never judged"
    words = str(outcome).replace("_", " ")
    return f"{words} ({why})" if why else words


def _number(value: Any) -> str:
    return f"{float(value):.3f}".rstrip("0").rstrip(".")
