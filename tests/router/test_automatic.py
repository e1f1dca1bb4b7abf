"""Places of turns that have one name: whoever only looked at one leaves it to others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry

from kvplane.client.model import Claim, ConversationKey, Location
from kvplane.router import automatic
from kvplane.router.automatic import AutomaticTurn
from kvplane.router.history import Trace
from kvplane.router.metrics import RouterMetrics
from kvplane.router.plane import Plane
from tests.controlplane.wire import SPEC, Wire, announcement
from tests.router.rig import chat, long_text, rig, until

KEY = ConversationKey("t", "m", "")
FIRST = Trace("hello", None)


class Places:
    """A router's view of a control plane, and the engine that keeps what it begins."""

    def __init__(self, wire: Wire, plane: Plane, epoch: int) -> None:
        self.wire, self.plane, self.epoch = wire, plane, epoch

    async def begin(self, trace: Trace = FIRST) -> AutomaticTurn:
        turn = await automatic.begin(self.plane, KEY, trace, 0.0)
        assert turn is not None
        await self.settle()
        return turn

    async def announce(self, turn: AutomaticTurn) -> None:
        key, number = turn.begun.key, turn.begun.turn
        request_id = f"{key.conversation_id} {number}"
        result = await self.wire.client.announce_location(
            SPEC.engine_id, self.epoch, announcement(request_id, number, key)
        )
        assert result.outcome == "accepted"

    async def take(self, location: Location) -> None:
        claim = await self.plane.claim(location.key, location, "")
        assert isinstance(claim, Claim)
        automatic.taken(self.plane, location)
        self.plane.finish(claim)
        await self.settle()

    async def settle(self) -> None:
        await until(lambda: not self.plane._background)


@asynccontextmanager
async def places() -> AsyncIterator[Places]:
    wire = Wire()
    await wire.start()
    plane = Plane(
        wire.client,
        wire.client,
        owner="r",
        timeout_s=5,
        wait_s=0.0,
        poll_interval_s=9,
        metrics=RouterMetrics(CollectorRegistry()),
        monotonic=lambda: 0.0,
    )
    try:
        yield Places(wire, plane, (await wire.client.register_engine(SPEC)).engine_epoch)
    finally:
        await plane.aclose()
        await wire.stop()


def place(turn: AutomaticTurn) -> str:
    return turn.begun.key.conversation_id


async def test_each_turn_is_counted_once_however_many_places_are_looked_at() -> None:
    async with places() as p:
        await p.announce(await p.begin())
        assert (await p.begin(Trace("more", "hello"))).begun.location is not None
        assert (await p.begin()).borrowed
        assert (await p.begin(Trace("other more", "other"))).begun.location is None
        p.wire.clock.jump(1.5)
        counts = (await p.wire.client.get_status()).counts
        assert counts is not None
        assert (counts.turns, counts.hits) == (4, 2)


async def test_a_place_is_free_again_once_its_turn_has_been_taken_away() -> None:
    async with places() as p:
        for user in range(6):
            first = await p.begin()
            assert (place(first), first.begun.location) == ("auto/hello", None)
            await p.announce(first)
            second = await p.begin(Trace(f"hello {user}", "hello"))
            assert second.begun.location is not None
            assert second.before == first.begun.key
            await p.take(second.begun.location)
            await p.announce(second)


async def test_who_borrows_keeps_nobody_from_a_place() -> None:
    async with places() as p:
        await p.announce(await p.begin())
        lent = await p.plane.lookup(replace(KEY, conversation_id="auto/hello"))
        assert isinstance(lent, Location)
        other = await p.begin()
        assert (place(other), other.borrowed) == ("auto/hello.1", True)
        await p.wire.client.withdraw_location(SPEC.engine_id, p.epoch, lent.request_id)
        assert place(await p.begin()) == "auto/hello"


async def test_looking_for_a_turn_that_is_gone_keeps_nobody_from_its_place() -> None:
    async with places() as p:
        for index in range(3):
            late = await p.begin(Trace(f"hello {index}", "hello"))
            assert late.begun.location is None
            # What is not in flight is not waited for either.
            assert late.begun.miss == "unknown_conversation"
        assert place(await p.begin()) == "auto/hello"


async def test_turns_under_way_are_at_places_of_their_own() -> None:
    async with places() as p:
        one, two = await p.begin(), await p.begin()
        assert (place(one), place(two)) == ("auto/hello", "auto/hello.1")
        for turn in (one, two):
            await p.announce(turn)
            found = await p.plane.lookup(turn.begun.key)
            assert isinstance(found, Location)
            assert found.turn == turn.begun.turn


async def test_many_users_with_one_first_message_all_pull_their_own() -> None:
    async with rig() as r:
        hello = long_text(200)
        for user in range(6):
            first = await r.post(chat(hello, conversation=None))
            assert (first.reason, len(r.plane.locations)) == ("unknown_conversation", user + 1)
            reply = await r.post(chat(hello, first.text, f"I am {user}", conversation=None), path="pull")
            assert (reply.path, reply.reason) == ("pull", "pulled")


async def test_what_was_known_of_a_request_is_counted_once() -> None:
    async with rig() as r:
        said = ["one", "two", "three"]
        for turn in range(3):
            history = list[str]()
            for text in said[:turn]:
                history += [text, "answer"]
            assert (await r.post(chat(*history, said[turn], conversation=None))).status == 200
        # And once more: looked for at every place of its name.
        assert (await r.post(chat("one", conversation=None))).status == 200
        known = await r.metric("kvplane_router_lookups_total")
    assert known == {'{outcome="hit"}': 3, '{outcome="unknown_conversation"}': 1}
