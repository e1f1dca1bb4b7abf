"""The end of an engine's stream, however it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from kvplane.controlplane import eager, turn_streams, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import InvalidFieldError, SupersededStreamError
from kvplane.controlplane.turn_streams import MAX_OUTSTANDING, multiplexed
from kvplane.store.errors import StoreUnavailableError
from kvplane.v1 import common_pb2, engine_pb2, location_pb2
from tests.controlplane.harness import PARAMS, Rig, announcement


async def test_a_lost_stream_counts_at_once_even_if_its_reader_cannot_be_stopped(rig: Rig) -> None:
    """Seen with a killed engine: the handler was cancelled while it waited for its reader, and nothing after
    that wait happened; the engine's locations were offered for the rest of its lease.
    """
    engine = await rig.engine()
    await rig.retain(engine, "q1")
    let_go = asyncio.Event()

    async def requests() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        hello = engine_pb2.EngineHello(engine_id="d", engine_epoch=engine.engine_epoch)
        yield engine_pb2.AttachEngineRequest(sequence=1, hello=hello)
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    attached = asyncio.Event()

    async def serve() -> None:
        async for _ in rig.plane.attachments.serve(requests()):
            attached.set()

    handler = asyncio.create_task(serve())
    await attached.wait()
    assert isinstance(await rig.lookup(), m.Found)
    handler.cancel()
    await rig.clock.advance(0)
    assert await rig.lookup() is m.MissReason.ENGINE_GONE
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await handler


async def test_that_a_stream_was_lost_is_told_until_the_store_takes_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with an engine killed while etcd was away: its lease began anew when etcd came back."""
    engine, registry = await rig.engine(), rig.plane.attachments._engines
    tell, away = registry.tell_silent, True

    async def tell_silent(engine_id: str, engine_epoch: int, stream: int) -> None:
        if away:
            raise StoreUnavailableError("away")
        await tell(engine_id, engine_epoch, stream)

    def told() -> bool:
        stored = registry.find("d").value
        return stored is not None and stored.contact is m.EngineContact.SILENT

    monkeypatch.setattr(registry, "tell_silent", tell_silent)

    async def requests() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        yield engine_pb2.AttachEngineRequest(sequence=1, hello=_hello(engine))

    async for _ in rig.plane.attachments.serve(requests()):
        pass
    await rig.clock.advance(1)
    assert not told()
    away = False
    await rig.clock.advance(1)
    assert told()


def _hello(engine: m.Engine) -> engine_pb2.EngineHello:
    return engine_pb2.EngineHello(engine_id="d", engine_epoch=engine.engine_epoch)


async def test_what_comes_late_on_an_older_stream_is_void(rig: Rig) -> None:
    """An announcement delayed on the way must not bring back what was withdrawn on the next stream."""
    engine = await rig.engine()
    turn = await rig.begin("b")
    late = asyncio.Event()
    wire = common_pb2.Announcement(
        key=common_pb2.ConversationKey(tenant_id="t", model="m", conversation_id="c"),
        request_id="q",
        turn=turn,
        token_count=100,
        block_count=4,
        kv_transfer_params=PARAMS,
        fingerprint=common_pb2.Fingerprint(chunk_tokens=64, chain=b"0" * 16),
    )
    wire.ttl.FromSeconds(400)

    async def older() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        yield engine_pb2.AttachEngineRequest(sequence=1, hello=_hello(engine))
        await late.wait()
        yield engine_pb2.AttachEngineRequest(sequence=2, announcements=[wire])

    async def newer() -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        yield engine_pb2.AttachEngineRequest(sequence=3, hello=_hello(engine), announcements=[wire])
        yield engine_pb2.AttachEngineRequest(sequence=4, withdrawals=[engine_pb2.Withdrawal(request_id="q")])
        yield engine_pb2.AttachEngineRequest(sequence=5, freed=[engine_pb2.Freed(request_id="q")])

    first = rig.plane.attachments.serve(older())
    await anext(first)
    answers = [answer async for answer in rig.plane.attachments.serve(newer())]
    assert answers[1].withdrawals[0].outcome == common_pb2.RELEASE_OUTCOME_RELEASED
    late.set()
    with pytest.raises(SupersededStreamError):
        async for _ in first:
            pass
    assert await rig.claim() is m.MissReason.UNKNOWN_CONVERSATION


async def test_a_large_location_superseded_in_quarantine_fits_one_transaction(rig: Rig) -> None:
    engine = await rig.engine()
    params = b"{" + PARAMS[1:-1] + b', "padding": "' + b"x" * 1_000_000 + b'"}'
    for request_id, reannounced in (("q1", True), ("q2", False)):
        value = announcement(request_id, await rig.begin(request_id), reannounced=reannounced)
        result = await rig.announce(engine, replace(value, kv_transfer_params=params))
        assert result.outcome is m.AnnounceOutcome.ACCEPTED


@pytest.mark.parametrize("start", [eager.now, eager.later])
async def test_a_caller_that_does_not_read_is_not_read_from(rig: Rig, start: Any) -> None:
    """Else its answers would pile up without bound."""
    taken, answered = 0, 0
    reads = asyncio.Event()

    async def requests() -> AsyncIterator[location_pb2.TurnsRequest]:
        nonlocal taken
        key = common_pb2.ConversationKey(tenant_id="t", model="m", conversation_id="c")
        lookup = location_pb2.LookupLocationRequest(key=key)
        for number in range(5000):
            taken += 1
            yield location_pb2.TurnsRequest(
                operations=[location_pb2.TurnsOperation(id=number, lookup=lookup)]
            )

    async def write(answer: location_pb2.TurnsResponse) -> None:
        nonlocal answered
        await reads.wait()
        answered += len(answer.results)

    stream = asyncio.create_task(multiplexed(rig.plane.location_servicer, requests(), write, start))
    await rig.clock.advance(0)
    assert taken <= MAX_OUTSTANDING + 1
    reads.set()
    await stream
    assert (taken, answered) == (5000, 5000)


async def test_an_engine_announces_for_itself_only(rig: Rig) -> None:
    params = PARAMS.replace(b'"remote_engine_id": "d"', b'"remote_engine_id": "another"')
    wire = common_pb2.Announcement(
        key=common_pb2.ConversationKey(tenant_id="t", model="m", conversation_id="c"),
        request_id="q",
        turn=1,
        token_count=1,
        block_count=1,
        kv_transfer_params=params,
        fingerprint=common_pb2.Fingerprint(chunk_tokens=64, chain=b"0" * 8),
    )
    wire.ttl.FromSeconds(400)
    with pytest.raises(InvalidFieldError, match="own id"):
        validate.announcement(wire, "d")


async def test_answers_too_large_for_one_message_go_as_several() -> None:
    answer = location_pb2.TurnsResponse()
    for number in range(40):
        result = answer.results.add(id=number)
        result.claim.claim.location.kv_transfer_params = bytes(1_000_000)
    parts = turn_streams._parts(answer)
    assert len(parts) > 1
    assert all(part.ByteSize() <= turn_streams.MAX_ANSWER_BYTES for part in parts)
    assert [result.id for part in parts for result in part.results] == list(range(40))


@pytest.mark.parametrize("start", [eager.now, eager.later])
async def test_one_message_of_lookups_is_not_answered_in_one_piece(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, start: Any
) -> None:
    """Seen: 18 KB of lookups of a large location took 3 GB, and clients by gRPC's defaults broke."""
    engine = await rig.engine()
    params = b"{" + PARAMS[1:-1] + b', "padding": "' + b"x" * 1_000_000 + b'"}'
    value = announcement("q1", await rig.begin("q1"))
    await rig.announce(engine, replace(value, kv_transfer_params=params))
    operations, performed = rig.plane.location_servicer, 0
    perform, reads = operations.perform_lookup, asyncio.Event()
    sizes = list[int]()

    async def counted(request: location_pb2.LookupLocationRequest) -> m.Found | m.MissReason:
        nonlocal performed
        performed += 1
        return await perform(request)

    async def requests() -> AsyncIterator[location_pb2.TurnsRequest]:
        key = common_pb2.ConversationKey(tenant_id="t", model="m", conversation_id="c")
        lookup = location_pb2.LookupLocationRequest(key=key)
        yield location_pb2.TurnsRequest(
            operations=[location_pb2.TurnsOperation(id=number, lookup=lookup) for number in range(200)]
        )

    async def write(answer: location_pb2.TurnsResponse) -> None:
        await reads.wait()
        sizes.append(answer.ByteSize())

    monkeypatch.setattr(operations, "perform_lookup", counted)
    stream = asyncio.create_task(multiplexed(operations, requests(), write, start))
    await rig.clock.advance(0)
    assert 0 < performed <= 2 * eager.SLICE
    reads.set()
    await stream
    assert performed == 200
    assert sum(sizes) > 200_000_000
    assert max(sizes) <= turn_streams.MAX_ANSWER_BYTES < 4 * 1024 * 1024
