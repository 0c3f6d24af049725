"""The admission rule against an adversary, and the known wrong rules against the same games."""

from collections.abc import Collection, Iterable
from itertools import permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.admission import Admission
from learner.decision import Counts, Decision, Group, Hold, Starved, Train
from tests.unit.admission_game import Breach, Drawn, Game, Promise, Seeded

GAMES = 3000


def play(
    seed: int, rule: type[Admission] = Admission, *, left_out_keep_claims: bool = False
) -> Game:
    game = Game(Seeded(seed), rule, left_out_keep_claims)
    game.play()
    return game


@pytest.mark.parametrize("part", range(4))
def test_no_game_breaks_the_bound_loses_a_group_or_deadlocks(part: int) -> None:
    fates: list[str] = []
    for seed in range(part, GAMES, 4):
        try:
            fates.extend(play(seed).fates.values())
        except Breach as breach:
            raise AssertionError(f"game {seed}: {breach}") from breach
    assert set(fates) == {"trained", "filtered", "failed", "stale"}  # the games reach every fate


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 59), max_size=300))
def test_no_game_that_hypothesis_finds_breaks_the_rule(choices: list[int]) -> None:
    Game(Drawn(choices)).play(moves=60)


# The known wrong variants of the rule, and a few more; the same games must catch every one, by a
# promise that it breaks.


class HoldsOnlyForUnfinished(Admission):
    """Does not wait for the verdict of a group that is generated."""

    def _overtaken(self, ahead: Iterable[Group]) -> list[Group]:
        return [group for group in super()._overtaken(ahead) if not group.generated]


class KeepsSurplusForEver(Admission):
    """Gives surplus no deadline."""

    def _sort(self) -> tuple[list[Group], list[Group]]:
        return sorted(self._open.values(), key=lambda group: (group.oldest, group.ordinal)), []


class HoldsForUnclaimed(Admission):
    """Holds for a prompt in the stream like for one in a generator."""

    def _overtaken(self, ahead: Iterable[Group]) -> list[Group]:
        return [group for group in ahead if not group.accepted]


class DatesUnclaimedByDispatch(Admission):
    """A prompt in the stream is due by its dispatch, though newer weights will start it."""

    def publish(self, version: int, unclaimed: Collection[int] = ()) -> None:
        super().publish(version)


class ForgetsUnclaimed(Admission):
    """The opposite: due by its dispatch, but never held for."""

    def publish(self, version: int, unclaimed: Collection[int] = ()) -> None:
        super().publish(version)
        for ordinal in unclaimed:
            self._open[ordinal].started = False


class NeverHolds(Admission):
    """Drops, although its policy is to hold."""

    def _overtaken(self, ahead: Iterable[Group]) -> list[Group]:
        return []


class CutsByCompletion(Admission):
    """Trains first what is complete first."""

    def accept(self, ordinal: int, oldest: int) -> None:
        super().accept(ordinal, oldest)
        self._open[ordinal] = self._open.pop(ordinal)

    def decide(self) -> Decision:
        decision = super().decide()
        if not isinstance(decision, Train):
            return decision
        complete = [ordinal for ordinal, group in self._open.items() if group.accepted]
        return Train(tuple(complete[: self.batch_groups]))


class ReturnsCapacityWhenFormed(Admission):
    """Counts the batch in training as gone."""

    def _in_use(self) -> int:
        return len(self._open)

    def _slots(self, deadline: int) -> int:
        return (deadline - self.version + 1) * self.batch_groups


class IgnoresLatePublication(Admission):
    """Dispatches by capacity alone, as if the weights were always out."""

    def can_dispatch(self, unclaimed: int, unclaimed_limit: int) -> int:
        return max(0, min(self.capacity - self._in_use(), unclaimed_limit - unclaimed))


class RetriesLoosenTheDeadline(Admission):
    """Takes a retry for a new group although its samples are kept."""

    def redispatch(self, ordinal: int, oldest: int | None = None) -> None:
        super().redispatch(ordinal, None)


class RestartForgets(Admission):
    """Starts counting at the published version after a restart."""

    def restore(
        self, version: int, published: int, groups: Iterable[Group], verdicts: Iterable[bool] = ()
    ) -> None:
        super().restore(version, published, groups, verdicts)
        for group in self._open.values():
            group.oldest = published


MUTANTS = [
    (HoldsOnlyForUnfinished, {Promise.NO_LOSS}),
    (KeepsSurplusForEver, {Promise.BOUND}),
    (HoldsForUnclaimed, {Promise.PROGRESS}),
    (ReturnsCapacityWhenFormed, {Promise.NO_LOSS}),
    (NeverHolds, {Promise.NO_LOSS}),
    (CutsByCompletion, {Promise.ORDER}),
    (DatesUnclaimedByDispatch, {Promise.PROGRESS, Promise.LAST_SLOT}),
    (ForgetsUnclaimed, {Promise.NO_LOSS, Promise.LAST_SLOT}),
    (IgnoresLatePublication, {Promise.NO_LOSS}),
    (RetriesLoosenTheDeadline, {Promise.NO_LOSS, Promise.BOUND, Promise.RESTART}),
    (RestartForgets, {Promise.ORDER, Promise.BOUND, Promise.RESTART}),
]


@pytest.mark.parametrize(("mutant", "broken"), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
def test_the_games_catch_every_known_wrong_rule(
    mutant: type[Admission], broken: set[Promise]
) -> None:
    assert first_breach(mutant).promise in broken


def test_a_generator_that_missed_a_round_and_keeps_its_claims_stops_the_run() -> None:
    breach = first_breach(Admission, left_out_keep_claims=True)
    assert breach.promise == Promise.PROGRESS
    assert "deadlock" in str(breach)


def first_breach(rule: type[Admission], *, left_out_keep_claims: bool = False) -> Breach:
    for seed in range(GAMES):
        try:
            play(seed, rule, left_out_keep_claims=left_out_keep_claims)
        except Breach as breach:
            return breach
    raise AssertionError(f"{rule.__name__} got through {GAMES} games")


# Small cases, one sentence each


def filled(
    rule: Admission, accepted: Iterable[int] = (), *, start: int = 0, unclaimed_limit: int = 1000
) -> Admission:
    """Dispatches and claims, from `start` on, all that may go out; then accepts some of it."""
    for ordinal in range(start, start + rule.can_dispatch(0, unclaimed_limit)):
        rule.dispatch(ordinal)
        rule.claim(ordinal)
    for ordinal in accepted:
        rule.accept(ordinal, rule.groups[ordinal].oldest)
    return rule


def train_and_publish(rule: Admission) -> tuple[int, ...]:
    decision = rule.decide()
    assert isinstance(decision, Train), rule.explain()
    rule.begin(decision.ordinals)
    rule.trained()
    rule.publish(rule.version, [o for o, group in rule.groups.items() if not group.started])
    return decision.ordinals


def test_bound_0_dispatches_one_batch_and_the_next_only_after_publication() -> None:
    rule = filled(Admission(4, 0), accepted=range(4))
    assert (len(rule.groups), rule.can_dispatch(0, 1000)) == (4, 0)
    rule.begin([0, 1, 2, 3])
    assert rule.can_dispatch(0, 1000) == 0, "capacity must not return when the batch is formed"
    rule.trained()
    assert rule.can_dispatch(0, 1000) == 0, "the old weights are a version too old"
    rule.publish(1)
    assert rule.can_dispatch(0, 1000) == 4


def test_the_bound_times_the_batch_is_open_at_once_and_no_more() -> None:
    rule = filled(Admission(4, 3))
    assert rule.counts() == Counts(
        open=16,
        unclaimed=0,
        generating=16,
        judging=0,
        accepted=0,
        training=0,
        pending=16,
        capacity=16,
    )
    assert rule.can_dispatch(0, 1000) == 0
    assert "capacity: 16 of 16 open" in rule.explain()


def test_few_prompts_wait_in_the_stream() -> None:
    rule = Admission(4, 3)
    assert rule.can_dispatch(unclaimed=0, unclaimed_limit=3) == 3
    assert rule.can_dispatch(unclaimed=2, unclaimed_limit=3) == 1
    assert rule.can_dispatch(unclaimed=3, unclaimed_limit=3) == 0
    assert rule.explain() == "stream: 3 of 3 prompts unclaimed"


def test_late_publication_closes_the_dispatch() -> None:
    rule = filled(Admission(2, 1), accepted=range(2))
    rule.begin([0, 1])
    rule.trained()
    assert rule.can_dispatch(0, 1000) == 0
    assert "published 0" in rule.explain()
    rule.publish(1)
    assert rule.can_dispatch(0, 1000) == 2


def test_every_fate_returns_capacity() -> None:
    rule = filled(Admission(4, 0))
    rule.close(2)
    assert rule.can_dispatch(0, 1000) == 1


def test_a_batch_is_the_first_accepted_in_order_and_the_rest_waits_for_the_next() -> None:
    rule = filled(Admission(2, 1), accepted=[3, 1, 2, 0])
    assert train_and_publish(rule) == (0, 1)
    assert train_and_publish(rule) == (2, 3)


def test_overtaking_is_free_until_it_would_cost_a_last_slot() -> None:
    rule = filled(Admission(2, 1), accepted=[1, 2])
    assert train_and_publish(rule) == (1, 2)  # 0 and 3 fit in the last batch of their deadline
    filled(rule, accepted=[4, 5], start=4)
    assert rule.decide() == Hold((0, 3))
    assert rule.explain().startswith("holding for group 0 and 1 more due at version 1 (trained 1)")
    rule.accept(0, 0)
    assert rule.decide() == Hold((3,))
    rule.close(3)
    assert train_and_publish(rule) == (0, 4)


def test_a_generated_group_is_held_for_until_its_verdict() -> None:
    rule = filled(Admission(1, 1), accepted=[1])
    train_and_publish(rule)
    filled(rule, accepted=[2], start=2)
    rule.observe(0, 0)
    assert rule.decide() == Hold((0,))
    assert rule.counts().judging == 1


def test_nobody_holds_for_a_prompt_that_is_still_in_the_stream() -> None:
    rule = Admission(1, 1)
    rule.dispatch(0)
    rule.dispatch(1)
    rule.accept(1, 0)
    assert train_and_publish(rule) == (1,)
    assert rule.deadline(0) == 2, "it can only be started with the weights of version 1"
    rule.dispatch(2)
    rule.accept(2, 1)
    assert train_and_publish(rule) == (2,)


def test_a_prompt_not_reported_as_unclaimed_keeps_its_deadline() -> None:
    rule = Admission(1, 1)
    rule.dispatch(0)
    rule.dispatch(1)
    rule.accept(1, 0)
    rule.begin([1])
    rule.trained()
    rule.publish(1)
    assert rule.deadline(0) == 1
    rule.dispatch(2)
    rule.accept(2, 1)
    assert rule.decide() == Hold((0,))


def test_only_a_retry_without_kept_tokens_gets_a_new_deadline() -> None:
    rule = filled(Admission(2, 1), accepted=[2, 3])
    train_and_publish(rule)
    rule.redispatch(0)
    rule.redispatch(1, oldest=0)
    assert (rule.deadline(0), rule.deadline(1)) == (2, 1)
    assert (rule.groups[0].started, rule.groups[1].started) == (False, True)
    rule.publish(1, unclaimed=[0, 1])
    assert (rule.deadline(0), rule.deadline(1)) == (2, 1)


def test_a_lower_oldest_than_planned_is_believed() -> None:
    rule = filled(Admission(1, 0), accepted=[0])
    train_and_publish(rule)
    filled(rule, start=1)
    rule.accept(1, 0)
    assert rule.lost() == [1]
    assert rule.decide() == Starved(1)


def test_acceptance_is_the_share_of_recent_verdicts_and_1_before_any() -> None:
    rule = Admission(2, 0, window=4)
    assert rule.acceptance == 1.0
    for passed in (False, False, True, True, True):
        rule.verdict(passed)
    assert rule.acceptance == 0.75


def test_oversampling_starts_more_only_as_far_as_verdicts_fail() -> None:
    rule = Admission(4, 0, oversample=2.0)
    assert rule.can_dispatch(0, 1000) == 4
    for passed in (True, False, True, False):
        rule.verdict(passed)
    assert rule.can_dispatch(0, 1000) == 8
    for _ in range(100):
        rule.verdict(False)
    assert rule.can_dispatch(0, 1000) == 8


@pytest.mark.parametrize("passing", [(0, 2, 3), (1, 2, 4), (0, 1, 2, 4), (0, 1, 2, 3, 4)])
def test_surplus_is_cut_by_ordinal_whatever_the_order_of_completion(
    passing: tuple[int, ...],
) -> None:
    for order in permutations(range(5)):
        rule = Admission(3, 0, oversample=2.0)
        for _ in range(8):
            rule.verdict(False)
        filled(rule, unclaimed_limit=5)
        trained: tuple[int, ...] = ()
        for ordinal in order:
            if ordinal not in rule.groups:
                continue  # lost before it was complete
            if ordinal in passing:
                rule.accept(ordinal, 0)
            else:
                rule.close(ordinal)
            for lost in rule.lost():
                rule.close(lost)
            decision = rule.decide()
            if isinstance(decision, Train):
                trained = decision.ordinals
                break
        assert trained == passing[:3]


def test_surplus_that_finds_no_slot_is_lost_at_once() -> None:
    rule = Admission(2, 0, oversample=2.0)
    rule.verdict(False)
    filled(rule, accepted=[0, 3])
    assert rule.lost() == []
    rule.accept(1, 0)
    assert rule.lost() == [2, 3], "one is ready, one is still generated; both have no slot"


def test_a_restart_keeps_every_deadline() -> None:
    rule = filled(Admission(2, 1), accepted=[1, 2])
    train_and_publish(rule)
    filled(rule, accepted=[4, 5], start=4)
    again = Admission(2, 1)
    again.restore(rule.version, rule.published, rule.groups.values(), [True] * 5)
    assert again.groups == rule.groups
    assert again.decide() == rule.decide() == Hold((0, 3))
    assert again.can_dispatch(0, 1000) == 0


def test_an_unclaimed_prompt_is_restored_with_the_published_version() -> None:
    rule = Admission(2, 2)
    rule.restore(3, 2, [Group(7, 0, started=False), Group(8, 1)])
    assert (rule.deadline(7), rule.deadline(8)) == (4, 3)


def test_a_starved_batch_says_what_is_missing() -> None:
    rule = filled(Admission(4, 0), accepted=[0])
    assert rule.decide() == Starved(3)
    assert rule.explain().startswith("starved: 1 of 4 accepted, 3 pending")


def test_calls_that_break_the_contract_are_errors() -> None:
    rule = filled(Admission(2, 1), accepted=[0, 1])
    with pytest.raises(ValueError, match="open already"):
        rule.dispatch(0)
    with pytest.raises(ValueError, match="accepted before"):
        rule.accept(0, 0)
    with pytest.raises(ValueError, match="not open"):
        rule.close(99)
    with pytest.raises(ValueError, match="not accepted"):
        rule.begin([0, 2])
    with pytest.raises(ValueError, match="a batch is 2 groups"):
        rule.begin([0])
    with pytest.raises(ValueError, match="cannot publish"):
        rule.publish(1)
    with pytest.raises(ValueError, match="without begin"):
        rule.trained()
    rule.begin([0, 1])
    with pytest.raises(ValueError, match="in training"):
        rule.close(0)
    with pytest.raises(ValueError, match="in training"):
        rule.decide()
    with pytest.raises(ValueError, match="batch_groups"):
        Admission(0, 1)


def test_a_batch_past_the_bound_is_refused() -> None:
    rule = Admission(1, 0)
    rule.restore(1, 1, [Group(0, 0, accepted=True)])
    with pytest.raises(ValueError, match="more than 0 behind"):
        rule.begin([0])


def test_dropping_never_holds_and_loses_who_was_overtaken_and_is_too_late() -> None:
    rule = filled(Admission(2, 1, policy="drop"), accepted=[1, 2])
    assert train_and_publish(rule) == (1, 2)
    filled(rule, accepted=[4, 5], start=4)
    assert rule.lost() == []
    decision = rule.decide()
    assert decision == Train((4, 5)), "the rule that holds would wait for groups 0 and 3 here"
    rule.begin((4, 5))
    assert rule.lost() == [0, 3]


def test_a_capacity_that_is_no_whole_number_is_rounded_up() -> None:
    rule = Admission(3, 0, oversample=1.5)
    for _ in range(10):
        rule.verdict(False)
    assert rule.capacity == 5
    assert rule.can_dispatch(0, 1000) == 5, "while fewer than 4.5 are open, one more may start"
