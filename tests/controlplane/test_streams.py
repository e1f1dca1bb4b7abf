"""Streams on the wire: engines attached, turns multiplexed, locations watched."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from kvplane.client import convert
from kvplane.client.errors import (
    ControlPlaneError,
    InvalidFieldError,
    RevisionGoneError,
    StaleEpochError,
    UnknownEngineError,
)
from kvplane.client.model import RequestId
from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.store.base import Put
from kvplane.v1 import common_pb2, engine_pb2, location_pb2
from tests.controlplane.wire import KEY, SPEC, Stream, Wire, announcement, wire_begin, wire_key


async def test_an_engines_stream(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    turn = (await wire.client.begin_turn(KEY, "r1")).turn
    stream = Stream(wire)
    stream.hello(epoch)
    assert (await stream.next()).acknowledged_sequence == 1
    (engine,) = await wire.client.list_engines()
    assert engine.attached
    bad = convert.announcement_to_wire(announcement("bad", 0))
    stream.send(announcements=[convert.announcement_to_wire(announcement("q1", turn)), bad])
    answer = await stream.next()
    assert [result.outcome for result in answer.announcements] == [
        common_pb2.ANNOUNCE_OUTCOME_ACCEPTED,
        common_pb2.ANNOUNCE_OUTCOME_REFUSED,
    ]
    assert "turn" in answer.announcements[1].detail
    await wire.client.end_conversation(KEY)
    ordered = await stream.until(lambda answer: bool(answer.release_orders))
    assert ordered.release_orders[0].request_id == "q1"
    assert ordered.release_orders[0].reason == engine_pb2.RELEASE_REASON_CONVERSATION_ENDED
    stream.send(
        freed=[engine_pb2.Freed(request_id="q1")], withdrawals=[engine_pb2.Withdrawal(request_id="q1")]
    )
    answer = await stream.until(lambda answer: answer.acknowledged_sequence == 3)
    assert answer.withdrawals[0].outcome == common_pb2.RELEASE_OUTCOME_NOTHING
    assert (await wire.memory.scan(b"o/")).items == ()
    await wire.client.drain_engine(SPEC.engine_id)
    assert (await stream.until(lambda answer: answer.draining)).draining
    holder = m.Holder("d", epoch, "any")
    order = m.Order(holder, m.ReleaseReason.CAPACITY, wire.clock.now_ms() + 10_000)
    await wire.memory.transact([], [Put(keys.order(holder), records.dump_order(order))])
    assert (await stream.until(lambda answer: bool(answer.release_orders))).draining
    stream.end()
    with pytest.raises(StopAsyncIteration):
        await stream.until(lambda _: False)


@pytest.mark.parametrize("request_id", ["", "q" * 257])
async def test_an_id_that_cannot_be_on_record_ends_no_stream(wire: Wire, request_id: str) -> None:
    """A client chose one too long. Its engine asked the blocks back, and never could attach again."""
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.retain(epoch)
    stream = Stream(wire)
    stream.hello(epoch)
    await stream.next()
    renewal = convert.renewal_to_wire
    stream.send(
        withdrawals=[engine_pb2.Withdrawal(request_id=request_id), engine_pb2.Withdrawal(request_id="q1")],
        renewals=[renewal(RequestId(request_id), 10), renewal(RequestId("q1"), 0)],
        freed=[engine_pb2.Freed(request_id=request_id)],
    )
    answer = await stream.next()
    assert [(result.request_id, result.outcome) for result in answer.withdrawals] == [
        (request_id, common_pb2.RELEASE_OUTCOME_NOTHING),
        ("q1", common_pb2.RELEASE_OUTCOME_RELEASED),
    ]
    assert [result.renewed for result in answer.renewals] == [False, False]
    stream.end()


async def test_orders_given_while_the_engine_was_away_wait_for_it(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.retain(epoch)
    await wire.client.end_conversation(KEY)
    stream = Stream(wire)
    stream.hello(epoch)
    ordered = await stream.until(lambda answer: bool(answer.release_orders))
    assert ordered.release_orders[0].request_id == "q1"
    stream.end()


async def test_a_stream_ends_when_its_incarnation_does(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    stream = Stream(wire)
    stream.hello(epoch)
    await stream.next()
    await wire.client.register_engine(SPEC)
    with pytest.raises(StaleEpochError):
        await stream.until(lambda _: False)
    unknown = Stream(wire)
    unknown.send(hello=engine_pb2.EngineHello(engine_id="nobody", engine_epoch=1))
    with pytest.raises(UnknownEngineError):
        await unknown.next()
    rude = Stream(wire)
    rude.send()
    with pytest.raises(InvalidFieldError, match="hello"):
        await rude.next()


async def test_turns_over_one_stream(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.retain(epoch)

    async def batches() -> AsyncIterator[list[location_pb2.TurnsOperation]]:
        operation = location_pb2.TurnsOperation
        key = wire_key()
        begins = [operation(id=n, begin_turn=wire_begin(conversation_id=f"c{n}")) for n in range(1, 200)]
        yield begins
        yield [operation(id=1000, begin_turn=wire_begin(conversation_id="")), operation(id=1001)]
        claims = [
            location_pb2.ClaimLocationRequest(key=key, request_id=f"r{n}", owner="o") for n in range(50)
        ]
        yield [operation(id=2000 + n, claim=claim) for n, claim in enumerate(claims)]

    results = {result.id: result async for batch in wire.client.turns(batches()) for result in batch}
    assert len(results) == 199 + 2 + 50
    assert all(results[n].begin_turn.turn > 0 for n in range(1, 200))
    assert results[1000].error.reason == "INVALID_FIELD"
    assert results[1001].error.reason == "INVALID_FIELD"
    assert sum(results[2000 + n].claim.HasField("claim") for n in range(50)) == 1


async def test_watching_from_a_listing_on_misses_nothing(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.retain(epoch, "q1")
    _, revision = await wire.client.list_locations()
    await wire.retain(epoch, "q2")
    await wire.client.end_conversation(KEY)
    seen = list[tuple[bool, str]]()
    async for event in wire.client.watch_locations(from_revision=revision + 1):
        seen.append((event.gone, event.location.request_id))
        if event.gone:
            break
    assert seen == [(False, "q2"), (True, "q2")]
    with pytest.raises(RevisionGoneError):
        async for _ in wire.client.watch_locations(from_revision=10**9):
            pass


async def test_stopping_ends_streams_as_unavailable(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    stream = Stream(wire)
    stream.hello(epoch)
    await stream.next()
    stopping = asyncio.create_task(wire.server.stop(5))
    with pytest.raises(ControlPlaneError) as raised:
        await stream.until(lambda _: False)
    assert raised.value.reason == "SHUTTING_DOWN"
    await stopping


@pytest.mark.parametrize("how", ["server_stops", "caller_leaves", "caller_is_cancelled"])
async def test_a_stream_that_ends_leaves_nothing_behind(wire: Wire, how: str) -> None:
    """The requests' generator waits for more when the stream ends, as an engine's does for its next wish."""
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    complaints = list[str]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    stopped = asyncio.Event()

    async def requests() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        try:
            hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=epoch)
            yield engine_pb2.AttachEngineRequest(sequence=1, hello=hello)
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def attach() -> None:
        answers = wire.client.attach_engine(requests())
        await anext(answers)
        if how == "caller_leaves":
            await answers.aclose()  # type: ignore[attr-defined]
            return
        if how == "server_stops":
            await wire.server.stop(0)
        with pytest.raises(ControlPlaneError):
            await anext(answers)

    before = asyncio.all_tasks()
    attached = asyncio.create_task(attach())
    if how == "caller_is_cancelled":
        await asyncio.sleep(0.2)
        attached.cancel()
    await asyncio.gather(attached, return_exceptions=how == "caller_is_cancelled")
    await asyncio.wait_for(stopped.wait(), 60)
    del attached
    for _ in range(3):
        gc.collect()
        await asyncio.sleep(0)
    assert complaints == []
    left = [task for task in asyncio.all_tasks() - before if "_consume_request" in repr(task)]
    assert left == []


async def test_a_fault_of_the_requests_ends_the_stream(wire: Wire) -> None:
    async def requests() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        await anext(wire.client.attach_engine(requests()))


async def test_sequence_numbers_have_to_rise(wire: Wire) -> None:
    """An engine that left them 0 was not heard any more after 64 messages: none was acknowledged to it."""
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=epoch)
    for sequences in ([0], [-1], [1, 0], [1, 1], [5, 4]):

        async def requests(sequences: list[int] = sequences) -> AsyncIterator[engine_pb2.AttachEngineRequest]:
            for number, sequence in enumerate(sequences):
                yield engine_pb2.AttachEngineRequest(sequence=sequence, hello=None if number else hello)

        with pytest.raises(InvalidFieldError, match="sequence"):
            async for _ in wire.client.attach_engine(requests()):
                pass


async def test_a_second_hello_is_refused(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    stream = Stream(wire)
    stream.hello(epoch)
    await stream.next()
    stream.hello(epoch)
    with pytest.raises(InvalidFieldError, match="hello must be in the first message only"):
        await stream.until(lambda _: False)


async def test_refused_announcements_do_not_fill_the_log(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    stream = Stream(wire)
    stream.hello(epoch)
    await stream.next()
    with capture_logs() as logs:
        stream.send(announcements=[common_pb2.Announcement(request_id="q")] * 1024)
        answer = await stream.next()
    assert len(answer.announcements) == 1024
    assert [line["event"] for line in logs] == ["announcement_refused"]
    stream.end()


async def test_a_damaged_record_ends_no_watch_and_no_drain(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    await wire.retain(epoch)
    _, revision = await wire.client.list_locations()
    damaged = keys.location(m.ConversationKey("t", "m", "", "damaged"))
    holding = keys.holding(m.Holder("d", epoch, "damaged"))
    await wire.memory.transact([], [Put(damaged, b"\xff"), Put(holding, b"\xff")])
    await wire.retain(epoch, "q2")
    async for event in wire.client.watch_locations(from_revision=revision + 1):
        assert event.location.request_id == "q2"
        break
    assert await wire.client.drain_engine(SPEC.engine_id) == 0


async def test_a_negative_load_is_refused(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    stream = Stream(wire)
    stream.hello(epoch)
    await stream.next()
    stream.send(load=engine_pb2.EngineLoad(free_blocks=-1))
    with pytest.raises(InvalidFieldError, match=r"load\.free_blocks"):
        await stream.next()
