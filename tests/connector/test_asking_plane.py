"""Prefill engines that ask a real control plane through real sessions; engines' blocks are made up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import pytest

from kvplane.client import events as ev
from kvplane.client import model as m
from kvplane.client.credentials import SecuritySettings
from kvplane.client.sync import EngineSessionThread
from kvplane.connector.asking import Asker
from kvplane.connector.fingerprint import Context, make_chain
from kvplane.connector.inquiry import Answer, Question
from kvplane.controlplane.security import SecuritySettings as ServerSecurity
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.connector.asked import CHUNK, LAYOUT, UNNAMED, location
from tests.fakes.attach import until

SYSTEM = list(range(2000, 2100))


class Fleet:
    """A control plane, a decode engine, and as many prefill engines as a test makes."""

    def __init__(
        self,
        security: ServerSecurity | None = None,
        shown: Mapping[m.EngineRole, SecuritySettings] | None = None,
    ) -> None:
        self.clock = SystemClock()
        self.store = MemoryStore(self.clock)
        self.server = ControlPlaneServer(self.store, self.clock, security=security)
        self.shown = shown or {}
        self.address = ""
        self.sessions: list[EngineSessionThread] = []
        self.numbers = itertools.count()
        self.events: list[ev.Event] = []

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self.server.start('127.0.0.1:0')}"
        self.d = await self.session("d0", m.EngineRole.DECODE)
        self.p = await self.session("p0", m.EngineRole.PREFILL)
        self.asker = self.new_asker()

    async def session(self, engine_id: str, role: m.EngineRole) -> EngineSessionThread:
        profile = m.EngineProfile(model="m", block_size=16)
        spec, security = m.EngineSpec(m.EngineId(engine_id), role, profile), self.shown.get(role)
        session = await asyncio.to_thread(EngineSessionThread, self.address, spec, security=security)
        self.sessions.append(session)
        session.start()
        await until(lambda: session.attached)
        return session

    def new_asker(self) -> Asker:
        """Return an asker that remembers nothing, as another prefill engine's would."""
        return Asker(
            self.p,
            engine_id="p0",
            layout=LAYOUT,
            chunk_tokens=CHUNK,
            timeout_s=10,
            monotonic=time.monotonic,
        )

    async def ask(self, tokens: Sequence[int], *, salt: str = "", asker: Asker | None = None) -> Answer:
        asker, name = asker or self.asker, f"r{next(self.numbers)}"
        question = Question(UNNAMED, Context("m", cache_salt=salt), tokens, least_tokens=16)
        answers = list[Answer]()

        def settled() -> bool:
            answer = asker.settle(name, lambda: question)
            answers.extend([answer] if answer is not None else [])
            return bool(answers)

        await until(settled)
        asker.end(name)
        return answers[0]

    async def announce(self, begun: m.BegunTurn | None, tokens: Sequence[int], salt: str = "") -> None:
        """Have the decode engine retain the turn."""
        assert begun is not None
        held = location(tokens, key=begun.key, turn=begun.turn, context=Context("m", cache_salt=salt))
        self.d.announce(
            m.Announcement(
                key=begun.key,
                request_id=held.request_id,
                turn=begun.turn,
                token_count=len(tokens),
                block_count=held.block_count,
                kv_transfer_params=held.kv_transfer_params,
                fingerprint=m.Fingerprint(CHUNK, make_chain(Context("m", cache_salt=salt), tokens, CHUNK)),
                ttl_s=0.0,
            ),
            expires_at=time.monotonic() + 400,
        )
        await self.event(ev.Announced, held.request_id)

    async def event(self, kind: type[ev.Announced] | type[ev.Ordered], request_id: str) -> None:
        def came() -> bool:
            self.events += self.d.drain_events()
            return any(
                isinstance(event, kind)
                and (event.result.request_id if isinstance(event, ev.Announced) else event.request_id)
                == request_id
                for event in self.events
            )

        await until(came)

    async def stop(self) -> None:
        for session in self.sessions:
            await asyncio.to_thread(session.close)
        await self.server.stop(0)
        await self.store.aclose()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    await fleet.start()
    yield fleet
    await fleet.stop()


def key_of(answer: Answer) -> m.ConversationKey:
    assert answer.begun is not None
    return answer.begun.key


async def test_another_prefill_engine_finds_the_conversation_by_its_prompt(fleet: Fleet) -> None:
    tokens = [*SYSTEM, *range(50)]
    first = await fleet.ask(tokens)
    assert (first.claim, first.plan.detail) == (None, "unknown_conversation")
    tokens += [7, 8, 9]
    await fleet.announce(first.begun, tokens)
    second = await fleet.ask([*tokens, 1, 2, 3], asker=fleet.new_asker())
    assert key_of(second) == key_of(first)
    assert second.begun is not None
    assert second.begun.turn_index == 2
    assert second.claim is not None
    assert second.plan.tokens == len(tokens)
    assert first.begun is not None
    # The request has ended, and with it the claim: the engine may free the blocks.
    await fleet.event(ev.Ordered, f"{key_of(first).conversation_id}-{first.begun.turn}")


async def test_the_same_engine_knows_it_before_it_is_announced_and_whatever_the_reply(fleet: Fleet) -> None:
    tokens = [*SYSTEM, *range(50)]
    first = await fleet.ask(tokens)
    second = await fleet.ask([*tokens, 7, 8, 9])
    assert key_of(second) == key_of(first)
    assert second.plan.detail == "turn_in_flight"
    await fleet.announce(second.begun, [*tokens, 7, 8, 9, 10, 11])
    third = await fleet.ask([*tokens, 7, 8, 9, 20, 21])
    assert key_of(third) == key_of(first)
    assert third.claim is not None
    assert third.plan.tokens == 144


async def test_conversations_with_a_beginning_in_common_stay_apart(fleet: Fleet) -> None:
    """Both in the first whole chunks, and in all whole chunks of the one that is there."""
    for asker in (fleet.asker, fleet.new_asker()):
        first = await fleet.ask([*SYSTEM, 1, 2], asker=asker)
        await fleet.announce(first.begun, [*SYSTEM, 1, 2, 3, 4])
        other = await fleet.ask([*SYSTEM, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], asker=fleet.new_asker())
        assert key_of(other) != key_of(first)
        assert other.claim is None
        again = await fleet.ask([*SYSTEM, 1, 2, 3, 4, 5], asker=fleet.new_asker())
        assert key_of(again) == key_of(first)
        assert again.claim is not None


async def test_another_salt_never_matches(fleet: Fleet) -> None:
    tokens = [*SYSTEM, *range(50)]
    first = await fleet.ask(tokens, salt="one")
    await fleet.announce(first.begun, tokens, salt="one")
    for asker in (fleet.asker, fleet.new_asker()):
        other = await fleet.ask([*tokens, 1], salt="two", asker=asker)
        assert key_of(other) != key_of(first)
        assert other.claim is None


async def test_many_ask_at_once_and_one_wins(fleet: Fleet) -> None:
    tokens = [*SYSTEM, *range(50)]
    first = await fleet.ask(tokens)
    await fleet.announce(first.begun, tokens)
    askers = [fleet.new_asker() for _ in range(12)]
    answers = await asyncio.gather(*(fleet.ask([*tokens, 1, 2], asker=asker) for asker in askers))
    assert sum(answer.claim is not None for answer in answers) == 1


async def test_a_control_plane_that_is_gone_is_not_waited_for(fleet: Fleet) -> None:
    await fleet.server.stop(0)
    await until(lambda: not fleet.p.attached)
    answer = fleet.asker.settle("r", lambda: None)
    assert answer is not None
    assert answer.plan.detail == "no_control_plane"
