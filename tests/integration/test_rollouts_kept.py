"""Rollouts of groups that no batch gets, on a real server: read before it forgets them."""

from __future__ import annotations

from collections import Counter

from common.broker import Broker
from common.rollout_log import read_rollouts
from tests.conftest import MakeConfig
from tests.integration.pretend import drawn, world


async def test_filtered_and_failed_groups_are_kept_with_their_texts_so_many_for_each_batch(
    make_config: MakeConfig, broker: Broker
) -> None:
    config = make_config(admission={"attempts": 1}, rollouts={"per_batch": 2})
    async with world(config, broker) as w:
        w.generators(2).verifier(drawn(3, accept=0.2, fail=0.3))
        await w.train(3)
        await w.fold()
        await w.dispatcher.end()
        w.dispatcher.rollouts.close()
        assert (await w.audit()).balanced
        assert await w.leftovers() == []
    kept = list(read_rollouts(config.run_dir))
    assert {group["fate"] for group in kept} == {"filtered", "failed"}
    assert max(Counter((group["version"], group["fate"]) for group in kept).values()) == 2
    for group in kept:
        assert group["prompt"] and group["gold"] == "4" and group["reason"]
        assert [sample["text"] for sample in group["samples"]] == ["4"] * 4
        judged = [sample["outcome"] is not None for sample in group["samples"]]
        assert all(judged) == (group["fate"] == "filtered")
