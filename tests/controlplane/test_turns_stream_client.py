"""The client's Turns stream does all that its unary calls do."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvplane.client import model as cm
from kvplane.client.errors import ControlPlaneUnavailableError, InvalidFieldError, NotOwnerError
from kvplane.client.turns import TurnsStream
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.memory import MemoryStore
from tests.controlplane.wire import KEY, SPEC, Wire


async def test_a_turn_from_beginning_to_end(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    async with TurnsStream(wire.client.open_turns) as turns:
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


async def test_touch(wire: Wire) -> None:
    epoch = (await wire.client.register_engine(SPEC)).engine_epoch
    async with TurnsStream(wire.client.open_turns) as turns:
        assert not await turns.touch_conversation(KEY, 30.0)
        turn = await wire.retain(epoch)
        assert await turns.touch_conversation(KEY, 30.0, turn=turn)


async def test_bad_fields_are_refused_by_name(wire: Wire) -> None:
    async with TurnsStream(wire.client.open_turns) as turns:
        with pytest.raises(InvalidFieldError, match="conversation_id"):
            await turns.begin_turn(cm.ConversationKey("t", "m", ""), "r")


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
