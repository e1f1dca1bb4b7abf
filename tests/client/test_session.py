from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import pytest
import structlog

from kvplane.client import events as ev
from kvplane.client.address import checked_address, grpc_target
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import (
    Announcement,
    AnnounceOutcome,
    ConversationKey,
    EngineId,
    EngineLoad,
    EngineRole,
    EngineSpec,
    Fingerprint,
    ReleaseOutcome,
    ReleaseReason,
    RequestId,
)
from kvplane.client.outbox import Outbox
from kvplane.client.session import FIRST_RETRY_S, LAST_RETRY_S, EngineSession
from kvplane.v1 import common_pb2
from tests.fakes.attach import AttachPlane, until

E = TypeVar("E", bound=ev.Event)
SPEC = EngineSpec(EngineId("d0"), EngineRole.DECODE)


def announcement(name: str) -> Announcement:
    key = ConversationKey("t", "m", name)
    return Announcement(key, RequestId(name), 1, 64, 2, b"{}", Fingerprint(64, b"12345678"), 0.0)


class Rig:
    """A session under test, its owner, and its control plane. Time stands still unless moved."""

    def __init__(self, plane: AttachPlane) -> None:
        self.plane = plane
        self.now = 1000.0
        self.delays: list[float] = []
        self.events: list[ev.Event] = []
        self.outbox = Outbox(monotonic=self.monotonic)
        self.session = self.new_session()
        self.task: asyncio.Task[None] | None = None

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        await asyncio.sleep(0.005)

    def new_session(self) -> EngineSession:
        return EngineSession(
            ControlPlaneClient(self.plane.address, timeout_s=5),
            SPEC,
            self.outbox,
            self.events.append,
            monotonic=self.monotonic,
            sleep=self.sleep,
            address=self.plane.address,
        )

    def start(self) -> None:
        self.task = asyncio.create_task(self.session.run())

    async def attached(self) -> None:
        self.start()
        await until(lambda: self.session.attached)

    def announce(self, *names: str) -> None:
        for name in names:
            self.outbox.announce(announcement(name), expires_at=self.now + 480)
        self.session.wake()

    async def announced(self, *names: str) -> None:
        self.announce(*names)
        wanted = set(names)
        await until(lambda: wanted <= {event.result.request_id for event in self.of(ev.Announced)})

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def close(self) -> None:
        await self.session.aclose()
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AttachPlane() as plane:
        rig = Rig(plane)
        yield rig
        await rig.close()


async def test_registers_says_hello_and_is_attached(rig: Rig) -> None:
    await rig.attached()
    (registration,) = rig.plane.registrations
    assert registration.spec.engine_id == "d0"
    assert registration.request_id
    assert rig.plane.heard[0].hello.engine_epoch == 1
    assert rig.plane.heard[0].sequence == 1
    (event,) = rig.of(ev.Registered)
    assert isinstance(event, ev.Registered)
    assert event.first
    assert event.registration.claim_timeout_s == 30
    assert rig.session.last_contact == rig.now


async def test_announces_and_delivers_the_answer(rig: Rig) -> None:
    rig.plane.announce_outcome["b"] = common_pb2.ANNOUNCE_OUTCOME_SUPERSEDED
    await rig.attached()
    await rig.announced("a", "b")
    outcomes = {e.result.request_id: e.result.outcome for e in rig.events if isinstance(e, ev.Announced)}
    assert outcomes == {"a": AnnounceOutcome.ACCEPTED, "b": AnnounceOutcome.SUPERSEDED}
    assert [a.request_id for a in rig.plane.announced()] == ["a", "b"]


async def test_announcements_made_before_the_first_contact_are_sent(rig: Rig) -> None:
    rig.announce("a")
    await rig.attached()
    await until(lambda: rig.of(ev.Announced))
    assert not rig.plane.announced()[0].reannounced


async def test_withdrawals_are_answered(rig: Rig) -> None:
    rig.plane.withdraw_outcome["b"] = common_pb2.RELEASE_OUTCOME_CLAIMED
    await rig.attached()
    await rig.announced("a", "b")
    for name in "ab":
        rig.outbox.withdraw(RequestId(name))
    rig.session.wake()
    await until(lambda: len(rig.of(ev.Withdrawn)) == 2)
    assert rig.of(ev.Withdrawn) == [
        ev.Withdrawn(RequestId("a"), ReleaseOutcome.RELEASED),
        ev.Withdrawn(RequestId("b"), ReleaseOutcome.CLAIMED),
    ]


async def test_orders_arrive_once_and_are_answered_when_freed(rig: Rig) -> None:
    await rig.attached()
    await rig.announced("a")
    for _ in range(3):
        rig.plane.order("a")
    await until(lambda: rig.of(ev.Ordered))
    rig.outbox.freed(RequestId("a"))
    rig.session.wake()
    await until(lambda: rig.plane.freed()["a"])
    assert rig.of(ev.Ordered) == [ev.Ordered(RequestId("a"), ReleaseReason.SUPERSEDED)]
    said = rig.plane.freed()["a"]
    rig.plane.order("a")  # the plane had not heard of it yet
    await until(lambda: rig.plane.freed()["a"] > said)
    assert len(rig.of(ev.Ordered)) == 1


async def test_a_lost_stream_comes_back_with_the_same_epoch_and_says_all_again(rig: Rig) -> None:
    await rig.attached()
    await rig.announced("a", "b")
    rig.outbox.withdraw(RequestId("b"))
    rig.plane.acknowledging.clear()
    rig.session.wake()
    await until(lambda: rig.plane.withdrawn() == ["b"])
    rig.plane.heard.clear()
    rig.now += 100
    rig.plane.cut()
    await until(lambda: rig.plane.streams == 2)
    rig.plane.acknowledging.set()
    await until(lambda: rig.session.attached)
    await until(lambda: rig.of(ev.Withdrawn))
    assert rig.plane.heard[0].hello.engine_epoch == 1
    again = {a.request_id: a for a in rig.plane.announced()}
    assert set(again) == {"a"}
    assert again["a"].reannounced
    assert again["a"].ttl.seconds == 375
    assert "b" in rig.plane.withdrawn()
    assert len(rig.plane.registrations) == 1


async def test_an_unknown_engine_registers_again(rig: Rig) -> None:
    await rig.attached()
    await rig.announced("a")
    rig.plane.refuse = grpc.StatusCode.NOT_FOUND, "UNKNOWN_ENGINE"
    rig.plane.cut()
    await until(lambda: len(rig.plane.epochs) >= 2)
    rig.plane.refuse = None
    await until(lambda: rig.session.attached and len(rig.of(ev.Registered)) >= 2)
    assert [event.first for event in rig.events if isinstance(event, ev.Registered)][:2] == [True, False]
    assert rig.plane.heard[-1].hello.engine_epoch == rig.plane.epochs[-1]
    assert rig.plane.announced()[-1].reannounced
    keys = [registration.request_id for registration in rig.plane.registrations]
    assert len(set(keys)) == len(keys)  # each incarnation has its own
    names, numbers = zip(*(key.split("#") for key in keys), strict=True)
    assert len(set(names)) == 1
    assert list(numbers) == [str(number + 1) for number in range(len(keys))]  # so a late one is known as such


async def test_a_stale_epoch_ends_the_session_for_good(rig: Rig) -> None:
    await rig.attached()
    rig.plane.refuse = grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH"
    rig.plane.cut()
    assert rig.task is not None
    async with asyncio.timeout(10):
        await rig.task
    assert rig.session.fenced
    assert rig.of(ev.Fenced) == [ev.Fenced()]
    await rig.session.aclose()
    assert rig.plane.deregistered == []  # it is the other one's now


async def test_an_absent_plane_is_tried_again_soon_and_logged_once() -> None:
    plane = AttachPlane()
    await plane.start()
    rig = Rig(plane)  # first: gRPC must not lose its last object in a loop, or it waits for its thread
    await plane.stop()
    with structlog.testing.capture_logs() as logs:
        rig.start()
        await until(lambda: len(rig.delays) >= 6)
        assert not rig.session.attached
        assert rig.session.last_contact is None
        await plane.start()
        await until(lambda: rig.session.attached)
    assert rig.delays[0] < 1
    assert all(0 < delay <= LAST_RETRY_S for delay in rig.delays)
    assert len(set(rig.delays)) > 1  # jittered
    assert [entry["event"] for entry in logs] == [
        "control_plane_unreachable",
        "engine_registered",
        "control_plane_attached",
    ]
    assert logs[0]["kvplane_address"] == plane.address
    await rig.close()
    await plane.stop()


async def test_a_pause_ends_once_there_is_a_connection(rig: Rig) -> None:
    """gRPC waits between its attempts already; a pause on top would keep an engine away for twice as long."""
    await rig.attached()
    pausing, ended = asyncio.Event(), asyncio.Event()

    async def endless(seconds: float) -> None:
        await rig.sleep(seconds)
        if len(rig.delays) >= 3:
            pausing.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    rig.session._sleep = endless
    await rig.plane.stop()
    await pausing.wait()
    await rig.plane.start()
    await until(lambda: rig.session.attached)
    assert ended.is_set()


async def test_after_an_outage_an_engine_that_is_unknown_registers_soon_but_not_in_haste(rig: Rig) -> None:
    await rig.attached()
    await rig.plane.stop()
    await until(lambda: len(rig.delays) >= 6)
    rig.plane.refuse = grpc.StatusCode.NOT_FOUND, "UNKNOWN_ENGINE"
    outage = len(rig.delays)
    await rig.plane.start()
    await until(lambda: len(rig.plane.epochs) >= 6)
    assert sum(delay < FIRST_RETRY_S for delay in rig.delays[outage:]) == 1
    assert rig.delays[-1] > 2 * FIRST_RETRY_S


async def test_a_loss_is_logged_once() -> None:
    async with AttachPlane() as plane:
        rig = Rig(plane)
        await rig.attached()
        with structlog.testing.capture_logs() as logs:
            await plane.stop()
            await until(lambda: len(rig.delays) >= 6)
            await plane.start()
            await until(lambda: rig.session.attached)
        assert [entry["event"] for entry in logs] == ["control_plane_lost", "control_plane_attached"]
        assert logs[0]["kvplane_address"] == plane.address
        await rig.close()


async def test_wishes_and_answers_to_renewals_reach_the_engine(rig: Rig) -> None:
    await rig.attached()
    await rig.announced("a", "b")
    rig.plane.want("a", 300.0)
    await until(lambda: rig.of(ev.RenewalOrdered))
    assert rig.of(ev.RenewalOrdered) == [ev.RenewalOrdered(RequestId("a"), 300.0)]
    assert rig.outbox.renew(RequestId("a"), expires_at=rig.now + 500)
    rig.session.wake()
    await until(lambda: rig.plane.renewed())
    assert rig.plane.renewed() == [("a", 495.0)]
    rig.plane.answer_renewal("b", renewed=False)
    await until(lambda: len(rig.of(ev.Renewed)) == 2)
    assert rig.of(ev.Renewed) == [ev.Renewed(RequestId("a"), True), ev.Renewed(RequestId("b"), False)]


async def test_a_renewal_lost_with_its_stream_is_said_on_the_next(rig: Rig) -> None:
    await rig.attached()
    await rig.announced("a")
    rig.plane.acknowledging.clear()
    rig.outbox.renew(RequestId("a"), expires_at=rig.now + 1000)
    rig.session.wake()
    await until(lambda: rig.plane.renewed())
    rig.plane.acknowledging.set()
    rig.plane.cut()
    await until(lambda: len(rig.plane.announced()) == 2)
    again = rig.plane.announced()[-1]
    assert again.reannounced
    assert again.ttl.seconds == 995


async def test_slow_acknowledgement_is_followed_by_the_true_life(rig: Rig) -> None:
    await rig.attached()
    rig.plane.acknowledging.clear()
    rig.announce("a")
    await until(lambda: rig.plane.announced())
    rig.now += 8
    rig.plane.acknowledging.set()
    await until(lambda: rig.plane.renewed())
    assert rig.plane.renewed() == [("a", 467.0)]  # 480 - 8 of the way - 5 of margin


async def test_acknowledgement_within_the_margin_needs_no_renewal(rig: Rig) -> None:
    await rig.attached()
    rig.plane.acknowledging.clear()
    rig.announce("a")
    await until(lambda: rig.plane.announced())
    rig.now += 5
    rig.plane.acknowledging.set()
    await until(lambda: rig.of(ev.Announced))
    await rig.announced("b")  # a round trip, in which a renewal would have come along
    assert rig.plane.renewed() == []


async def test_heartbeats_keep_the_lease_and_silence_ends_the_stream() -> None:
    async with AttachPlane(lease_ttl_s=1.5) as plane:
        rig = Rig(plane)
        rig.session = EngineSession(
            ControlPlaneClient(plane.address),
            SPEC,
            rig.outbox,
            rig.events.append,
            monotonic=asyncio.get_running_loop().time,
            sleep=rig.sleep,
        )
        await rig.attached()
        await until(lambda: len(plane.heard) >= plane.streams + 3)  # one stream, unless the machine is busy
        streams = plane.streams
        plane.acknowledging.clear()
        await until(lambda: plane.streams > streams)
        # It hears us, so it keeps our lease and may hand out what we hold: that counts as contact.
        contact = rig.session.last_contact
        await until(lambda: rig.session.last_contact != contact)
        plane.acknowledging.set()
        await until(lambda: rig.session.attached)
        await rig.close()


async def test_load_is_sent(rig: Rig) -> None:
    await rig.attached()
    rig.outbox.set_load(EngineLoad(1, 2, 3, 4, 5))
    rig.session.wake()
    await until(lambda: any(message.HasField("load") for message in rig.plane.heard))


async def test_a_new_incarnation_waits_for_withdrawals(rig: Rig) -> None:
    await rig.attached()
    await rig.announced("a")
    rig.outbox.withdraw(RequestId("a"))
    rig.session.start_incarnation()
    await until(lambda: len(rig.plane.epochs) == 2 and rig.session.attached)
    assert rig.of(ev.Withdrawn) == [ev.Withdrawn(RequestId("a"), ReleaseOutcome.RELEASED)]
    assert [a.request_id for a in rig.plane.announced()] == ["a"]  # not again
    assert rig.delays == []  # at once


async def test_a_new_incarnation_does_not_wait_for_ever(rig: Rig) -> None:
    rig.plane.withdraw_outcome["a"] = common_pb2.RELEASE_OUTCOME_CLAIMED
    await rig.attached()
    await rig.announced("a")
    rig.outbox.withdraw(RequestId("a"))
    rig.session.start_incarnation()
    await until(lambda: len(rig.plane.epochs) == 2 and rig.session.attached)


async def test_draining_is_passed_on(rig: Rig) -> None:
    await rig.attached()
    rig.plane.drain()
    await until(lambda: rig.of(ev.DrainRequested))
    assert rig.of(ev.DrainRequested) == [ev.DrainRequested(True)]


async def test_closing_takes_the_engine_off_the_record(rig: Rig) -> None:
    await rig.attached()
    await rig.session.aclose()
    assert rig.plane.deregistered == [1]
    await rig.session.aclose()
    assert rig.plane.deregistered == [1]


async def test_closing_with_the_plane_gone_does_not_wait(rig: Rig) -> None:
    await rig.attached()
    await rig.plane.stop()
    async with asyncio.timeout(60):
        await rig.session.aclose(timeout_s=0.2)


async def test_cancellation_ends_the_session(rig: Rig) -> None:
    await rig.attached()
    assert rig.task is not None
    rig.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rig.task


async def test_a_fault_in_the_owner_does_not_end_the_session(rig: Rig) -> None:
    faults = ["once"]

    def on_event(event: ev.Event) -> None:
        rig.events.append(event)
        if isinstance(event, ev.Announced) and faults:
            raise RuntimeError(faults.pop())

    rig.session = EngineSession(
        ControlPlaneClient(rig.plane.address),
        SPEC,
        rig.outbox,
        on_event,
        monotonic=rig.monotonic,
        sleep=rig.sleep,
    )
    await rig.attached()
    rig.announce("a")
    await until(lambda: rig.plane.streams == 2 and rig.session.attached)
    await until(lambda: len(rig.of(ev.Announced)) == 2)


def test_addresses_become_grpc_targets() -> None:
    for address, target in (
        ("plane:1", "plane:1"),
        ("dns:///plane:1", "dns:///plane:1"),
        ("10.0.0.5:1, 10.0.0.6:1", "ipv4:10.0.0.5:1,10.0.0.6:1"),
        ("[fd00::5]:1", "[fd00::5]:1"),
        ("[fd00::5]:1,[fd00::6]:1", "ipv6:[fd00::5]:1,[fd00::6]:1"),
        ("[fd00::5]:1,10.0.0.6:1", "ipv6:[fd00::5]:1,[::ffff:10.0.0.6]:1"),
    ):
        assert grpc_target(checked_address(address)) == target
