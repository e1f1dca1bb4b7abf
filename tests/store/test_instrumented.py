"""What is reported of calls, and when a store counts as healthy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvplane.store import Compare, Put, Store
from kvplane.store.errors import StoreError, StoreFullError, StoreUnavailableError
from kvplane.store.instrumented import InstrumentedStore, Outcome
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock, settle


class Stage:
    """An instrumented store over a faulty one, and what it reported."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.faulty = FaultInjectingStore(MemoryStore(self.clock))
        self.store = InstrumentedStore(self.faulty, self.note, self.clock)
        self.reports: list[tuple[str, float, Outcome]] = []

    def note(self, operation: str, seconds: float, outcome: Outcome) -> None:
        self.reports.append((operation, round(seconds, 6), outcome))


@pytest.fixture
def stage() -> Stage:
    return Stage()


async def test_every_method_is_reported_by_its_name(stage: Stage) -> None:
    async with stage.store as store:
        await store.get(b"k")
        await store.scan(b"")
        await store.transact([], [Put(b"k", b"v")])
        lease = await store.grant_lease(10)
        await store.keep_lease(lease.lease_id)
        await store.revoke_lease(lease.lease_id)
    names = ["get", "scan", "transact", "grant_lease", "keep_lease", "revoke_lease"]
    assert stage.reports == [(name, 0, Outcome.OK) for name in names]


async def test_seconds_are_those_of_the_call(stage: Stage) -> None:
    gate = stage.faulty.hold_next("get")
    call = asyncio.ensure_future(stage.store.get(b"k"))
    await gate.reached()
    await stage.clock.advance(0.25)
    gate.release()
    await call
    assert stage.reports == [("get", 0.25, Outcome.OK)]


@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        (lambda store: store.transact([Compare(b"k", 1)], []), Outcome.CONFLICT),
        (lambda store: store.keep_lease(99), Outcome.LEASE_NOT_FOUND),
        (lambda store: store.transact([], [Put(b"k", b"", 99)]), Outcome.LEASE_NOT_FOUND),
        (lambda store: store.get(b""), Outcome.INVALID),
        (lambda store: anext(store.watch(b"", from_revision=99)), Outcome.FUTURE_REVISION),
    ],
)
async def test_outcomes_of_answers(
    stage: Stage, act: Callable[[Store], Awaitable[object]], outcome: Outcome
) -> None:
    try:
        await act(stage.store)
    except StoreError:
        assert outcome is not Outcome.CONFLICT
    assert [report[2] for report in stage.reports] == [outcome]
    assert stage.store.healthy


async def test_outcomes_of_failures_and_health(stage: Stage) -> None:
    store = stage.store
    assert store.healthy
    stage.faulty.fail_next("get")
    with pytest.raises(StoreUnavailableError):
        await store.get(b"k")
    assert not store.healthy
    with pytest.raises(StoreError):
        await store.get(b"")  # says nothing about the store
    assert not store.healthy
    stage.faulty.fail_next("transact", error=StoreFullError("full"))
    with pytest.raises(StoreFullError):
        await store.transact([], [])
    assert store.healthy, "a store that refuses writes answers"
    stage.faulty.fail_next("transact", when="after")
    with pytest.raises(StoreUnavailableError):
        await store.transact([], [Put(b"k", b"v")])
    assert not store.healthy
    assert await store.get(b"k") is not None
    assert store.healthy
    outcomes = [report[2] for report in stage.reports]
    assert outcomes == ["unavailable", "invalid", "full", "unavailable", "ok"]


async def test_cancelled_and_foreign_errors_say_nothing_about_the_store(stage: Stage) -> None:
    stage.faulty.set_unavailable(True)
    with pytest.raises(StoreUnavailableError):
        await stage.store.get(b"k")
    stage.faulty.set_unavailable(False)
    gate = stage.faulty.hold_next("get")
    call = asyncio.ensure_future(stage.store.get(b"k"))
    await gate.reached()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(AttributeError):
        await stage.store.transact([], [b"no operation"])  # type: ignore[list-item] # on purpose
    assert [report[2] for report in stage.reports] == ["unavailable", "interrupted", "interrupted"]
    assert not stage.store.healthy


async def test_calls_after_close_are_reported_and_leave_health_alone(stage: Stage) -> None:
    await stage.store.aclose()
    with pytest.raises(StoreError):
        await stage.store.scan(b"")
    assert stage.reports == [("scan", 0, Outcome.CLOSED)]
    assert stage.store.healthy


async def test_watch_is_reported_at_its_end_and_tells_health(stage: Stage) -> None:
    store = stage.store
    watch = store.watch(b"")
    waiting = asyncio.ensure_future(anext(watch))
    await settle()
    stage.faulty.fail_next("get")
    with pytest.raises(StoreUnavailableError):
        await store.get(b"k")
    assert not store.healthy
    await stage.faulty._inner.transact([], [Put(b"k", b"v")])
    await waiting
    assert store.healthy, "a batch came"
    waiting = asyncio.ensure_future(anext(watch))
    await stage.clock.advance(60)
    stage.faulty.set_unavailable(True)
    with pytest.raises(StoreUnavailableError):
        await waiting
    assert not store.healthy
    assert stage.reports[1:] == [("watch", 60, Outcome.UNAVAILABLE)]
    assert [batch async for batch in watch] == []
