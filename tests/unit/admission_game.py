"""A pipeline in small around the admission rule, in which everything is an adversary's choice.

A game keeps its own books of what every token was sampled by and compares the rule's decisions with
them, so that a rule which deceives itself is found out. The adversary picks the order of
completions and verdicts, failures with and without kept samples, deaths of generators, late
publications, missed rounds, restarts.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from learner.admission import Admission
from learner.decision import Group, Hold, Policy, Train

MOVES = 300


class Promise(Enum):
    """What the rule promises. The first four are the invariants of `learner.admission`."""

    BOUND = "no token trained is past the bound"
    NO_LOSS = "without oversampling and dropping no group goes stale"
    PROGRESS = "batches come if what is pending resolves, and a hold is for whom it can end"
    ORDER = "batches and surplus are cut by (oldest, ordinal), never by order of completion"
    FULL = "a batch holds exactly B accepted groups"
    ONE_FATE = "every ordinal has one fate, or is open"
    LAST_SLOT = "a group is lost only once it has no slot"
    FRESH = "nothing starts with weights older than it asks for"
    RESTART = "a restart from what is durable changes no decision"


class Breach(AssertionError):
    """The rule has done what it promises never to do."""

    def __init__(self, promise: Promise, what: str) -> None:
        super().__init__(f"{what} (promised: {promise.value})")
        self.promise = promise


class Adversary(Protocol):
    def pick(self, n: int) -> int:
        """One of 0 .. n - 1."""


class Seeded:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, n: int) -> int:
        return self._random.randrange(n)


class Drawn:
    """Plays the choices that hypothesis drew, then zeros; it shrinks to a short game."""

    def __init__(self, choices: Iterable[int]) -> None:
        self._choices = iter(choices)

    def pick(self, n: int) -> int:
        return next(self._choices, 0) % n


@dataclass
class Truth:
    """A group as it really is. `tokens`: the oldest version that sampled any token kept."""

    ordinal: int
    least: int
    place: str = "stream"  # then claimed, generated, accepted, training
    tokens: int | None = None
    owner: int = -1


@dataclass
class Generator:
    version: int
    alive: bool = True


@dataclass
class Game:
    """One run of a pipeline in small, in which everything is the adversary's choice."""

    adversary: Adversary
    rule: type[Admission] = Admission
    left_out_keep_claims: bool = False
    version: int = 0
    published: int = 0
    dispatched: int = 0
    open: dict[int, Truth] = field(default_factory=dict)
    fates: dict[int, str] = field(default_factory=dict)
    verdicts: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch = 1 + self.pick(4)
        self.bound = self.pick(5)
        self.oversample = (1.0, 1.0, 1.5, 2.5)[self.pick(4)]
        policies: tuple[Policy, ...] = ("hold", "hold", "hold", "drop")
        self.policy = policies[self.pick(4)]
        self.limit = 1 + self.pick(2 * self.batch)
        self.room = 1 + self.pick(4)
        self.spite = self.pick(4)  # how often the newest goes first, in quarters
        self.pace = [1 + self.pick(4) for _ in range(4)]
        self.generators = [Generator(0) for _ in range(1 + self.pick(3))]
        self.admission = self.new_rule()

    def new_rule(self) -> Admission:
        return self.rule(self.batch, self.bound, self.oversample, self.policy)

    @property
    def lossless(self) -> bool:
        return self.oversample == 1 and self.policy == "hold"

    def pick(self, n: int) -> int:
        return self.adversary.pick(n)

    def chance(self, one_in: int) -> bool:
        return self.pick(one_in) == one_in - 1

    def at(self, place: str) -> list[Truth]:
        return [group for group in self.open.values() if group.place == place]

    def one_of(self, groups: Sequence[Truth]) -> Truth | None:
        if not groups:
            return None
        return groups[-1] if self.pick(4) < self.spite else groups[self.pick(len(groups))]

    # Moves

    def play(self, moves: int = MOVES) -> None:
        steady = (self.claim, self.finish, self.judge, self.learner_turn)
        kinds = [
            kind for kind, pace in zip(steady, self.pace, strict=True) for _ in range(2 * pace)
        ]
        kinds += [self.dispatch, self.dispatch, self.dispatch]
        kinds += [self.fail, self.come_or_go, self.drop_lost, self.restart]
        for _ in range(moves):
            kinds[self.pick(len(kinds))]()
            self.check()
        self.drain()

    def dispatch(self) -> None:
        allowed = self.admission.can_dispatch(len(self.at("stream")), self.limit)
        for _ in range(allowed and 1 + self.pick(allowed)):
            self.open[self.dispatched] = Truth(self.dispatched, self.published)
            self.admission.dispatch(self.dispatched)
            self.dispatched += 1

    def claim(self) -> None:
        owner = self.pick(len(self.generators))
        generator = self.generators[owner]
        busy = sum(group.owner == owner for group in self.at("claimed"))
        group = self.one_of(self.at("stream"))
        if not generator.alive or generator.version != self.published or busy >= self.room:
            return
        if group is not None:
            if generator.version < group.least:
                raise Breach(Promise.FRESH, "a prompt was started with older weights")
            group.place, group.owner = "claimed", owner
            # The first token may be sampled at once.
            group.tokens = generator.version if group.tokens is None else group.tokens
            if not self.chance(3):  # the learner may not hear of it before the next round
                self.admission.claim(group.ordinal)

    def works(self, group: Truth) -> bool:
        """Whether somebody generates this claimed group."""
        return group.owner >= 0

    def finish(self) -> None:
        group = self.one_of([group for group in self.at("claimed") if self.works(group)])
        if group is not None:
            group.place = "generated"
            assert group.tokens is not None
            self.admission.observe(group.ordinal, group.tokens)

    def judge(self) -> None:
        group = self.one_of(self.at("generated"))
        if group is None:
            return
        passed = not self.chance(3)
        self.verdicts.append(passed)
        self.admission.verdict(passed)
        if passed:
            group.place = "accepted"
            assert group.tokens is not None
            self.admission.accept(group.ordinal, group.tokens)
        else:
            self.settle(group.ordinal, "filtered")
            self.admission.close(group.ordinal)

    def fail(self) -> None:
        group = self.one_of([group for group in self.at("claimed") if self.works(group)])
        if group is None:
            return
        if self.chance(3):
            self.settle(group.ordinal, "failed")
            self.admission.close(group.ordinal)
        else:
            self.give_back(group)

    def give_back(self, group: Truth) -> None:
        """To the stream again, with or without the samples that are complete."""
        group.place, group.owner = "stream", -1
        if self.chance(2):
            group.tokens, group.least = None, self.published
        self.admission.redispatch(group.ordinal, group.tokens)

    def come_or_go(self) -> None:
        owner = self.pick(len(self.generators))
        generator = self.generators[owner]
        if generator.alive and self.chance(3):
            generator.alive = False
            self.leave_out(owner)
        elif not generator.alive:
            generator.alive, generator.version = True, self.published

    def leave_out(self, owner: int) -> None:
        for group in self.at("claimed"):
            if group.owner == owner:
                if self.left_out_keep_claims:
                    group.owner = -2  # its lease lives on, but nobody generates it
                else:
                    self.give_back(group)

    def publish(self, reliably: bool = False) -> None:
        """A weight round, or the catch-up of generators that missed the last one."""
        if not reliably and self.chance(3):
            return  # late: to be tried again
        for owner, generator in enumerate(self.generators):
            if not generator.alive or generator.version == self.version:
                continue
            if not reliably and self.chance(6):
                self.leave_out(owner)
            else:
                generator.version = self.version
        self.published = self.version
        unclaimed = [group.ordinal for group in self.at("stream")]
        for group in self.at("stream"):
            group.least = self.published
        self.admission.publish(self.version, unclaimed)

    def learner_turn(self, reliably: bool = False) -> None:
        if self.at("training"):
            self.end_training()
            self.admission.trained()
            self.publish(reliably)
            return
        if self.published < self.version:
            self.publish(reliably)
        self.drop_lost()
        decision = self.admission.decide()
        if isinstance(decision, Train):
            self.train(decision.ordinals)
            return
        if isinstance(decision, Hold):
            self.check_hold(decision.for_whom)
        elif decision.missing != self.batch - len(self.at("accepted")):
            raise Breach(Promise.PROGRESS, "starved although enough are accepted")
        self.publish(reliably)  # every wait is a safe point

    def train(self, ordinals: Sequence[int]) -> None:
        if len(ordinals) != self.batch or len(set(ordinals)) != self.batch:
            raise Breach(Promise.FULL, "a batch of the wrong size")
        for ordinal in ordinals:
            group = self.open[ordinal]
            if group.place != "accepted" or group.tokens is None:
                raise Breach(Promise.FULL, "trained a group that is not accepted")
            if group.tokens < self.version - self.bound:
                raise Breach(Promise.BOUND, "trained a token past the bound")
        in_order = sorted(self.at("accepted"), key=lambda group: (self.due(group), group.ordinal))
        if list(ordinals) != [group.ordinal for group in in_order[: self.batch]]:
            raise Breach(Promise.ORDER, "a batch is not of the first groups in order")
        for ordinal in ordinals:
            self.open[ordinal].place = "training"
        self.admission.begin(ordinals)

    def end_training(self) -> None:
        for group in self.at("training"):
            self.settle(group.ordinal, "trained")
        self.version += 1

    def drop_lost(self) -> None:
        for ordinal in self.admission.lost():
            if self.lossless:
                raise Breach(Promise.NO_LOSS, "a group went stale")
            self.check_lost(self.open[ordinal])
            self.settle(ordinal, "stale")
            self.admission.close(ordinal)

    def restart(self) -> None:
        """The learner dies and starts again from what is durable; a batch in training is."""
        if self.at("training"):
            self.end_training()
            before = None
        else:
            before = self.admission.lost(), self.admission.decide()
        self.admission = self.new_rule()
        for group in self.at("claimed"):
            if self.works(group) and self.chance(4):  # unknown to a server that has lost it
                group.place, group.owner, group.tokens = "stream", -1, None
                group.least = self.published
                before = None
        groups = [
            Group(
                group.ordinal,
                group.least if group.tokens is None else group.tokens,
                accepted=group.place == "accepted",
                generated=group.place in ("generated", "accepted"),
                started=group.place != "stream" or group.tokens is not None,
            )
            for group in self.open.values()
        ]
        self.admission.restore(self.version, self.published, groups, self.verdicts)
        if before is not None:
            lost, decision = self.admission.lost(), self.admission.decide()
            # Only that a claim is known earlier may make a difference: to whom surplus is held for.
            if lost != before[0] or (self.lossless and decision != before[1]):
                raise Breach(Promise.RESTART, "a restart has changed a decision")

    # Checks against the game's own books

    def settle(self, ordinal: int, fate: str) -> None:
        if ordinal in self.fates:
            raise Breach(Promise.ONE_FATE, "a group with two fates")
        self.fates[ordinal] = fate
        del self.open[ordinal]

    def due(self, group: Truth) -> int:
        return (self.published if group.tokens is None else group.tokens) + self.bound

    def slots(self, deadline: int) -> int:
        return (deadline - self.version + 1) * self.batch

    def check(self) -> None:
        if set(self.admission.groups) | set(self.admission.training) != set(self.open):
            raise Breach(Promise.ONE_FATE, "the rule's open groups are not those without a fate")
        if len(self.open) + len(self.fates) != self.dispatched:
            raise Breach(Promise.ONE_FATE, "an ordinal was lost or made up")
        if not self.lossless:
            return
        due = sorted(self.due(group) for group in self.open.values())
        for number, deadline in enumerate(due, start=1):
            if number > self.slots(deadline):
                raise Breach(Promise.NO_LOSS, "more groups are due than slots are left")

    def check_lost(self, lost: Truth) -> None:
        ahead = sum(
            (self.due(group), group.ordinal) < (self.due(lost), lost.ordinal)
            for group in self.at("accepted")
        )
        if ahead < self.slots(self.due(lost)) - len(self.at("training")):
            raise Breach(Promise.LAST_SLOT, "lost a group that still has a slot")

    def check_hold(self, for_whom: Collection[int]) -> None:
        if not for_whom or self.policy == "drop":
            raise Breach(Promise.PROGRESS, "held for nobody")
        for ordinal in for_whom:
            group = self.open[ordinal]
            if group.place == "stream" and group.tokens is None:
                raise Breach(Promise.PROGRESS, "held for a group that nobody has claimed")
            if group.place == "accepted":
                raise Breach(Promise.PROGRESS, "held for a group that is ready")

    def drain(self) -> None:
        """The adversary turns fair: what is pending resolves, rounds succeed. Batches must come."""
        self.adversary = Seeded(0)
        for generator in self.generators:
            if not generator.alive:
                generator.alive, generator.version = True, self.published
        goal = self.version + 3
        for _ in range(100 + 20 * self.batch * (self.bound + 1)):
            self.learner_turn(reliably=True)
            self.dispatch()
            self.claim()
            self.finish()
            self.judge()
            self.check()
            if self.version >= goal:
                return
        raise Breach(Promise.PROGRESS, "deadlock: no batch although everything pending resolves")
