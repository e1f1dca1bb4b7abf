"""A fleet in simulated time: the same by seed, right under failures, each turn ended once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from kvplane.bench.fleet import history
from kvplane.bench.fleet.blocks import BlockPool
from kvplane.bench.fleet.decode import Keeping
from kvplane.bench.fleet.fleet import Plan
from kvplane.bench.fleet.oracle import Oracle
from kvplane.bench.fleet.outcome import FOLLOW_UPS, Outcome
from kvplane.bench.fleet.run import run
from kvplane.bench.fleet.scenario import Happening
from kvplane.bench.fleet.workload import Step, Workload, templates
from kvplane.bench.leases.trace import Turn
from kvplane.connector.fingerprint import Context, make_chain, matching_tokens
from kvplane.controlplane.quotas import Limits, TenantLimits
from kvplane.router.policy import PathMode

SMALL = Plan(prefill=2, decode=3, workload=Workload(conversations=50, hours=0.05, pause=0.3))
BUSY = replace(SMALL, workload=replace(SMALL.workload, conversations=100))


@cache
def busy() -> Outcome:
    """Busy engines to which nothing happens: what others are compared with."""
    return run(BUSY)


def figures(outcome: Outcome) -> dict[str, Any]:
    """All but what the machine has to do with."""
    document = outcome.document()
    del document["cpu_s"], document["peak_rss_bytes"]
    load = document["load"]
    del load["cores"], load["most_record_bytes"]
    load["operations"] = {name: count for name, (count, _, _) in load["operations"].items()}
    for sample in document["samples"]:
        del sample["record_bytes"]
    return document


def check(outcome: Outcome, conversations: int) -> None:
    """What holds whatever happens."""
    assert outcome.wrong == {"double_claims": 0, "stale_reads": 0, "freed_under_reader": 0}, outcome.examples
    turns, requests = outcome.turns, outcome.requests
    assert turns["begun"] == turns["answered"] + turns["given up"]
    assert turns["answered"] == requests["answered"]
    assert turns["answered"] == sum(line.turns for line in outcome.lines if line.name != FOLLOW_UPS)
    assert outcome.line("first").turns + turns["given up"] >= conversations
    for line in outcome.lines:
        assert line.reused_tokens + line.local_tokens <= line.prompt_tokens
        assert sorted(line.ttft_s) == list(line.ttft_s)


def test_the_same_seed_is_the_same_run_and_another_is_another() -> None:
    first, again = run(SMALL), run(SMALL)
    assert figures(first) == figures(again)
    other = run(replace(SMALL, workload=replace(SMALL.workload, seed=1)))
    assert figures(other)["lines"] != figures(first)["lines"]
    check(first, 50)
    assert first.hit_rate > 0.9
    assert first.line("direct").hits > 50
    assert first.turns["given up"] == first.requests["refused"] == first.requests["broken"] == 0


def test_without_a_control_plane_nothing_hits_and_first_tokens_take_longer() -> None:
    outcome = run(SMALL, compared=True)
    assert outcome.cold_only is not None
    cold = {line.name: line for line in outcome.cold_only}
    assert cold[FOLLOW_UPS].hits == cold["direct"].turns == cold["pull"].turns == 0
    assert cold[FOLLOW_UPS].turns == outcome.line(FOLLOW_UPS).turns
    assert cold[FOLLOW_UPS].ttft_s[0] > 1.5 * outcome.line(FOLLOW_UPS).ttft_s[0]


def test_engines_that_die_restart_come_and_go() -> None:
    events = (
        Happening(40.0, "kill", "decode", 2, down=20.0),
        Happening(50.0, "kill", "prefill", 1, down=10.0),
        Happening(70.0, "scale-up", "decode", 2),
        Happening(90.0, "rolling-restart", "decode", 0, down=5.0, every=8.0, drain=20.0),
        Happening(150.0, "scale-down", "decode", 2, drain=20.0),
    )
    outcome = run(replace(BUSY, events=events))
    check(outcome, 100)
    assert outcome.requests["broken"] > 0  # what ran on those that were killed
    assert outcome.requests["refused"] == 0
    assert outcome.turns["given up"] == 0
    engines = [sample.decode_engines for sample in outcome.samples]
    assert min(engines) == 1
    assert max(engines) >= 4
    assert engines[-1] == 3
    assert 0.3 < outcome.hit_rate < busy().hit_rate


def test_a_control_plane_in_memory_is_lost_and_heals() -> None:
    outcome = run(replace(BUSY, events=(Happening(60.0, "stop-plane", down=30.0),)))
    check(outcome, 100)
    assert any(reason.endswith("plane_unavailable") for reason in outcome.reasons)
    assert outcome.requests["broken"] == outcome.turns["given up"] == 0
    after = [sample for sample in outcome.samples if sample.at_s > 120.0]
    assert sum(sample.hits for sample in after) > 0.8 * sum(sample.follow_ups for sample in after) > 0


def test_replicas_share_a_store_and_one_may_go() -> None:
    events = (Happening(60.0, "stop-plane", replica=1, down=30.0),)
    outcome = run(replace(SMALL, replicas=3, events=events))
    check(outcome, 50)
    assert outcome.requests["refused"] == outcome.requests["broken"] == outcome.turns["given up"] == 0
    assert outcome.hit_rate > 0.9
    assert outcome.load is not None
    assert outcome.load.writes["pulses"] > 0


def test_claims_under_forced_pulls_are_single() -> None:
    outcome = run(replace(SMALL, path=PathMode.PULL, events=(Happening(60.0, "kill", "decode", down=10.0),)))
    check(outcome, 50)
    assert outcome.claims["granted"] > 50
    assert outcome.line("direct").turns == 0


def test_what_is_kept_is_bounded_by_leases_room_and_quotas() -> None:
    free = busy()
    short = run(replace(BUSY, keeping=Keeping(ttl_s=5.0)))
    assert short.retained_share[0] < 0.5 * free.retained_share[0]
    assert short.hit_rate < free.hit_rate
    little = run(replace(BUSY, decode_blocks=1024, keeping=Keeping(retain_fraction=0.2)))
    check(little, 100)
    assert 0.0 < little.retained_share[1] <= 0.3
    limits = TenantLimits(default=Limits(conversations=2))
    limited = run(replace(BUSY, limits=limits))
    check(limited, 100)
    assert limited.retained_conversations < 0.7 * free.retained_conversations


def test_the_report_has_what_it_is_for() -> None:
    document = run(SMALL).document()
    load = document["load"]
    assert set(load["operations"]) >= {"begin_turn", "claim", "announce", "heartbeat", "load", "freed"}
    assert set(load["writes"]) >= {"turns", "locations", "holders", "loads", "orders", "claims", "engines"}
    assert load["peak_transactions_per_s"] > 0
    assert load["peak_written_bytes_per_s"] > load["peak_transactions_per_s"]
    assert load["most_records"] > 50
    assert load["most_record_bytes"] > 100 * load["most_records"]
    assert len(document["samples"]) > 100


# The parts that the oracle stands on.


def test_histories_have_equal_tokens_exactly_as_far_as_they_are_the_same() -> None:
    random, context = Random(5), Context("m")
    for number in range(40):
        mine = history.History(1, random.randrange(1, 3000), 100 + number)
        mine.tokens += random.randrange(1, 4000)
        before, held = mine.stretches, mine.tokens
        place = random.randrange(1, held)
        mine.change(place, 1000 + number)
        same = history.common(before, mine.stretches)
        assert same == place
        assert list(history.tokens_of(before, held))[:same] == list(history.tokens_of(mine.stretches, same))
        chain = make_chain(context, history.tokens_of(before, held), 64)
        found = matching_tokens(chain, held, 64, context, history.tokens_of(mine.stretches, held))
        assert found == same // 64 * 64
        old, new = history.contents(before, held, 16), history.contents(mine.stretches, held, 16)
        assert len(old) == len(new) == -(-held // 16)
        assert [a == b for a, b in zip(old, new, strict=True)] == [
            block < same // 16 for block in range(len(old))
        ]


def test_blocks_are_found_until_they_are_given_out_again() -> None:
    pool = BlockPool(8)
    blocks = pool.take([], 4)
    pool.fill(blocks, [11, 12, 13, 14], 0, 3)
    assert pool.find([11, 12, 13, 14]) == blocks[:3]  # the last one is not full
    pool.give_back(blocks)
    assert (pool.free, pool.find([11, 12])) == (8, blocks[:2])
    again = pool.take(pool.find([11, 12]), 5)
    assert again[:2] == blocks[:2]
    assert pool.free == 3
    pool.fill(again, [11, 12, 21, 22, 23], 2, 5)
    pool.give_back(pool.take([], 3))
    assert pool.holds(again, [11, 12, 21, 22, 23])
    assert pool.missing(pool.find([11]), 3) == 2
    pool.give_back(again)
    assert not pool.holds(again, [11, 12, 21, 22, 23])  # nobody uses them
    assert pool.free == 8


def test_blocks_are_never_given_to_two() -> None:
    random, pool = Random(2), BlockPool(60)
    held = list[list[int]]()
    for step in range(3000):
        wanted = random.randrange(1, 12)
        found = pool.find([step % 7 * 100 + place for place in range(min(wanted, 4))])
        if pool.missing(found, wanted) <= pool.free and random.random() < 0.6:
            blocks = pool.take(found, wanted)
            others = {block for other in held for block in other}
            assert not others & set(blocks[len(found) :])
            pool.fill(blocks, [step % 7 * 100 + place for place in range(4)][:wanted], len(found), 4)
            held.append(blocks)
        elif held:
            pool.give_back(held.pop(random.randrange(len(held))))
        assert pool.free == 60 - len({block for other in held for block in other})


def test_the_oracle_sees_what_is_wrong() -> None:
    oracle, pool = Oracle(), BlockPool(8)
    blocks = pool.take([], 2)
    pool.fill(blocks, [11, 12], 0, 2)
    holder = ("d0", 1, "r")
    oracle.claimed(holder)
    oracle.read(holder, True, pool, blocks, [11, 12])
    assert oracle.wrong == 0
    oracle.claimed(holder)
    oracle.read(holder, True, pool, blocks, [11, 13])
    oracle.read(holder, False, pool, blocks, [11, 12])
    assert (oracle.counts["double_claims"], oracle.counts["stale_reads"]) == (1, 1)
    assert oracle.counts["freed_under_reader"] == 1
    assert oracle.wrong == len(oracle.examples) == 3


def test_conversations_are_drawn_from_a_trace() -> None:
    def turn(number: int, at_s: float, tokens: int, previous: int | None = None) -> Turn:
        return Turn(number, at_s, tokens, 100, 1, previous)

    made: Sequence[tuple[Step, ...]] = templates(
        [turn(0, 0.0, 1000), turn(1, 5.0, 300), turn(2, 33.0, 1500, 0)], 30.0
    )
    assert sorted(len(steps) for steps in made) == [1, 2]
    longer = next(steps for steps in made if len(steps) == 2)
    assert longer[1] == Step(400, 100, 30.0)
    outcome = run(replace(SMALL, steps=tuple(made), workload=replace(SMALL.workload, conversations=20)))
    check(outcome, 20)
    assert outcome.line(FOLLOW_UPS).turns > 0


@pytest.mark.parametrize("bursty", [False, True])
def test_a_workload_is_as_it_was_asked_for(bursty: bool) -> None:
    workload = Workload(conversations=2000, hours=1.0, turns=4.0, bursty=bursty)
    conversations = list(workload.all())
    assert len(conversations) == 2000
    mean = sum(len(conversation.steps) for conversation in conversations) / 2000
    assert 3.5 < mean < 4.5
    assert 3000 < conversations[-1].arrival_s < 4200
    within = sum(c.arrival_s % 300 < 60 for c in conversations) / 2000
    assert (within > 0.35) is bursty
    assert {c.kind for c in conversations} == {"agent", "chat"}
    assert conversations == list(workload.all())
