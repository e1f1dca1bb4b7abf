"""Circuit breakers, outlier ejection, slow start: with a clock that only moves when told."""

from __future__ import annotations

import random

import aiohttp
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvplane.router.discovery import Roles
from kvplane.router.engine import Engine
from kvplane.router.health import Circuit, Health, HealthLimits
from kvplane.router.pool import EnginePool
from tests.router.rig import rig
from tests.router.stub import Answer, Stub, front

LIMITS = HealthLimits(consecutive_failures=3, window_s=30, min_requests=10, ejection_s=5, max_ejection_s=20)


def fail(health: Health, now: float, *others: Health, times: int = 1) -> list[str]:
    return [health.failed(now, LIMITS, [others]) for _ in range(times)]


def test_failures_in_a_row_open_the_circuit_and_a_success_ends_the_row() -> None:
    health, other = Health(), Health()
    assert fail(health, 100, other, times=2) == ["", ""]
    health.succeeded(100, LIMITS)
    assert fail(health, 101, other, times=3) == ["", "", "consecutive_failures"]
    assert health.circuit(105.9) is Circuit.OPEN
    assert health.circuit(106) is Circuit.HALF_OPEN


def test_half_open_lets_one_through_at_a_time() -> None:
    health, other = Health(), Health()
    fail(health, 100, other, times=3)
    assert not health.trial_due(104.9)
    assert health.trial_due(105)
    health.taken(105, LIMITS)
    assert not health.trial_due(109.9)
    assert health.trial_due(110)  # that trial ended without a verdict
    assert health.succeeded(110, LIMITS)
    assert health.circuit(110) is Circuit.CLOSED


def test_failed_trials_wait_twice_as_long_each_time_up_to_the_limit() -> None:
    health, other, now = Health(), Health(), 100.0
    fail(health, now, other, times=3)
    waits = []
    for _ in range(4):
        start = now
        while health.circuit(now) is Circuit.OPEN:
            now += 1
        waits.append(now - start)
        assert fail(health, now, other) == ["trial_failed"]
    assert waits == [5, 10, 20, 20]


def test_an_engine_is_ejected_by_its_share_of_errors_against_the_others() -> None:
    health, other = Health(), Health()
    for _ in range(10):
        other.succeeded(100, LIMITS)
        health.succeeded(100, LIMITS)
    reasons = []
    for _ in range(8):
        reasons += fail(health, 101, other)
        health.succeeded(101, LIMITS)
    assert [reason for reason in reasons if reason] == ["error_share"]


def test_errors_that_all_have_eject_nobody() -> None:
    healths = [Health() for _ in range(4)]
    for _ in range(30):
        for health in healths:
            health.succeeded(100, LIMITS)
            assert fail(health, 100, *(h for h in healths if h is not health)) == [""]


def test_old_errors_are_forgotten() -> None:
    health = Health()
    fail(health, 100, times=2)
    health.succeeded(100, LIMITS)
    assert health.share(129, LIMITS) == (2, 3)
    assert health.share(159, LIMITS)[1] <= 3
    assert health.share(230, LIMITS) == (0, 0)


@pytest.mark.parametrize(("engines", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_at_most_half_of_a_pool_is_ejected(engines: int, most: int) -> None:
    healths = [Health() for _ in range(engines)]
    for health in healths:
        fail(health, 100, *(h for h in healths if h is not health), times=5)
    assert sum(h.circuit(101) is Circuit.OPEN for h in healths) == most


def test_an_engine_of_two_kinds_is_needed_by_both() -> None:
    health, other = Health(), Health()
    for _ in range(5):
        assert health.failed(100, LIMITS, [[other], []]) == ""


def test_slow_start_grows_from_a_tenth() -> None:
    health = Health()
    assert health.weight(0, LIMITS) == 1
    health.came_back(100)
    assert [health.weight(100 + age, LIMITS) for age in (0, 0.5, 5, 10)] == [0.1, 0.1, 0.5, 1]


@pytest.mark.parametrize(
    "wrong", [{"ejection_s": 0}, {"ejection_s": 90}, {"share_margin": 0}, {"consecutive_failures": -1}]
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|out of range"):
        HealthLimits(**wrong)  # type: ignore[arg-type]  # the test varies the field


class PoolMachine(RuleBasedStateMachine):
    """Engines answer, fail, go down and come up in any order; somebody can always be asked."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.urls: list[str] = []
        self.pool: EnginePool

    @initialize(count=st.integers(1, 5), both=st.booleans())
    def start(self, count: int, both: bool) -> None:
        self.urls = [f"http://e{index}:1" for index in range(count)]
        self.pool = EnginePool(
            None,  # type: ignore[arg-type]  # nothing is probed here
            prefill_urls=self.urls if both else (),
            decode_urls=self.urls,
            probe_interval_s=1,
            monotonic=lambda: self.now,
            health=LIMITS,
            chance=random.Random(1),
        )

    def engine(self, index: int) -> Engine:
        return self.pool.engines[index % len(self.urls)]

    @rule(index=st.integers(0, 4), times=st.integers(1, 6))
    def fails(self, index: int, times: int) -> None:
        for _ in range(times):
            self.pool.erred(self.engine(index), "broke")

    @rule(index=st.integers(0, 4))
    def answers(self, index: int) -> None:
        engine = self.engine(index)
        half_open = engine.health.circuit(self.now) is Circuit.HALF_OPEN
        self.pool.answered(engine)
        if half_open:
            assert not self.pool.ejected(engine)

    @rule(index=st.integers(0, 4))
    def goes_down(self, index: int) -> None:
        self.pool.failed(self.engine(index), "refused")

    @rule(index=st.integers(0, 4))
    def comes_up(self, index: int) -> None:
        engine = self.engine(index)
        engine.up = True
        engine.health.came_back(self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 30.0, 200.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(taken=st.integers(1, 4))
    def is_chosen(self, taken: int) -> None:
        trials = 0
        for _ in range(taken):
            engine = self.pool.choose(self.pool.engines)
            assert engine is not None
            if any(e.up for e in self.pool.engines):
                assert engine.up
            closed = [e for e in self.pool.engines if e.up and not self.pool.ejected(e)]
            if closed and engine not in closed:
                trials += 1
                assert engine.health.circuit(self.now) is Circuit.HALF_OPEN
        assert trials <= len(self.urls)  # one trial each at one reading of the clock

    @invariant()
    def weights_are_shares(self) -> None:
        for engine in self.pool.engines if self.urls else ():
            assert 0.1 <= engine.health.weight(self.now, LIMITS) <= 1

    @invariant()
    def an_only_engine_is_never_ejected(self) -> None:
        if len(self.urls) == 1:
            assert not self.pool.ejected(self.pool.engines[0])


PoolMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


async def test_an_engine_that_is_found_later_begins_slowly() -> None:
    async with aiohttp.ClientSession() as session:
        pool = EnginePool(
            session, prefill_urls=(), decode_urls=(), probe_interval_s=1, monotonic=lambda: 50.0
        )
        roles = Roles(prefill=False, decode=True)
        pool.found("dns", {"http://127.0.0.1:9": roles})
        await pool.probe_all()
        pool.found("dns", {"http://127.0.0.1:9": roles, "http://b": roles})
        old, new = pool.engines
        old.up, old.outstanding = True, 5
        assert new.health.weight(50, LIMITS) == 0.1
        assert pool.choose(pool.engines) is old
        old.outstanding = 20
        assert pool.choose(pool.engines) is new


async def test_the_only_engine_of_a_model_is_not_ejected_whatever_others_there_are() -> None:
    async with aiohttp.ClientSession() as session:
        pool = EnginePool(
            session,
            prefill_urls=(),
            decode_urls=tuple(f"http://e{index}:1" for index in range(4)),
            probe_interval_s=1,
            monotonic=lambda: 0.0,
        )
        only, *others = pool.engines
        only.models = frozenset({"a"})
        for engine in others:
            engine.models = frozenset({"b"})
        for engine in (only, others[0]):
            for _ in range(10):
                pool.erred(engine, "broke")
        assert not pool.ejected(only)
        assert pool.ejected(others[0])


# With engines


def later(pool: EnginePool, seconds: float) -> None:
    """Put a pool's clock on."""
    now = pool._monotonic
    pool._monotonic = lambda: now() + seconds


async def test_an_engine_that_fails_every_request_is_left_out_and_tried_again() -> None:
    limits = HealthLimits(consecutive_failures=2, ejection_s=60, slow_start_s=0)
    async with rig(decode=2, health=limits) as r:
        sick, well = r.decode
        sick.faults += ["500"] * 3
        index = 0
        while not any(r.router.pool.ejected(e) for e in r.router.pool.engines):
            await r.say("hello", f"c{index}")  # no client sees any of it
            index += 1
            assert index < 10
        seen = len(sick.requests)
        for more in range(4):
            await r.say("hello", f"more{more}")
        assert len(sick.requests) == seen
        async with r.http.get(r.url + "/ready") as response:
            assert any("fails requests" in line for line in (await response.json())["problems"])
        assert (await r.metric("kvplane_router_engines_ejected"))['{role="decode"}'] == 1
        sick.faults.clear()
        engine = next(e for e in r.router.pool.engines if e.url == sick.url)
        later(r.router.pool, 60)
        await r.say("hello", "trial")
        assert len(sick.requests) == seen + 1
        assert not r.router.pool.ejected(engine)
        assert well.requests


async def test_an_ejected_holder_gets_no_direct_turns() -> None:
    limits = HealthLimits(consecutive_failures=1, ejection_s=60)
    async with rig(decode=2, health=limits) as r:
        await r.say("hello " * 100)
        holder = next(e for e in r.decode if e.requests)
        r.router.pool.erred(next(e for e in r.router.pool.engines if e.url == holder.url), "broke")
        assert (await r.say("next")).path == "pull"
        assert len(holder.requests) == 1


async def test_among_reported_queues_the_better_of_two_is_taken() -> None:
    async with aiohttp.ClientSession() as session:
        urls = tuple(f"http://e{index}:1" for index in range(8))
        pool = EnginePool(
            session,
            prefill_urls=(),
            decode_urls=urls,
            probe_interval_s=1,
            monotonic=lambda: 0.0,
            chance=random.Random(5),
        )
        for index, engine in enumerate(pool.engines):
            engine.waiting = 10 * index
        taken = [pool.choose(pool.engines) for _ in range(300)]
        counts = [taken.count(engine) for engine in pool.engines]
        assert counts[0] < 120  # the idlest does not get them all
        assert counts[-1] == 0  # the busiest none
        assert sum(counts[:4]) > 200


@pytest.mark.parametrize(("status", "back"), [(400, True), (422, True), (401, False), (404, False)])
async def test_a_clients_mistake_does_not_use_up_a_trial(status: int, back: bool) -> None:
    sick, well = Stub(Answer({}, 500)), Stub(Answer())
    limits = HealthLimits(consecutive_failures=1, ejection_s=60, slow_start_s=0)
    async with front(sick, well, health=limits) as f:
        engine = next(e for e in f.router.pool.engines if e.url == sick.url)
        while not f.router.pool.ejected(engine):
            assert (await f.post()).status == 200
        sick.answer = Answer({"error": {"message": "no"}}, status)
        later(f.router.pool, 60)
        assert (await f.post()).status == status
        assert f.router.pool.ejected(engine) is not back
        # Without a verdict the next request is a trial as well.
        sick.answer = Answer()
        assert (await f.post()).status == 200
        assert not f.router.pool.ejected(engine)
