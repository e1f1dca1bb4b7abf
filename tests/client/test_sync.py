from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvplane.client import events as ev
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import (
    Announcement,
    ConversationKey,
    EngineId,
    EngineLoad,
    EngineRole,
    EngineSpec,
    Fingerprint,
    Registration,
    RequestId,
)
from kvplane.client.slot import Slot
from kvplane.client.sync import EngineSessionThread
from tests.fakes.attach import AttachPlane, until

SPEC = EngineSpec(EngineId("d0"), EngineRole.DECODE)


def announcement(name: str) -> Announcement:
    key = ConversationKey("t", "m", name)
    return Announcement(key, RequestId(name), 1, 64, 2, b"{}", Fingerprint(64, b"12345678"), 0.0)


async def closed(session: EngineSessionThread) -> None:
    await asyncio.to_thread(session.close)


async def test_nothing_runs_before_start() -> None:
    before = threading.active_count()
    session = EngineSessionThread("127.0.0.1:1", SPEC)
    session.announce(announcement("a"), expires_at=time.monotonic() + 480)
    assert threading.active_count() == before
    assert session.withdraw(RequestId("a")) is False
    assert session.registration is None
    assert session.last_contact is None
    assert not session.attached
    session.close()
    session.start()  # closed for good
    assert threading.active_count() == before


async def test_speaks_from_its_own_thread_and_hands_events_over() -> None:
    async with AttachPlane() as plane:
        session = EngineSessionThread(plane.address, SPEC)
        session.announce(announcement("a"), expires_at=time.monotonic() + 480)
        session.set_load(EngineLoad(1))
        session.start()
        session.start()
        events: list[ev.Event] = []

        def drained() -> list[ev.Event]:
            events.extend(session.drain_events())
            return events

        await until(lambda: any(isinstance(event, ev.Announced) for event in drained()))
        assert isinstance(events[0], ev.Registered)
        assert session.attached
        assert session.registration == Registration(1, 10.0, 480.0, 30.0)
        assert session.withdraw(RequestId("a")) is True
        await until(lambda: any(isinstance(event, ev.Withdrawn) for event in drained()))
        session.freed(RequestId("a"))
        await until(lambda: plane.freed()["a"] == 1)
        assert session.drain_events() == []
        session.start_incarnation()
        await until(lambda: session.registration == Registration(2, 10.0, 480.0, 30.0))
        await closed(session)
        assert plane.deregistered == [2]
        assert not [thread for thread in threading.enumerate() if thread.name == "kvplane-session"]
        session.announce(announcement("b"), expires_at=time.monotonic() + 480)  # after the end: harmless


async def test_a_new_incarnation_announces_nothing_of_the_old_one() -> None:
    async with AttachPlane() as plane:
        session = EngineSessionThread(plane.address, SPEC)
        session.announce(announcement("old"), expires_at=time.monotonic() + 480)
        session.start()

        def announced(name: str) -> int:
            return [announced.request_id for announced in plane.announced()].count(name)

        await until(lambda: announced("old") == 1)
        session.start_incarnation()
        session.announce(announcement("new"), expires_at=time.monotonic() + 480)
        await until(lambda: session.registration == Registration(2, 10.0, 480.0, 30.0))
        await until(lambda: announced("new") >= 1)
        assert announced("old") == 1
        await closed(session)


async def test_calls_return_at_once_with_nobody_listening() -> None:
    session = EngineSessionThread("127.0.0.1:1", SPEC)
    session.start()
    began = time.monotonic()
    for number in range(3000):
        session.announce(announcement(str(number)), expires_at=time.monotonic() + 480)
    assert time.monotonic() - began < 2
    dropped = [event for event in session.drain_events() if isinstance(event, ev.Dropped)]
    assert len(dropped) == session.dropped == 3000 - 1024
    assert dropped[0] == ev.Dropped(RequestId("0"), "queue_full")
    await closed(session)


async def test_announcing_from_many_threads_loses_nothing() -> None:
    async with AttachPlane() as plane:
        session = EngineSessionThread(plane.address, SPEC)
        session.start()

        def announce(base: int) -> None:
            for number in range(100):
                session.announce(announcement(f"{base}-{number}"), expires_at=time.monotonic() + 480)

        await asyncio.gather(*(asyncio.to_thread(announce, base) for base in range(4)))
        await until(lambda: len({a.request_id for a in plane.announced()}) == 400)
        await closed(session)


async def test_work_runs_on_the_sessions_thread_with_the_client() -> None:
    async with AttachPlane() as plane:
        session = EngineSessionThread(plane.address, SPEC)
        slot, ended = Slot[str](), threading.Event()

        async def work(client: ControlPlaneClient) -> None:
            await client.wait_connected()
            slot.put(threading.current_thread().name)

        async def endless(client: ControlPlaneClient) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        assert not session.submit(work), "before the start"
        session.start()
        await until(lambda: session.submit(work))
        await until(slot.take)
        assert slot.take() == "kvplane-session"
        assert session.submit(endless)
        await closed(session)
        assert ended.is_set()
        assert not session.submit(work), "after the end"


async def test_no_more_work_than_there_is_room_for() -> None:
    session = EngineSessionThread("127.0.0.1:1", SPEC)

    async def endless(client: ControlPlaneClient) -> None:
        await asyncio.Event().wait()

    session.start()
    await until(lambda: session.submit(endless))
    await until(lambda: not session.submit(endless))
    await closed(session)


@pytest.mark.parametrize("times", [1, 2])
async def test_close_is_idempotent(times: int) -> None:
    session = EngineSessionThread("127.0.0.1:1", SPEC)
    session.start()
    for _ in range(times):
        await closed(session)
