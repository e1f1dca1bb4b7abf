"""The client's Turns stream does all that its unary calls do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc import StatusCode

from kvplane.client import model as cm
from kvplane.client.errors import ControlPlaneUnavailableError, InvalidFieldError, NotOwnerError
from kvplane.client.turns import TurnsStream
from kvplane.controlplane.local_turns import LocalTurns
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.controlplane.turn_streams import Write
from kvplane.store.memory import MemoryStore
from kvplane.v1 import location_pb2 as pb
from tests.controlplane.wire import KEY, SPEC, Wire


@pytest.fixture(params=["grpc", "in the same process"])
def open_turns(wire: Wire, request: pytest.FixtureRequest) -> Callable[[], Any]:
    return wire.client.open_turns if request.param == "grpc" else wire.server.open_turns


async def test_a_turn_from_beginning_to_end(wire: Wire, open_turns: Callable[[], Any]) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    async with TurnsStream(open_turns) as turns:
        assert await turns.lookup_location(KEY) is cm.MissReason.UNKNOWN_CONVERSATION
        turn = await wire.retain(epoch)
        found = await turns.lookup_location(KEY)
        assert isinstance(found, cm.Location)
        assert found == await wire.client.lookup_location(KEY)
        begun = await turns.begin_turn(KEY, "next", wait_s=0.0)
        assert begun.location is not None
        assert (begun.location.turn, begun.key, begun.miss) == (turn, KEY, None)
        assert begun.turn > turn
        claim = await turns.claim_location(KEY, "claim", "me", turn=turn, wait_s=0.0)
        assert isinstance(claim, cm.Claim)
        assert claim.location.request_id == "q1"
        assert await turns.claim_location(KEY, "other", "me") is cm.MissReason.CLAIMED
        with pytest.raises(NotOwnerError):
            await turns.finish_claim("claim", "somebody else")
        assert await turns.finish_claim("claim", "me") is cm.ReleaseOutcome.RELEASED
        assert await turns.end_conversation(KEY) is cm.ReleaseOutcome.NOTHING


async def test_touch(wire: Wire, open_turns: Callable[[], Any]) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    async with TurnsStream(open_turns) as turns:
        assert await turns.touch_conversation(KEY, 30.0) == cm.Touched(False, None)
        turn = await wire.retain(epoch)
        found = await turns.touch_conversation(KEY, 30.0, turn=turn)
        assert found.noted
        assert found.remaining_s == 400.0


async def test_bad_fields_are_refused_by_name(wire: Wire, open_turns: Callable[[], Any]) -> None:
    async with TurnsStream(open_turns) as turns:
        with pytest.raises(InvalidFieldError, match="conversation_id"):
            await turns.begin_turn(cm.ConversationKey("t", "m", ""), "r")


async def test_many_at_once_are_each_answered(wire: Wire, open_turns: Callable[[], Any]) -> None:
    keys = [cm.ConversationKey("t", "m", f"c{number}") for number in range(1500)]
    async with TurnsStream(open_turns, timeout_s=20) as turns:
        begun = await asyncio.gather(*(turns.begin_turn(key, "r", wait_s=0.0) for key in keys))
        assert [answer.key for answer in begun] == keys


async def test_without_a_wire_a_fault_costs_a_stream_and_not_its_operations(wire: Wire) -> None:
    faults, opened = [RuntimeError("planted")], list[LocalTurns]()

    async def serve(operations: AsyncIterator[pb.TurnsRequest], write: Write) -> None:
        if faults:
            await anext(operations)
            raise faults.pop()
        await wire.server.plane.location_servicer.serve_turns(operations, write)

    def open_stream() -> LocalTurns:
        opened.append(LocalTurns(serve))
        return opened[-1]

    async with TurnsStream(open_stream, timeout_s=20) as turns:
        assert (await turns.begin_turn(KEY, "r", wait_s=0.0)).turn
    assert [await stream.code() for stream in opened] == [StatusCode.INTERNAL, StatusCode.CANCELLED]
    for ended in opened:
        assert await ended.read() is grpc.aio.EOF
        with pytest.raises(asyncio.InvalidStateError):
            await ended.write(pb.TurnsRequest())


async def test_it_is_back_after_the_server_was(wire: Wire) -> None:
    async with TurnsStream(wire.client.open_turns, timeout_s=20) as turns:
        assert (await turns.begin_turn(KEY, "r1")).turn
        await wire.server.stop(0)
        async with MemoryStore(wire.clock) as store, ControlPlaneServer(store, wire.clock) as server:
            await server.start(wire.address)
            async with asyncio.timeout(120):
                while True:  # the channel takes a moment to try again; until then it says so at once
                    with contextlib.suppress(ControlPlaneUnavailableError):
                        assert (await turns.begin_turn(KEY, "r2")).turn
                        break
                    await asyncio.sleep(0.05)
