"""Whatever is retained, claimed, ended, renewed, expired: a prompt finds what looking at all would find."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplane.controlplane import model as m
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock, settle
from tests.controlplane.harness import Rig, SharedStore, key, replica
from tests.controlplane.test_prefixes import CHUNK, printed, retain

TENANTS = st.sampled_from(["t1", "t2"])
CONVERSATIONS = st.builds(
    lambda tenant_id, name: key(name, tenant_id=tenant_id), TENANTS, st.sampled_from(["a", "b", "c", "d"])
)


def tokens(length: int, edited: int = -1) -> list[int]:
    """Return some tokens of which all are alike but one."""
    return [int(number == edited) for number in range(length)]


TOKENS = st.builds(tokens, st.integers(CHUNK - 1, 3 * CHUNK + 1), st.sampled_from([-1, -1, -1, CHUNK]))
PROMPTS = [tokens(3 * CHUNK + 1), tokens(2 * CHUNK), tokens(3 * CHUNK, edited=CHUNK)]


@dataclass
class Retained:
    """What is retained of a conversation."""

    tokens: list[int]
    request_id: str
    turn: int
    ends: float
    in_flight_until: float = 0.0


class Finding(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.count = 0
        self.retained: dict[m.ConversationKey, Retained] = {}
        self.run(self.start())

    async def start(self) -> None:
        clock = ManualClock()
        memory = await self.stack.enter_async_context(MemoryStore(clock))
        live = await self.stack.enter_async_context(replica(memory, clock))
        self.follower = await self.stack.enter_async_context(replica(SharedStore(memory), clock))
        self.rig = Rig(live, clock, memory)
        self.engine = await self.rig.engine()

    def run(self, awaitable: Any) -> Any:
        return self.loop.run_until_complete(awaitable)

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.loop.close()

    @property
    def now(self) -> float:
        return self.rig.clock.monotonic()

    def next(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    @rule(conversation=CONVERSATIONS, tokens=TOKENS, ttl_s=st.sampled_from([5.0, 30.0, 400.0]))
    def retain(self, conversation: m.ConversationKey, tokens: list[int], ttl_s: float) -> None:
        request_id = self.next("q")
        turn = self.run(retain(self.rig, self.engine, request_id, tokens, conversation, ttl_s))
        self.retained[conversation] = Retained(tokens, request_id, turn, self.now + ttl_s)

    @rule(conversation=CONVERSATIONS)
    def begin(self, conversation: m.ConversationKey) -> None:
        self.run(self.rig.begin(self.next("r"), conversation))
        if conversation in self.retained:
            self.retained[conversation].in_flight_until = self.now + 600

    @rule(conversation=CONVERSATIONS)
    def claim(self, conversation: m.ConversationKey) -> None:
        outcome = self.run(self.rig.claim(self.next("claim"), conversation=conversation))
        if isinstance(outcome, m.Claim):
            del self.retained[conversation]

    @rule(conversation=CONVERSATIONS)
    def end(self, conversation: m.ConversationKey) -> None:
        self.run(self.rig.plane.releases.end_conversation(conversation))
        self.retained.pop(conversation, None)

    @precondition(lambda self: self.retained)
    @rule(data=st.data(), ttl_s=st.sampled_from([5.0, 400.0]))
    def renew(self, data: Any, ttl_s: float) -> None:
        retained = self.retained[data.draw(st.sampled_from(sorted(self.retained, key=repr)))]
        holder = m.Holder("d", self.engine.engine_epoch, retained.request_id)
        if self.run(self.rig.plane.locations.renew(holder, ttl_s)) is not None:
            retained.ends = self.now + ttl_s

    @rule(seconds=st.sampled_from([1.0, 8.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.run(self.rig.keep_alive(self.engine, seconds))
        self.retained = {key: held for key, held in self.retained.items() if held.ends > self.now}

    @invariant()
    def what_is_found_is_what_looking_at_all_finds(self) -> None:
        self.run(settle())
        for tenant_id, prompt in product(["t1", "t2"], PROMPTS):
            expected = self.expected(tenant_id, prompt)
            for plane in (self.rig.plane, self.follower):
                match = plane.prefixes.best(key("", tenant_id=tenant_id), printed(prompt))
                found = None if match is None else match.found.location.key
                assert found in expected
                if match is not None and found is not None:
                    assert (match.refused is None) == (self.retained[found].ends - self.now >= 10)

    def expected(self, tenant_id: str, prompt: list[int]) -> Sequence[m.ConversationKey | None]:
        """Look at all that is retained; several are as good if they began at the same time."""
        matching = list[tuple[bool, int, bool, int, m.ConversationKey]]()
        for conversation, held in self.retained.items():
            whole = len(held.tokens) // CHUNK * CHUNK
            if conversation.tenant_id == tenant_id and whole and held.tokens[:whole] == prompt[:whole]:
                is_offered = held.ends - self.now >= 10
                free = is_offered and held.in_flight_until <= self.now
                matching.append((is_offered, whole, free, held.turn, conversation))
        best = max((match[:4] for match in matching), default=None)
        return [match[4] for match in matching if match[:4] == best] or [None]

    @invariant()
    def nothing_is_kept_of_what_is_gone(self) -> None:
        self.run(settle())
        wholes = {
            (conversation.tenant_id, *held.tokens[: len(held.tokens) // CHUNK * CHUNK])
            for conversation, held in self.retained.items()
            if len(held.tokens) >= CHUNK
        }
        for plane in (self.rig.plane, self.follower):
            assert len(plane.prefixes) == len(wholes)


TestFinding = Finding.TestCase
TestFinding.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
