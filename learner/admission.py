"""Admission: which groups may start, which are trained next, which are lost.

A pure state machine: no I/O, no clock, no task. The caller reports what happened and asks what may
happen; whatever a group's fate, the caller makes it durable first and reports it here afterwards.

`version` counts trained batches (the batch formed at version v makes v + 1), `published` is the
newest version whose weights went out, `B` the groups of a batch, `S` the largest staleness. A group
is open from its dispatch to its fate; the groups of the batch in training are open until `trained`.
`oldest` is the least version a group's tokens may be of, `deadline = oldest + S` the last version
at which it may enter a batch. The order is by (oldest, ordinal) everywhere.

A batch whose groups would overtake a slower one is held back if that would cost the slower one its
last slot (policy `hold`). Policy `drop` never holds: what was overtaken and cannot be trained in
time is lost. It is faster where S is small, and biased: long groups are overtaken most.

Invariants kept, whatever the order of completions, failures, retries and late publications:

1. A batch formed at v holds no group with `oldest < v - S`; it holds exactly B groups.
2. With `oversample = 1` and policy `hold` the open groups due by d number at most
   `(d - v + 1) * B` for every d, so that nothing is ever lost.
3. A hold names only groups that have started. If those resolve, a hold ends; if publications
   succeed, a batch that is starved with nothing pending can always dispatch.
4. Surplus is cut by (oldest, ordinal), never by order of completion.

A prompt that nobody has claimed is not started: a generator claims at the published version only,
so its `oldest` rises with every publication and nobody needs to hold for it. That makes `publish`
the one place where claims must be known (see there).
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from types import MappingProxyType

from learner.decision import Counts, Decision, Group, Hold, Policy, Starved, Train

# Sums of acceptance shares carry rounding errors; the quantities compared are of the order of B.
EPSILON = 1e-9
UNCLAIMED_PER_GENERATOR = 4
"""Prompts that wait in the stream for each generator: enough that none runs dry, few enough that
a prompt is started with weights that are young when it is claimed."""


class Admission:
    """The rule for one run. Methods raise ValueError on a call that breaks their contract."""

    def __init__(
        self,
        batch_groups: int,
        max_staleness: int,
        oversample: float = 1.0,
        policy: Policy = "hold",
        *,
        window: int | None = None,
    ) -> None:
        """`window` is the number of recent verdicts behind `acceptance` (default: 8 batches)."""
        if batch_groups < 1 or max_staleness < 0 or not 1.0 <= oversample < math.inf:
            raise ValueError("needs batch_groups >= 1, max_staleness >= 0, finite oversample >= 1")
        self.batch_groups = batch_groups
        self.max_staleness = max_staleness
        self.oversample = oversample
        self.policy = policy
        self.capacity = math.ceil((max_staleness + 1) * batch_groups * oversample - EPSILON)
        self.version = 0
        self.published = 0
        self._open: dict[int, Group] = {}
        self._accepted = 0  # of the open groups
        self._training: dict[int, Group] = {}
        self._verdicts: deque[bool] = deque(maxlen=window or max(64, 8 * batch_groups))
        self._why_not_dispatch = ""
        self._why_not_train = ""

    # What the caller asks

    @property
    def groups(self) -> Mapping[int, Group]:
        """Open groups by ordinal, those in training not included."""
        return MappingProxyType(self._open)

    @property
    def training(self) -> tuple[int, ...]:
        """The ordinals of the batch now being trained, in order; empty between batches."""
        return tuple(self._training)

    @property
    def acceptance(self) -> float:
        """Share of the recent verdicts that passed; 1.0 before any."""
        return sum(self._verdicts) / len(self._verdicts) if self._verdicts else 1.0

    def deadline(self, ordinal: int) -> int:
        """The last version at which the group may enter a batch."""
        group = self._training.get(ordinal) or self._get(ordinal)
        return group.oldest + self.max_staleness

    def can_dispatch(self, unclaimed: int, unclaimed_limit: int) -> int:
        """How many groups may be dispatched now.

        `unclaimed` counts the prompts waiting in the stream; a limit well below the capacity
        dispatches just in time, which halves the mean staleness at no cost in rate.
        """
        in_use = self._in_use()
        by_capacity = self.capacity - in_use
        # A group dispatched now is due by published + S, as late as any other: what is open
        # must leave a slot for it until then.
        weight = self._pending_weight()
        need = self._accepted + weight * (len(self._open) - self._accepted)
        room = self._slots(self.published + self.max_staleness) - need
        by_deadline = math.ceil(room / weight - EPSILON)
        by_stream = unclaimed_limit - unclaimed
        if by_capacity <= 0:
            self._why_not_dispatch = f"capacity: {in_use} of {self.capacity} open"
        elif by_deadline <= 0:
            self._why_not_dispatch = (
                f"deadlines: {len(self._open)} open groups fill every slot until version "
                f"{self.published + self.max_staleness} (trained {self.version}, "
                f"published {self.published})"
            )
        elif by_stream <= 0:
            self._why_not_dispatch = f"stream: {unclaimed} of {unclaimed_limit} prompts unclaimed"
        else:
            self._why_not_dispatch = ""
        return max(0, min(by_capacity, by_deadline, by_stream))

    def lost(self) -> list[int]:
        """Groups that no slot is left for, in order: stale at once, cancelled if generating.

        The caller records each fate, then calls `close`.
        """
        first = min((group.oldest for group in self._open.values()), default=self.published)
        if self._accepted < self._slots(first + self.max_staleness):
            return []  # even the first deadline has slots left; saves the sorting
        return [group.ordinal for group in self._sort()[1]]

    def decide(self) -> Decision:
        """What the learner may do now; not to be asked while a batch trains."""
        if self._training:
            raise ValueError("decide() while a batch is in training: report trained() first")
        in_order, _ = self._sort()
        accepted = [group for group in in_order if group.accepted]
        batch = accepted[: self.batch_groups]
        missing = self.batch_groups - len(batch)
        if missing:
            self._why_not_train = (
                f"starved: {len(batch)} of {self.batch_groups} accepted, "
                f"{len(in_order) - len(batch)} pending"
            )
            return Starved(missing)
        overtaken = self._overtaken(takewhile(lambda group: group is not batch[-1], in_order))
        # Overtaking is free as long as everybody left over still finds a slot in time.
        holds = overtaken and self.policy == "hold"
        missed = self._first_missed(in_order, batch) if holds else None
        if missed is None:
            self._why_not_train = ""
            return Train(tuple(group.ordinal for group in batch))
        due = [group for group in overtaken if group.oldest + self.max_staleness <= missed]
        for_whom = tuple(group.ordinal for group in due or overtaken)
        others = f" and {len(for_whom) - 1} more" if len(for_whom) > 1 else ""
        self._why_not_train = (
            f"holding for group {for_whom[0]}{others} due at version "
            f"{self.deadline(for_whom[0])} (trained {self.version})"
        )
        return Hold(for_whom)

    def counts(self) -> Counts:
        """Where the open groups are."""
        groups = self._open.values()
        judging = sum(group.generated and not group.accepted for group in groups)
        unclaimed = sum(not group.started for group in groups)
        return Counts(
            open=len(groups) + len(self._training),
            unclaimed=unclaimed,
            generating=len(groups) - self._accepted - judging - unclaimed,
            judging=judging,
            accepted=self._accepted,
            training=len(self._training),
            pending=len(groups) - self._accepted,
            capacity=self.capacity,
        )

    def explain(self) -> str:
        """Why the last answers were not to train and not to dispatch; empty if they were to."""
        return "; ".join(filter(None, (self._why_not_train, self._why_not_dispatch)))

    # What the caller reports of a group

    def dispatch(self, ordinal: int) -> None:
        """The group's prompt goes out, to be started with `published` or newer."""
        if ordinal in self._open or ordinal in self._training:
            raise ValueError(f"group {ordinal} is open already: a new attempt is a redispatch()")
        self._open[ordinal] = Group(ordinal, self.published, started=False)

    def claim(self, ordinal: int) -> None:
        """A generator has claimed the group. Only surplus (oversample > 1) needs this promptly."""
        self._get(ordinal).started = True

    def observe(self, ordinal: int, oldest: int) -> None:
        """The group is generated and waits for its verdict; `oldest` is among all its tokens."""
        self._update(ordinal, oldest).generated = True

    def accept(self, ordinal: int, oldest: int) -> None:
        """The group's verdict passed; `oldest` is the oldest version among all its tokens."""
        if self._get(ordinal).accepted:
            raise ValueError(f"group {ordinal} was accepted before: drop a repeated delivery")
        group = self._update(ordinal, oldest)
        group.generated = group.accepted = True
        self._accepted += 1

    def close(self, ordinal: int) -> None:
        """The group has its fate (filtered, stale, failed) and its capacity returns."""
        self._accepted -= self._get(ordinal).accepted
        del self._open[ordinal]

    def redispatch(self, ordinal: int, oldest: int | None = None) -> None:
        """A new attempt of an open group: a claim given back, a failure retried.

        `oldest` is that of the samples kept; None says that no token is kept, and only then is the
        group due as late as a new one.
        """
        group = self._get(ordinal)
        self._accepted -= group.accepted
        group.accepted = group.generated = False
        group.started = oldest is not None
        group.oldest = self.published if oldest is None else oldest

    def verdict(self, passed: bool) -> None:
        """Counts a verdict for `acceptance`; to be called for every verdict, once."""
        self._verdicts.append(passed)

    # What the caller reports of the run

    def begin(self, ordinals: Collection[int]) -> None:
        """These groups are a durable batch and train now; they stay open until `trained`."""
        if self._training:
            raise ValueError("begin() while a batch is in training")
        if len(set(ordinals)) != self.batch_groups:
            raise ValueError(f"a batch is {self.batch_groups} groups, not {len(set(ordinals))}")
        batch = [self._get(ordinal) for ordinal in ordinals]
        for group in batch:
            if not group.accepted:
                raise ValueError(f"group {group.ordinal} is not accepted")
            if group.oldest < self.version - self.max_staleness:
                raise ValueError(
                    f"group {group.ordinal} holds tokens of version {group.oldest}, more than "
                    f"{self.max_staleness} behind version {self.version}"
                )
        for group in batch:
            self._training[group.ordinal] = self._open.pop(group.ordinal)
        self._accepted -= len(batch)

    def trained(self) -> None:
        """The batch is trained. Capacity returns only now: what is generated from the old weights
        while a batch trains is one version older when its turn comes."""
        if not self._training:
            raise ValueError("trained() without begin()")
        self._training.clear()
        self.version += 1

    def publish(self, version: int, unclaimed: Collection[int] = ()) -> None:
        """The weights of `version` went out, and only generators that hold them claim from now on.

        `unclaimed` are the prompts that were still in the stream when the broker's published
        version changed, read in the same script. Nobody can start them with older weights any more,
        so they are due as late as new ones. Every other pending group counts as started: leaving
        one out is safe for the bound and costs a hold, naming one too many costs a stale group.
        """
        if not self.published <= version <= self.version:
            raise ValueError(f"cannot publish {version}: not in {self.published}..{self.version}")
        self.published = version
        waiting = frozenset(unclaimed)
        for group in self._open.values():
            if group.started or group.ordinal not in waiting:
                group.started = True
            else:
                group.oldest = version

    def restore(
        self, version: int, published: int, groups: Iterable[Group], verdicts: Iterable[bool] = ()
    ) -> None:
        """Replaces the state by what is durable, after a restart.

        `version` counts the durable batches (their groups have the fate `trained` and are not among
        `groups`), `groups` are all others without a fate, dispatched again or not, and `verdicts`
        the latest ones, oldest first. A group of unknown progress is to be given as started; one
        known to be unclaimed is due as late as a new one.
        """
        if not 0 <= published <= version:
            raise ValueError(f"published version {published} is not within 0..{version}")
        self.version, self.published = version, published
        self._training.clear()
        self._open.clear()
        for group in groups:
            if group.ordinal in self._open:
                raise ValueError(f"group {group.ordinal} is given twice")
            started = group.started or group.generated or group.accepted
            oldest = group.oldest if started else published
            generated = group.generated or group.accepted
            self._open[group.ordinal] = Group(
                group.ordinal, oldest, group.accepted, generated, started
            )
        self._accepted = sum(group.accepted for group in self._open.values())
        self._verdicts.clear()
        self._verdicts.extend(verdicts)
        self._why_not_dispatch = self._why_not_train = ""

    # The rule's parts

    def _get(self, ordinal: int) -> Group:
        try:
            return self._open[ordinal]
        except KeyError:
            raise ValueError(f"group {ordinal} is not open, or is in training") from None

    def _update(self, ordinal: int, oldest: int) -> Group:
        # `oldest` grows only, if the contract of publish() is kept. If a claim was missed there and
        # it is lower, it is believed all the same: the bound matters more than a lost group.
        group = self._get(ordinal)
        group.oldest = oldest
        group.started = True
        return group

    def _in_use(self) -> int:
        return len(self._open) + len(self._training)

    def _slots(self, deadline: int) -> int:
        """Places in the batches that can still be formed up to `deadline`."""
        return (deadline - self.version + 1) * self.batch_groups - len(self._training)

    def _pending_weight(self) -> float:
        # Never below 1 / oversample, so that a run of filtered groups cannot open the gates;
        # exactly 1 without oversampling, where every pending group may be accepted.
        return max(self.acceptance, 1.0 / self.oversample)

    def _sort(self) -> tuple[list[Group], list[Group]]:
        """The open groups in order: those that can still be trained, and those that are lost."""
        kept: list[Group] = []
        lost: list[Group] = []
        accepted_ahead = 0
        for group in sorted(self._open.values(), key=lambda group: (group.oldest, group.ordinal)):
            if accepted_ahead >= self._slots(group.oldest + self.max_staleness):
                lost.append(group)
            else:
                kept.append(group)
                accepted_ahead += group.accepted
        return kept, lost

    def _overtaken(self, ahead: Iterable[Group]) -> list[Group]:
        """Those ahead of a batch's last group that it must not cost their last slot."""
        return [group for group in ahead if group.started and not group.accepted]

    def _first_missed(self, in_order: list[Group], batch: list[Group]) -> int | None:
        """The first deadline that those left over by the batch cannot all be expected to meet."""
        chosen = {group.ordinal for group in batch}
        weight = self._pending_weight()
        need = 0.0
        for group in in_order:
            if group.ordinal in chosen:
                continue
            need += 1.0 if group.accepted else weight
            deadline = group.oldest + self.max_staleness
            # In order of deadlines a prefix that does not fit is as good as a whole one.
            if need > self._slots(deadline) - len(batch) + EPSILON:
                return deadline
        return None
