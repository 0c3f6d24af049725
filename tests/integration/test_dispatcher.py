"""The dispatcher on a real server: full batches, one durable fate for every group, none lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from common.audit import mark_ended
from common.broker import Broker
from common.config import Config
from common.entry import PROMPTS, ROLLOUTS, STREAMS, VERDICTS, Entry
from common.errors import FencedError
from common.ledger import Line, read_lines
from common.messages import DEAD_LETTER, DEADLY, Prompt, Verdict, Version, encode
from common.order import base_ordinal, generation, recycled
from common.server import EmbeddedServer
from learner import dispatcher as dispatcher_module
from learner.dispatcher import Dispatcher
from learner.evaluation import Evaluation
from tests.conftest import MakeConfig
from tests.integration.pretend import Judge, World, drawn, prompts_on_stream, rows, say, world
from tests.unit.records import a_judgement, a_sample, a_stored_group

B = 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "PUMP_S", 0.005)
    monkeypatch.setattr(dispatcher_module, "WATCH_S", 0.05)


@pytest.fixture
def config(make_config: MakeConfig) -> Config:
    return make_config(admission={"max_staleness": 1, "attempts": 3, "recycles": 1})


@pytest.fixture
async def connections(server: EmbeddedServer, run_name: str) -> AsyncIterator[list[Broker]]:
    """Brokers of one run, one for each incarnation of its learner."""
    brokers = [await Broker.connect(server.url, run_name, lease_s=1.0) for _ in range(5)]
    yield brokers
    for broker in brokers:
        await broker.close()


def accept_all(prompt: Prompt, attempt: int) -> str:
    return "accepted"


def by_fate(w: World) -> dict[str, list[int]]:
    fates: dict[str, list[int]] = {}
    for line in read_lines(w.ledger.path):
        fates.setdefault(line.fate, []).append(line.ordinal)
    return fates


async def drained(w: World, *streams: str) -> None:
    """Wait until streams are empty."""
    async with asyncio.timeout(10):
        for stream in streams:
            while await w.broker.client.xlen(w.broker.key(stream)):
                w.check()
                await asyncio.sleep(0.01)


def lawful(w: World, staleness: int) -> None:
    """Every batch is exactly full, without repetition, and within the bound."""
    seen: set[int] = set()
    for batch in w.batches:
        assert len(batch.ordinals) == B
        assert not seen & set(batch.ordinals)
        seen |= set(batch.ordinals)
        assert min(batch.oldest) >= batch.version - staleness


# --- batches and the balance --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "oversample"), [(0, 1.0), (1, 1.0), (3, 1.0), (1, 1.5), (0, 2.0)]
)
async def test_batches_are_exactly_full_and_every_group_has_one_fate_at_the_end(
    make_config: MakeConfig, broker: Broker, staleness: int, oversample: float
) -> None:
    admission = {"max_staleness": staleness, "oversample": oversample, "attempts": 2}
    async with world(make_config(admission=admission), broker) as w:
        w.generators(2, fail=0.05).verifier(drawn(staleness))
        await w.train(6)
        await w.fold()
        await w.dispatcher.end()
        lawful(w, staleness)
        result = await w.audit()
        assert result.balanced
        assert (result.in_flight, result.missing, result.duplicates) == (0, 0, 0)
        assert result.trained == 6 * B
        if oversample == 1:
            reasons = {line.reason for line in w.ledger.fates.values() if line.fate == "stale"}
            assert reasons <= {"run ended"}
        # what was still being made when the run ended finds its group gone and leaves nothing
        await drained(w, *STREAMS)
        assert await w.leftovers() == []
        assert await w.on_server() == set()


async def test_prompts_come_from_the_files_by_weight(
    make_config: MakeConfig, broker: Broker
) -> None:
    data = [replace(row, part=int(number >= 40)) for number, row in enumerate(rows(50))]
    config = make_config(data={"train": ["large.jsonl", "small.jsonl"], "weights": [1, 3]})
    async with world(config, broker, data) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        asked = [prompt.row for prompt in await prompts_on_stream(broker)]
        assert sorted(data[row].part for row in asked) == [0, 1, 1, 1]


async def test_with_staleness_zero_every_trained_token_is_of_the_current_version(
    make_config: MakeConfig, broker: Broker
) -> None:
    async with world(make_config(admission={"max_staleness": 0}), broker) as w:
        w.generators(3).verifier(drawn(1, accept=0.7))
        await w.train(4)
        assert all(set(batch.oldest) == {batch.version} for batch in w.batches)


async def test_filtered_groups_are_replaced_until_the_batch_is_full(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(drawn(2, accept=0.2, fail=0))
        await w.train(2)
        assert len(by_fate(w)["filtered"]) > B
        lawful(w, 1)


async def test_a_prompt_that_waits_carries_the_published_version_as_the_least_one(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        [first, *_] = await prompts_on_stream(broker)
        assert first.least == Version(1, 0)
        assert (first.ordinal, first.attempt, first.samples) == (0, 0, 4)
        assert not first.evaluation


async def test_a_group_counts_as_started_once_its_prompt_is_claimed(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        await w.until(lambda: w.dispatcher.unclaimed == 4)
        assert w.dispatcher.admission.counts().unclaimed == 4
        await broker.claim_prompts("1.0", "g", 2)
        await w.until(lambda: w.dispatcher.admission.counts().generating == 2)
        assert [group.started for group in w.dispatcher.admission.groups.values()][:2] == [True] * 2


async def test_only_as_many_prompts_wait_as_generators_will_soon_claim(
    make_config: MakeConfig, broker: Broker
) -> None:
    async with world(make_config(algorithm={"groups_per_batch": 32, "group_size": 4}), broker):
        await asyncio.sleep(0.3)
        assert len(await prompts_on_stream(broker)) == dispatcher_module.UNCLAIMED_PER_GENERATOR


# --- failures -----------------------------------------------------------------------------------


async def test_a_failing_group_is_tried_again_then_fails_and_its_prompt_comes_back_under_a_budget(
    config: Config, broker: Broker
) -> None:
    tries: dict[int, list[int]] = {}

    def judge(prompt: Prompt, attempt: int) -> str:
        if base_ordinal(prompt.ordinal) != 2:
            return "accepted"
        tries.setdefault(prompt.ordinal, []).append(attempt)
        return "the checker crashed"

    async with world(config, broker, rows(5)) as w:
        w.generators().verifier(judge)
        await w.train(12)
        failed = [line for line in read_lines(w.ledger.path) if line.fate == "failed"]
        assert failed == [
            Line(ordinal, 2, "failed", "the checker crashed") for ordinal in (2, recycled(2))
        ]
        assert tries == {2: [0, 1, 2], recycled(2): [0, 1, 2]}
        assert max(map(generation, w.dispatcher.open), default=0) <= 1


async def test_a_group_that_its_workers_died_of_fails_at_once_and_for_good(
    config: Config, broker: Broker
) -> None:
    """Attempts and recycles would multiply the workers that it takes along."""
    reason = f"{DEAD_LETTER}{DEADLY}the last 3 generators that had it died"
    tries: list[int] = []

    def judge(prompt: Prompt, attempt: int) -> str:
        if base_ordinal(prompt.ordinal) != 2:
            return "accepted"
        tries.append(attempt)
        return reason

    async with world(config, broker, rows(5)) as w:
        w.generators().verifier(judge)
        await w.train(12)
        failed = [line for line in read_lines(w.ledger.path) if line.fate == "failed"]
        assert failed == [Line(2, 0, "failed", reason)]
        assert tries == [0]


async def test_a_failed_generation_is_retried_and_never_a_wrong_answer(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators(2, fail=0.3).verifier(accept_all)
        await w.train(4)
        assert w.dispatcher.tally.failed + sum(batch.ordinals != [] for batch in w.batches) > 0
        assert "filtered" not in by_fate(w)
        assert {line.reason for line in read_lines(w.ledger.path)} <= {"no memory"}


async def test_an_unreadable_verdict_goes_to_the_dead_letters_and_nothing_stops(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        await say(broker, [b"\xc1 poison", b""])
        w.generators().verifier(accept_all)
        await w.train(2)
        assert await broker.client.xlen(broker.key("dead")) == 2
        await drained(w, ROLLOUTS)


async def test_payloads_that_are_gone_send_the_group_out_again_and_the_batch_waits_for_it(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(accept_all)
        chosen = await w.choose()
        lost = chosen[1]
        await broker.client.unlink(broker.key("sample", lost.ordinal, lost.attempt, 2))
        assert await w.write(chosen) == [lost.ordinal]
        await w.dispatcher.not_committed([lost.ordinal], "payload missing")
        assert w.dispatcher.open[lost.ordinal].attempt == 1
        kept = await broker.have_samples(str(lost.ordinal), 1, 4)
        assert kept.count(True) >= 3
        await w.train(1)
        lawful(w, 1)


# --- repeated deliveries ------------------------------------------------------------------------


async def test_deliveries_that_are_repeated_are_dropped_whatever_became_of_the_group(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(drawn(5, accept=0.6, fail=0.1))
        await w.train(2)
        trained = w.batches[0].ordinals[0]
        filtered = by_fate(w)["filtered"][0]
        accepted = [o for o, group in w.dispatcher.open.items() if group.verdict][:1]
        judged = [a_judgement(n, 3, Version(1, w.version)) for n in ("correct", "wrong")] * 2
        repeats = [
            Verdict(str(o), o, attempt, False, fate, "again", judged, "v")  # type: ignore[arg-type]
            for o in (trained, filtered, 12345, *accepted)
            for attempt in (0, 1, 9)
            for fate in ("accepted", "filtered", "failed")
        ]
        await say(broker, repeats)
        before = w.dispatcher.fate_counts()
        await w.train(3)
        assert w.dispatcher.fate_counts()["trained"] == before["trained"] + 3 * B
        assert not any(line.reason == "again" for line in w.ledger.fates.values())
        await w.fold()
        await w.dispatcher.end()
        await drained(w, VERDICTS)
        result = await w.audit()
        assert result.balanced
        assert result.duplicates == 0


async def test_the_same_verdict_twice_in_one_read_counts_once(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        judged = [a_judgement("wrong", 3, Version(1, 0))] * 4
        for fate in ("filtered", "failed"):
            ordinal = min(w.dispatcher.open)
            verdict = Verdict(str(ordinal), ordinal, 0, False, fate, "x", judged, "v")  # type: ignore[arg-type]
            await w.dispatcher._take([Entry(f"{n}-0", encode(verdict)) for n in (1, 2)])
            if fate == "failed":
                assert w.dispatcher.open[ordinal].attempt == 1
        assert by_fate(w) == {"filtered": [0]}


# --- restarts -----------------------------------------------------------------------------------


async def restarted(old: World, broker: Broker, emptied: bool = False) -> World:
    await old.crash()
    if emptied:
        await old.forget()
        await broker.ensure_streams()
    return await World(old.config, broker).start()


@pytest.mark.parametrize("emptied", [False, True])
async def test_a_restart_loses_and_doubles_nothing(
    config: Config, connections: list[Broker], emptied: bool
) -> None:
    w = await World(config, connections[0]).start()
    trained: list[int] = []
    for incarnation, broker in enumerate(connections[1:], 1):
        w.generators(2, seed=incarnation).verifier(drawn(incarnation))
        await w.train(2)
        if incarnation == 2:
            await w.fold()
        await asyncio.sleep(0.01 * incarnation)
        trained += [o for batch in w.batches for o in batch.ordinals]
        known = set(w.dispatcher.open)
        w = await restarted(w, broker, emptied)
        if not emptied:
            assert known - w.on_disk() <= set(w.dispatcher.open)
    w.generators().verifier(accept_all)
    await w.train(2)
    await w.fold()
    await w.dispatcher.end()
    trained += [o for batch in w.batches for o in batch.ordinals]
    assert len(trained) == len(set(trained)) == 10 * B
    assert sorted(by_fate(w)["trained"]) == sorted(trained)
    result = await w.audit()
    assert result.balanced
    assert (result.in_flight, result.missing, result.duplicates) == (0, 0, 0)
    await w.crash()


async def test_a_crash_between_batch_file_and_acknowledgement_trains_nothing_twice(
    config: Config, connections: list[Broker]
) -> None:
    w = await World(config, connections[0]).start()
    w.generators().verifier(accept_all)
    chosen = await w.choose()
    assert await w.write(chosen) == []
    w = await restarted(w, connections[1])
    assert w.version == 1
    assert not {item.ordinal for item in chosen} & (set(w.dispatcher.open) | await w.on_server())
    w.generators().verifier(accept_all)
    await w.train(1)
    assert not {item.ordinal for item in chosen} & set(w.batches[0].ordinals)
    await w.crash()


async def test_a_crash_between_ledger_and_server_is_made_good_at_the_start(
    config: Config, connections: list[Broker]
) -> None:
    w = await World(config, connections[0]).start()
    await w.until(lambda: len(w.dispatcher.open) == 4)
    await w.crash()
    w.ledger = type(w.ledger)(w.ledger.path)
    w.ledger.record([Line(1, 0, "filtered", "all_wrong")])
    w = await restarted(w, connections[1])
    assert 1 not in w.dispatcher.open
    assert "group:1" not in await w.leftovers()
    assert 0 in w.dispatcher.open
    await w.crash()


async def test_a_batch_that_was_never_committed_is_chosen_again_after_a_restart(
    config: Config, connections: list[Broker]
) -> None:
    w = await World(config, connections[0]).start()
    w.generators().verifier(accept_all)
    chosen = {item.ordinal for item in await w.choose()}
    w = await restarted(w, connections[1])
    assert chosen <= set(w.dispatcher.open)
    again = {item.ordinal for item in await w.choose()}
    assert again == chosen  # their verdicts were still pending for this consumer
    await w.crash()


async def test_nobody_claims_between_a_restart_and_its_first_publication(
    config: Config, connections: list[Broker]
) -> None:
    w = await World(config, connections[0]).start()
    await w.until(lambda: len(w.dispatcher.open) == 4)
    await w.crash()
    timeline = w.timeline
    timeline.begin(0)
    fresh = Dispatcher(config, connections[1], w.ledger, timeline, rows())
    await fresh.start(0, [])
    assert await connections[1].claim_prompts("1.0", "g", 1) == []
    assert not any(group.started for group in fresh.admission.groups.values())


async def test_a_learner_that_was_replaced_stops_with_an_error(
    config: Config, connections: list[Broker]
) -> None:
    old = await World(config, connections[0]).start()
    new = await World(config, connections[1]).start()
    old.generators().verifier(drawn(1))
    with pytest.raises(FencedError, match="another learner has taken over"):
        await old.until(lambda: False)
    new.check()
    await new.crash()
    await old.crash()


async def test_a_group_of_a_lost_timeline_is_stale_rewound_and_comes_back(
    config: Config, connections: list[Broker]
) -> None:
    w = await World(config, connections[0]).start()
    await w.until(lambda: len(w.dispatcher.open) == 4)
    w = await restarted(w, connections[1])
    judged = [a_judgement("correct", 3, Version(1, 7))] * 4  # incarnation 2 went on from 0
    await say(w.broker, [Verdict("0", 0, 0, False, "accepted", "mixed", judged, "v")])
    await w.until(lambda: 0 in w.ledger.fates)
    assert w.ledger.fates[0] == Line(0, 0, "stale", "rewound")
    w.generators().verifier(accept_all)
    await w.until(lambda: recycled(0) in w.dispatcher.open or recycled(0) in w.dispatcher.trained
                  or bool(w.dispatcher.ordinals.coming_back))  # fmt: skip
    await w.crash()


async def test_acceptance_after_a_restart_counts_trained_and_filtered_groups_only(
    make_config: MakeConfig, connections: list[Broker]
) -> None:
    config = make_config(admission={"oversample": 2.0})
    w = World(config, connections[0])
    w.ledger.record([Line(o, 0, "stale", "no slot") for o in range(10)])
    w.ledger.record([Line(o, 0, "filtered", "all_wrong") for o in (10, 12)])
    w.ledger.record([Line(o, 0, "trained", "", 1) for o in (11,)])
    await w.dispatcher.start(1, [(13, 0)])
    assert w.dispatcher.admission.acceptance == 0.5


# --- a server that was emptied while the run goes on --------------------------------------------


async def test_groups_that_the_server_forgot_go_out_again_and_the_run_goes_on(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(drawn(3, fail=0))
        for _ in range(3):
            await w.train(1)
            await w.forget()
        await w.train(2)
        await w.fold()
        await w.dispatcher.end()
        lawful(w, 1)
        result = await w.audit()
        assert result.balanced
        assert result.trained == 5 * B


async def test_groups_with_a_fate_that_a_server_brings_back_are_forgotten_again(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(accept_all)
        await w.train(1)
        ghost = w.batches[0].ordinals[0]
        fields = {"state": "judged", "attempt": 0, "least": "1.0", "prompt": "x"}
        await broker.client.hset(broker.key("group", ghost), mapping=fields)  # type: ignore[arg-type]
        await broker.client.sadd(broker.key("open"), str(ghost))
        broker.disconnects += 1
        async with asyncio.timeout(5):
            while ghost in await w.on_server():
                await asyncio.sleep(0.02)


# --- races --------------------------------------------------------------------------------------


async def test_a_group_that_enters_a_batch_while_another_attempt_is_prepared_stays_in_it(
    config: Config, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(accept_all)
        await w.until(lambda: sum(bool(g.verdict) for g in w.dispatcher.open.values()) >= B)
        gate, ask = asyncio.Event(), broker.have_samples

        async def slowly(*args: Any) -> list[bool]:
            await gate.wait()
            return await ask(*args)

        monkeypatch.setattr(broker, "have_samples", slowly)
        redo = asyncio.create_task(w.dispatcher.redo(list(w.dispatcher.open), "forgotten"))
        await asyncio.sleep(0)
        chosen = await w.choose()
        gate.set()
        await redo
        assert await w.write(chosen) == []
        await w.dispatcher.committed(chosen)
        assert all(item.attempt == 0 for item in chosen)


async def test_a_group_that_gets_its_fate_while_another_attempt_is_prepared_keeps_it(
    config: Config, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(config, broker) as w:
        await w.until(lambda: 0 in w.dispatcher.open)
        gate = asyncio.Event()

        async def slowly(*args: Any) -> list[bool]:
            await gate.wait()
            return [False]

        monkeypatch.setattr(broker, "have_samples", slowly)
        redo = asyncio.create_task(w.dispatcher.redo([0], "silent"))
        await asyncio.sleep(0)
        await w.dispatcher._close([Line(0, 0, "stale", "no slot")])
        gate.set()
        await redo
        assert 0 not in w.dispatcher.open
        assert by_fate(w) == {"stale": [0]}


async def test_no_group_of_a_batch_that_is_being_written_is_lost_to_a_late_verdict(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(admission={"max_staleness": 0, "oversample": 2.0})
    async with world(config, broker) as w:
        for _ in range(64):  # as if hardly any group had passed: then twice as many are started
            w.dispatcher.admission.verdict(False)
        async with broker.lease("generator", "g", {}), broker.lease("generator", "h", {}):
            await w.until(lambda: len(w.dispatcher.open) == 8)
        judged = [a_judgement("correct", 3, Version(1, 0))] * 4

        def verdict(ordinal: int) -> Verdict:
            return Verdict(str(ordinal), ordinal, 0, False, "accepted", "mixed", judged, "v")

        # four that nobody waits for overtake group 0, whose prompt is still in the stream
        await say(broker, [verdict(ordinal) for ordinal in (1, 2, 3, 4)])
        await w.until(lambda: sum(bool(g.verdict) for g in w.dispatcher.open.values()) == 4)
        batch = await w.dispatcher.choose_batch()
        assert batch is not None
        await say(broker, [verdict(0)])
        await w.until(lambda: w.dispatcher.open[0].verdict is not None)
        # 4 has no slot any more, like 5, 6 and 7, which the dispatcher may have closed by now
        assert w.dispatcher.admission.lost()[0] == 4
        await asyncio.sleep(0.05)
        assert [item.ordinal for item in batch] == [1, 2, 3, 4]
        w.files.begin(1)
        w.files.write_part(1, 0, [a_stored_group(item.ordinal) for item in batch])
        w.files.commit(1)
        await w.dispatcher.committed(batch)
        assert not {1, 2, 3, 4} & set(w.ledger.fates)


async def test_the_end_closes_every_open_group_and_every_hole_and_nothing_starts_after_it(
    config: Config, connections: list[Broker]
) -> None:
    w = await World(config, connections[0]).start()
    await w.until(lambda: len(w.dispatcher.open) == 4)
    await w.crash()
    await w.forget()
    w = World(config, connections[1])
    w.ledger.record([Line(4, 0, "filtered", "all_wrong")])
    await connections[1].ensure_streams()
    await w.dispatcher.start(0, [])
    w.spawn(w.dispatcher.run())
    assert (await w.audit()).in_flight == 4
    await w.dispatcher.end()
    await asyncio.sleep(0.05)
    assert w.dispatcher.open == {}
    assert by_fate(w) == {"filtered": [4], "stale": [0, 1, 2, 3]}
    assert await prompts_on_stream(connections[1]) == []
    result = await w.audit()
    assert result.balanced
    assert result.in_flight == 0
    await w.crash()


async def test_ending_while_prompts_are_being_sent_leaves_no_group_without_a_fate(
    config: Config, broker: Broker
) -> None:
    async with world(config, broker) as w:
        w.generators().verifier(drawn(4, accept=0.1))
        for _ in range(5):
            w.dispatcher.may_dispatch = True
            await asyncio.sleep(random.Random(1).random() * 0.05)
            await w.dispatcher.end()
            await asyncio.sleep(0.02)
            assert w.dispatcher.open == {}
            assert (await w.audit()).balanced
            assert await w.on_server() == set()


# --- silence ------------------------------------------------------------------------------------


def silent_config(make_config: MakeConfig) -> Config:
    return make_config(admission={"silence_s": 0.25, "attempts": 3}, data={"heldout": "h"})


async def test_a_group_whose_generator_says_nothing_any_more_is_generated_again_with_its_samples(
    make_config: MakeConfig, broker: Broker
) -> None:
    async with world(silent_config(make_config), broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        async with broker.lease("generator", "hanging", {}):
            await broker.claim_prompts("1.0", "hanging", 10)
            await broker.put_sample("0", 0, 1, encode(a_sample(3, Version(1, 0))))
            # what a dead one reported last is no sign of life, nor is a figure that stands still
            await broker.report("dead", {"progress": {"0": 57}})
            await broker.report("hanging", {"progress": {"0": 3}})
            await w.until(lambda: w.dispatcher.open[0].attempt == 1)
        assert await broker.have_samples("0", 1, 4) == [False, True, False, False]
        assert w.dispatcher.admission.deadline(0) == 1, "the kept sample keeps its age"
        w.generators().verifier(accept_all)
        await w.train(2)
        assert 0 in w.batches[0].ordinals + w.batches[1].ordinals
        assert w.generated["0"] == 3, "only its missing samples are generated again"


async def test_a_group_that_makes_tokens_is_never_taken_for_silent(
    make_config: MakeConfig, broker: Broker
) -> None:
    async with world(silent_config(make_config), broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        await broker.claim_prompts("1.0", "g", 10)
        for tokens in range(9):
            progress = {str(ordinal): tokens for ordinal in w.dispatcher.open}
            await broker.report("g", {"progress": progress})
            await asyncio.sleep(0.08)
        assert {group.attempt for group in w.dispatcher.open.values()} == {0}


@pytest.mark.parametrize("waits_for", ["generator", "another generator", "verifier"])
async def test_a_group_that_waits_for_a_worker_is_not_silent(
    make_config: MakeConfig, broker: Broker, waits_for: str
) -> None:
    async with world(silent_config(make_config), broker) as w:
        if waits_for == "verifier":
            w.generators()
        await w.until(lambda: len(w.dispatcher.open) >= 4)
        if waits_for == "another generator":
            await broker.claim_prompts("1.0", "the only one, which died", 10)
        await asyncio.sleep(0.8)
        assert {group.attempt for group in w.dispatcher.open.values()} == {0}


# --- nothing left to learn ----------------------------------------------------------------------


def verdicts_from_now_on(w: World, fate: str) -> Judge:
    """Accepts until the first batch is trained."""
    return lambda prompt, attempt: fate if w.version else "accepted"


async def test_a_run_that_finds_no_mixed_group_any_more_ends_complete_with_the_reason(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(admission={"max_staleness": 1, "give_up_after": 30})
    async with world(config, broker) as w:
        w.generators().verifier(verdicts_from_now_on(w, "filtered"))
        await w.train(1)
        assert await w.dispatcher.nothing_left() == ""
        why = ""
        async with asyncio.timeout(10):
            while not why:
                w.check()
                await asyncio.sleep(0.01)
                why = await w.dispatcher.nothing_left()
        assert why.startswith("nothing left to learn: none of the last 3")
        assert "(100% all wrong); the problems are too hard" in why
        assert not w.dispatcher.may_dispatch
        await w.fold()
        await w.dispatcher.end()
        mark_ended(config.run_dir, w.version, why)
        result = await w.audit()
        assert result.balanced
        assert result.complete
        assert result.reasons == [f"the run ended early, after 1 batches: {why}"]


async def test_less_and_less_goes_out_while_no_group_is_mixed_and_one_that_is_ends_that(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(admission={"max_staleness": 3, "give_up_after": 40})
    async with world(config, broker) as w:
        w.dispatcher.streak.restore(["all_correct"] * 20)
        for ordinal in list(w.dispatcher.open):
            await w.dispatcher._close([Line(ordinal, 0, "filtered", "all_correct")])
        async with broker.lease("generator", "g", {}):
            await w.until(lambda: len(w.dispatcher.open) == 4)
            await broker.claim_prompts("1.0", "g", 99)
            await asyncio.sleep(0.1)
            assert len(w.dispatcher.open) == 4, "a quarter of the 16 that the bound allows"
            w.dispatcher.streak.judge("")
            await w.until(lambda: len(w.dispatcher.open) == 8)


async def test_a_restart_remembers_how_long_no_group_was_mixed(
    make_config: MakeConfig, connections: list[Broker]
) -> None:
    w = World(make_config(admission={"give_up_after": 3}), connections[0])
    fates = ["all_wrong", "trained", "all_correct", "no_answer", "all_correct"]
    for ordinal, fate in enumerate(fates):
        trained = fate == "trained"
        line = Line(ordinal, 0, "trained", "", 1) if trained else Line(ordinal, 0, "filtered", fate)
        w.ledger.record([line])
    await w.dispatcher.start(1, [])
    assert w.dispatcher.streak.groups == 3
    assert "67% all right, 33% without an answer" in await w.dispatcher.nothing_left()


async def test_what_is_accepted_already_is_trained_before_a_run_ends(
    make_config: MakeConfig, broker: Broker
) -> None:
    async with world(make_config(admission={"give_up_after": 5}), broker) as w:
        w.generators().verifier(accept_all)
        await w.until(lambda: sum(bool(g.verdict) for g in w.dispatcher.open.values()) >= B)
        w.dispatcher.streak.restore(["all_wrong"] * 5)
        assert await w.dispatcher.nothing_left() == ""
        await w.train(1)


async def test_groups_that_are_dropped_while_they_are_generated_are_counted_with_their_tokens(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(admission={"max_staleness": 1, "policy": "drop"})
    async with world(config, broker) as w:
        async with broker.lease("generator", "slow", {}):
            await w.until(lambda: len(w.dispatcher.open) == 4)
            claimed = await broker.claim_prompts("1.0", "slow", 1)
            await broker.report("slow", {"progress": {"0": 57}})
            await w.until(lambda: w.dispatcher.open[0].tokens)
            w.generators().verifier(accept_all)
            await w.train(2)
            await w.until(lambda: 0 in w.ledger.fates)
        assert len(claimed) == 1
        assert w.ledger.fates[0] == Line(0, 0, "stale", "no slot")
        assert [judged.lost for judged in w.judged].count([57]) == 1
        lawful(w, 1)


# --- evaluation ---------------------------------------------------------------------------------


async def test_an_evaluation_runs_beside_training_and_outside_the_ledger(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(data={"heldout": "h"}, eval={"samples": 2, "temperature": 0.5})
    async with world(config, broker) as w:
        seen: list[Prompt] = []

        def judge(prompt: Prompt, attempt: int) -> str:
            if prompt.evaluation:
                seen.append(prompt)
                return "crashed" if attempt == 0 and prompt.row == 3 else "filtered"
            return "accepted"

        w.generators().verifier(judge)
        evaluation = Evaluation("5", {"h": rows(6)})
        await w.dispatcher.examiner.begin(evaluation)
        await w.train(3)
        await w.until(lambda: evaluation.done)
        lawful(w, 1)
        assert {(p.samples, p.temperature) for p in seen} == {(2, 0.5)}
        assert sorted(p.row for p in seen) == [0, 1, 2, 3, 3, 4, 5]
        result = evaluation.result()
        assert (result["samples"], result["failed"], result["accuracy"]) == (12, 0, 0.5)
        assert w.dispatcher.tally.groups >= 0
        assert all(line.ordinal >= 0 for line in read_lines(w.ledger.path))
        async with asyncio.timeout(5):
            while [name for name in await w.leftovers() if ":e5" in name]:
                await asyncio.sleep(0.02)


async def test_a_problem_that_keeps_failing_ends_as_failed_and_the_evaluation_ends(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(data={"heldout": "h"}, admission={"attempts": 2})
    async with world(config, broker) as w:
        w.generators().verifier(lambda p, attempt: "crashed" if p.evaluation else "accepted")
        evaluation = Evaluation("before", {"h": rows(3)})
        await w.dispatcher.examiner.begin(evaluation)
        await w.until(lambda: evaluation.done)
        assert evaluation.result()["failed"] == 3


@pytest.mark.parametrize("how", ["silent", "forgotten"])
async def test_a_problem_that_got_lost_is_asked_again_so_that_the_evaluation_ends(
    make_config: MakeConfig, broker: Broker, how: str
) -> None:
    async with world(silent_config(make_config), broker) as w:
        w.dispatcher.may_dispatch = False
        evaluation = Evaluation("before", {"h": rows(3)})
        await w.dispatcher.examiner.begin(evaluation)
        async with asyncio.timeout(5):
            while len(await prompts_on_stream(broker)) < 3:
                await asyncio.sleep(0.01)
        if how == "silent":
            await broker.claim_prompts("1.0", "hanging", 10)
        else:
            await w.forget()
            await broker.ensure_streams()
            broker.disconnects += 1
            await w.publish()
        since = time.monotonic()
        w.generators().verifier(accept_all)
        await w.until(lambda: evaluation.done)
        assert time.monotonic() - since < 5
        assert evaluation.result()["failed"] == 0


async def test_groups_of_an_evaluation_are_forgotten_at_a_restart(
    make_config: MakeConfig, connections: list[Broker]
) -> None:
    config = make_config(data={"heldout": "h"})
    w = await World(config, connections[0]).start()
    await w.dispatcher.examiner.begin(Evaluation("before", {"h": rows(3)}))
    async with asyncio.timeout(5):
        while not [p for p in await prompts_on_stream(connections[0]) if p.evaluation]:
            await asyncio.sleep(0.01)
    w = await restarted(w, connections[1])
    assert not [name for name in await w.leftovers() if ":e" in name]
    w.generators().verifier(accept_all)
    evaluation = Evaluation("before", {"h": rows(3)})
    await w.dispatcher.examiner.begin(evaluation)
    await w.until(lambda: evaluation.done)
    await w.crash()


# --- words for the operator ---------------------------------------------------------------------


async def test_what_is_waited_for_is_said_in_words(config: Config, broker: Broker) -> None:
    async with world(config, broker) as w:
        await w.until(lambda: len(w.dispatcher.open) == 4)
        await asyncio.sleep(0.05)
        assert "starved: 0 of 4 accepted, 4 pending" in w.dispatcher.waiting_for()
        assert w.dispatcher.fate_counts()["open"] == 4
        assert (await w.dispatcher.streams.depths())[PROMPTS] == 4
