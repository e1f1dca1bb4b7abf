"""A control plane on a clock that stands still, and short ways to say what tests say often."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kvplane.controlplane import model as m
from kvplane.controlplane.meter import Meter
from kvplane.controlplane.quotas import TenantLimits
from kvplane.controlplane.server import ControlPlane
from kvplane.store.base import EventBatch, Store
from kvplane.store.clock import Clock
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import FaultInjectingStore, ManualClock, settle

PARAMS = json.dumps(
    {
        "remote_engine_id": "d",
        "remote_request_id": "q",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "remote_block_ids": [[1, 2, 3]],
        "remote_blocks_expiry_time": 12345.678,
        "some_future_member": 9007199254740993,
    }
).encode()


def key(
    conversation_id: str = "c", tenant_id: str = "t", model: str = "m", adapter: str = ""
) -> m.ConversationKey:
    return m.ConversationKey(tenant_id, model, adapter, conversation_id)


def announcement(
    request_id: str,
    turn: int,
    *,
    conversation: m.ConversationKey | None = None,
    ttl_s: float = 400.0,
    reannounced: bool = False,
    lease_class: int = 0,
    token_count: int = 100,
    block_count: int = 4,
    fingerprint: m.Fingerprint | None = None,
) -> m.Announcement:
    return m.Announcement(
        key=conversation or key(),
        request_id=request_id,
        turn=turn,
        token_count=token_count,
        block_count=block_count,
        kv_transfer_params=PARAMS,
        fingerprint=fingerprint or m.Fingerprint(64, b"0123456789abcdef"),
        ttl_s=ttl_s,
        reannounced=reannounced,
        lease_class=lease_class,
    )


@dataclass
class Rig:
    plane: ControlPlane
    clock: ManualClock
    store: MemoryStore

    async def engine(self, engine_id: str = "d", *, block_size: int = 16) -> m.Engine:
        profile = m.EngineProfile(model="m", block_size=block_size)
        spec = m.EngineSpec(engine_id, m.EngineRole.DECODE, profile)
        return await self.plane.engines.register(spec)

    async def keep_alive(self, engine: m.Engine, seconds: float) -> None:
        """Let time pass while the engine renews its lease."""
        while seconds > 0:
            step = min(3.0, seconds)
            await self.clock.advance(step)
            await self.plane.engines.renew(engine.spec.engine_id, engine.engine_epoch)
            seconds -= step

    async def begin(self, request_id: str, conversation: m.ConversationKey | None = None) -> int:
        return (await self.plane.turns.begin(conversation or key(), request_id, 0.0)).turn

    async def announce(self, engine: m.Engine, value: m.Announcement) -> m.Announced:
        return await self.plane.locations.announce(engine.spec.engine_id, engine.engine_epoch, value)

    async def retain(
        self,
        engine: m.Engine,
        request_id: str,
        conversation: m.ConversationKey | None = None,
        ttl_s: float = 400.0,
    ) -> int:
        """Begin a turn and announce it; returns its number."""
        turn = await self.begin(request_id, conversation)
        result = await self.announce(
            engine, announcement(request_id, turn, conversation=conversation, ttl_s=ttl_s)
        )
        assert result.outcome is m.AnnounceOutcome.ACCEPTED
        return turn

    async def touch(
        self, ttl_s: float = 300.0, conversation: m.ConversationKey | None = None, turn: int = 0
    ) -> m.Touched:
        """Touch so that the record is wanted to live `ttl_s`: usable ten seconds less."""
        return await self.plane.touches.touch(
            conversation or key(), ttl_s - m.Settings().min_remaining_s, turn
        )

    async def wanted_for_s(self, conversation: m.ConversationKey | None = None) -> float:
        """Return for how long a retained location is wanted, in seconds; 0 if nobody asked."""
        found = await self.lookup(conversation)
        assert isinstance(found, m.Found)
        until_ms = found.location.wanted_until_ms
        return (until_ms - self.clock.now_ms()) / 1000 if until_ms else 0.0

    async def claim(
        self, claim_id: str = "claim", owner: str = "r", conversation: m.ConversationKey | None = None
    ) -> m.Claim | m.MissReason:
        return await self.plane.claims.claim(conversation or key(), claim_id, owner, wait_s=0.0)

    async def orders(self, engine: m.Engine) -> dict[str, m.ReleaseReason]:
        orders = await self.plane.attachments.waiting_orders(engine.spec.engine_id, engine.engine_epoch)
        return {order.holder.request_id: order.reason for order in orders}

    async def lookup(self, conversation: m.ConversationKey | None = None) -> m.Found | m.MissReason:
        return self.plane.locations.lookup(conversation or key())


class MovableClock(Clock, Protocol):
    """Time that a test moves."""

    async def advance(self, seconds: float) -> None:
        """Let time pass."""


class SteppedClock:
    """A machine's clock whose wall time is wrong by `step_ms`, which may change."""

    def __init__(self, clock: ManualClock, step_ms: int = 0) -> None:
        self._clock = clock
        self.step_ms = step_ms

    def now_ms(self) -> int:
        return self._clock.now_ms() + self.step_ms

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    async def advance(self, seconds: float) -> None:
        await self._clock.advance(seconds)


class SharedStore(FaultInjectingStore):
    """A store that other replicas write to as well, and whose watch can be held back."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.watching = asyncio.Event()
        self.watching.set()

    @property
    def shared(self) -> bool:
        return True

    async def watch(self, prefix: bytes, *, from_revision: int = 0) -> AsyncIterator[EventBatch]:
        async for batch in super().watch(prefix, from_revision=from_revision):
            await self.watching.wait()
            yield batch


@asynccontextmanager
async def replica(
    store: Store,
    clock: MovableClock,
    settings: m.Settings | None = None,
    limits: TenantLimits | None = None,
    meter: Meter | None = None,
) -> AsyncIterator[ControlPlane]:
    """A control plane that runs; its store outlives it."""
    plane = ControlPlane(store, clock, settings or m.Settings(), limits, meter)
    tasks = plane.start()
    await settle()
    while not plane.mirror.caught_up.is_set():  # it waits for others' pulses, to agree on the time
        await clock.advance(0.1)
    try:
        yield plane
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def running(
    settings: m.Settings | None = None, limits: TenantLimits | None = None
) -> AsyncIterator[Rig]:
    clock = ManualClock()
    async with MemoryStore(clock) as store, replica(store, clock, settings, limits) as plane:
        yield Rig(plane, clock, store)
