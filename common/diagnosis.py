"""What holds a run up: one verdict, the figure that shows it, and the knob to turn.

`diagnose` is a pure function of `Figures`. A learner that waits, generators that have nothing to
do and a publication that takes long are losses, each a share of somebody's time; a loss counts
from its threshold on, and the verdict is the loss that exceeds its own by the largest factor:

    learner starved      the learner waits for groups for WAITING of its time or more
    verifier saturated   the same, while verifiers are busy for BUSY of theirs and JUDGING of the
                         pending groups wait to be judged
    publishing slow      weight rounds take PUBLISHING of the learner's time
    generators starved   generators hold weights and have no prompt for IDLE of theirs

Before these come `ended`, `stalled` (a role is missing, or nothing was done for the limit of
`stall_limit`) and `starting` (no batch yet, and not that long).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from common.history import number

WAITING = 0.3
PUBLISHING = 0.2
IDLE = 0.3
BUSY = 0.9
JUDGING = 0.5
LOW_ACCEPTANCE = 0.2
"""Below it, most of what is generated is filtered: the problems are at fault and not the pace."""
PATIENCE = 3.0
"""A run without progress for so many times its usual interval has stalled, if not sooner."""
STALL_S = 300.0
"""`run.stall_s`, where the learner has not told its own."""
ROLES = ("learner", "verifier", "generator")

Verdict = Literal[
    "generators starved", "learner starved", "verifier saturated", "publishing slow", "stalled",
    "healthy", "starting", "ended",
]  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What a verdict rests on; shares between 0 and 1, mappings by the state of a role's time.

    `groups` counts open groups by state; `silent_s` is the age of the learner's report, and
    `since_progress_s` that of the last batch or evaluation, None before it is known.
    """

    alive: Mapping[str, int] = field(default_factory=dict)
    learner: Mapping[str, float] = field(default_factory=dict)
    generators: Mapping[str, float] = field(default_factory=dict)
    verifiers: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, float] = field(default_factory=dict)
    acceptance: float | None = None
    batches: int = 0
    since_progress_s: float | None = None
    silent_s: float = 0.0
    interval_s: float | None = None
    stall_s: float = STALL_S
    waiting_for: str = ""
    ended: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict, the figure that shows it, and what to do; `knob` is empty if nothing is."""

    verdict: Verdict
    figure: str
    knob: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.figure}" + (f"; {self.knob}" if self.knob else "")


def diagnose(figures: Figures) -> Diagnosis:
    """The one verdict on a run."""
    if figures.ended:
        return Diagnosis("ended", figures.ended)
    if stall := _stalled(figures):
        return stall
    if figures.batches == 0:
        why = figures.waiting_for or "engines load, weights go out, the base is measured"
        return Diagnosis("starting", f"no batch yet: {why}")
    waiting = figures.learner.get("waiting", 0.0)
    losses = {
        _learner_starved: waiting / WAITING,
        _publishing_slow: figures.learner.get("publishing", 0.0) / PUBLISHING,
        _generators_starved: figures.generators.get("idle", 0.0) / IDLE,
    }
    worst = max(losses, key=lambda loss: losses[loss])
    if losses[worst] >= 1:
        return worst(figures)
    busy = figures.learner.get("training", 0.0)
    return Diagnosis(
        "healthy", f"the learner trains {busy:.0%} of its time and waits {waiting:.0%}"
    )


def stall_limit(stall_s: float, interval_s: float | None) -> float:
    """Seconds without progress from which a run has stalled; one of long batches has longer."""
    return max(stall_s, PATIENCE * (interval_s or 0.0))


def _stalled(figures: Figures) -> Diagnosis | None:
    since, limit = figures.since_progress_s, stall_limit(figures.stall_s, figures.interval_s)
    if missing := [role for role in ROLES if not figures.alive.get(role)]:
        if figures.batches == 0 and (since is None or since < limit):
            return None  # it takes a while until an engine is there
        return Diagnosis(
            "stalled", f"no {' and no '.join(missing)} holds a lease",
            f"see logs/ for how it ended, and start it: dapo {missing[0]} RECIPE",
        )  # fmt: skip
    if figures.silent_s > limit:
        return Diagnosis(
            "stalled", f"the learner has not reported for {figures.silent_s:,.0f} s",
            "its process hangs: see logs/learner.out, and restart it",
        )  # fmt: skip
    if since is None or since <= limit:
        return None
    why = figures.waiting_for or "the learner is in the middle of a turn"
    return Diagnosis(
        "stalled", f"nothing was done for {since:,.0f} s, the limit is {limit:,.0f} s ({why})",
        _whose_turn(figures),
    )  # fmt: skip


def _whose_turn(figures: Figures) -> str:
    """Where the groups lie that do not move."""
    places = {
        "judging": "groups lie with the verifiers: see logs/verifier-*.out, `dapo dead RUN`",
        "generating": "groups lie with the generators: see logs/generator-*.out, "
        "lower admission.silence_s",
        "unclaimed": "no generator claims: it has no published weights, see the weight rounds in "
        "logs/learner.out",
        "accepted": "enough groups are there: see logs/learner.out",
    }
    place = max(places, key=lambda state: figures.groups.get(state, 0))
    return places[place] if figures.groups.get(place) else "see logs/learner.out"


def _learner_starved(figures: Figures) -> Diagnosis:
    """Who makes the learner wait: the problems, the verifiers, the bound, or the generators."""
    waits = f"the learner waits for groups {figures.learner['waiting']:.0%} of its time"
    busy = figures.verifiers.get("busy", 0.0)
    pending = sum(figures.groups.get(s, 0) for s in ("unclaimed", "generating", "judging"))
    judging = figures.groups.get("judging", 0) / (pending or 1)
    if busy >= BUSY and judging >= JUDGING:
        figure = f"verifiers are busy {busy:.0%}, {judging:.0%} of the pending groups are there"
        return Diagnosis(
            "verifier saturated", f"{figure}, and {waits}",
            "raise verifier.count or verifier.slow_workers, lower verifier.slow_deadline_s",
        )  # fmt: skip
    idle = figures.generators.get("idle", 0.0)
    if figures.acceptance is not None and figures.acceptance < LOW_ACCEPTANCE:
        return Diagnosis(
            "learner starved", f"{waits}, and {figures.acceptance:.0%} of the groups are accepted",
            "train on problems that are neither too easy nor too hard: data.train, data.weights",
        )  # fmt: skip
    if idle >= IDLE:
        return Diagnosis(
            "learner starved", f"{waits}, and generators wait for prompts {idle:.0%} of theirs",
            "each waits for the other: raise admission.max_staleness or admission.oversample",
        )  # fmt: skip
    works = figures.generators.get("generating", 0.0)
    return Diagnosis(
        "learner starved", f"{waits}, while generators generate {works:.0%} of theirs",
        "start more generators (generator.count), or raise generator.max_samples",
    )  # fmt: skip


def _publishing_slow(figures: Figures) -> Diagnosis:
    share, paused = figures.learner["publishing"], figures.generators.get("paused", 0.0)
    return Diagnosis(
        "publishing slow",
        f"weight rounds take {share:.0%} of the learner's time; generators pause {paused:.0%}",
        "publish.backend = nccl where both ends have GPUs, a larger publish.bucket_mib, a shorter "
        "publish.ready_timeout_s if members are left out, or larger batches",
    )


def _generators_starved(figures: Figures) -> Diagnosis:
    idle, train = figures.generators["idle"], figures.learner.get("training", 0.0)
    return Diagnosis(
        "generators starved",
        f"generators wait for prompts {idle:.0%} of their time, the learner trains {train:.0%}",
        "speed the learner up (learner.ranks, learner.micro_batch_tokens), raise "
        "admission.max_staleness, or run fewer generators",
    )


def figures_of(status: Mapping[str, Any], batch: Mapping[str, Any] | None) -> Figures:
    """The figures in what `common.status.read_status` read, and in a run's newest batch row.

    Whatever is missing there, as before a role's first report, is left at its default.
    """
    members, reports = status.get("members", {}), status.get("reports", {})
    own, row = dict(reports.get("learner", {})), dict(batch or {})
    alive = {role: sum(m.get("role") == role for m in members.values()) for role in ROLES}
    silent = max(0.0, status["time"] - own["time"]) if "time" in own else 0.0
    since = number(own, "since_progress_s")
    acceptance = number(own, "acceptance")
    return Figures(
        alive=alive,
        learner=own.get("shares", {}),
        generators=_mean_shares(members, reports, "generator"),
        verifiers=_mean_shares(members, reports, "verifier"),
        groups=own.get("groups", {}),
        acceptance=number(row, "acceptance") if acceptance is None else acceptance,
        batches=int(number(own, "version") or number(row, "step") or 0),
        since_progress_s=None if since is None else since + silent,
        silent_s=silent,
        interval_s=number(own, "batch_interval_s"),
        stall_s=number(own, "stall_s") or STALL_S,
        waiting_for=own.get("waiting_for", ""),
        ended=status.get("ended") or "",
    )


def _mean_shares(
    members: Mapping[str, Any], reports: Mapping[str, Any], role: str
) -> dict[str, float]:
    """The mean over the living members of a role that have reported."""
    names = [name for name, info in members.items() if info.get("role") == role]
    return mean_of(reports[name]["shares"] for name in names if reports.get(name, {}).get("shares"))


def mean_of(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every key; empty of none."""
    rows = list(shares)
    keys = {key for row in rows for key in row}
    return {key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in sorted(keys)}
