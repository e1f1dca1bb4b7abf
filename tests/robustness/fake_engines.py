"""Fake engines: the connector's own parts with numbers for blocks; and one that makes unary calls.

Each keeps account of what it holds, until when, and what it was let free. That account, written down, is what
the control plane's answers are checked against.
"""

from __future__ import annotations

import asyncio
import json
import time

from kvplane.client import events as ev
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import ControlPlaneError, StaleEpochError, UnknownEngineError
from kvplane.client.outbox import Batch, Outbox
from kvplane.client.session import EngineSession
from kvplane.connector.retention import Retention
from tests.robustness import history as h

FINGERPRINT = m.Fingerprint(64, bytes(32))
_BLOCKS = 64
_POOL = 1 << 30  # never short of blocks
_AGREED = (m.ReleaseOutcome.RELEASED, m.ReleaseOutcome.NOTHING)


def key(conversation: str) -> m.ConversationKey:
    """Return the key of a conversation of this traffic."""
    return m.ConversationKey("t", "m", conversation)


def spec(engine_id: str) -> m.EngineSpec:
    """Return a decode engine's registration."""
    profile = m.EngineProfile(model="m", block_size=16)
    return m.EngineSpec(m.EngineId(engine_id), m.EngineRole.DECODE, profile)


def announcement(
    engine_id: str, conversation: str, request_id: str, turn: int, ttl_s: float = 0.0
) -> m.Announcement:
    """Return an announcement of a turn."""
    params = {
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "remote_block_ids": [list(range(_BLOCKS))],
    }
    return m.Announcement(
        key=key(conversation),
        request_id=m.RequestId(request_id),
        turn=turn,
        token_count=256,
        block_count=_BLOCKS,
        kv_transfer_params=json.dumps(params).encode(),
        fingerprint=FINGERPRINT,
        ttl_s=ttl_s,
    )


class RecordingClient(ControlPlaneClient):
    """Writes down registrations and turns."""

    def __init__(self, address: str, recorder: h.Recorder, *, timeout_s: float) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self._recorder = recorder

    async def register_engine(self, spec: m.EngineSpec, *, request_id: str = "") -> m.Registration:
        """See ControlPlaneClient."""
        invoked = time.monotonic()
        given = await super().register_engine(spec, request_id=request_id)
        event = h.Registered(spec.engine_id, given.engine_epoch, invoked, time.monotonic())
        self._recorder.record(event)
        return given

    async def next_turn(self, conversation: str, request_id: str) -> m.BegunTurn:
        """Begin a turn without waiting for the one before."""
        invoked = time.monotonic()
        begun = await self.begin_turn(key(conversation), request_id, wait_s=0.0)
        answered = time.monotonic()
        self._recorder.record(h.Begun(conversation, request_id, begun.turn, invoked, answered))
        if begun.location is not None:
            self._recorder.record(offered(begun.location, invoked, answered, "any"))
        return begun


def place(location: m.Location) -> h.Place:
    """Return whose blocks a location means."""
    return h.Place(location.engine_id, location.engine_epoch, location.request_id)


def offered(location: m.Location, invoked: float, answered: float, replica: str) -> h.Offered:
    """Return the event of a location in an answer."""
    conversation = location.key.conversation_id
    return h.Offered(
        place(location), conversation, location.turn, location.remaining_s, invoked, answered, replica
    )


class RecordingOutbox(Outbox):
    """Writes down what goes into each message, before it can be sent."""

    def __init__(self, engine_id: str, recorder: h.Recorder, margin_s: float) -> None:
        super().__init__(monotonic=time.monotonic, margin_s=margin_s)
        self._engine_id = engine_id
        self._recorder = recorder
        self.epoch = 0

    def take(self) -> tuple[Batch, list[m.RequestId]]:
        """See Outbox."""
        now = time.monotonic()
        batch, expired = super().take()
        for value in batch.announcements:
            where = h.Place(self._engine_id, self.epoch, value.request_id)
            conversation = value.key.conversation_id
            self._recorder.record(h.Announcing(where, conversation, value.turn, now + value.ttl_s, now))
        for request_id, ttl_s in batch.renewals.items():
            where = h.Place(self._engine_id, self.epoch, request_id)
            self._recorder.record(h.Renewing(where, now + ttl_s, now))
        return batch, expired


class StreamEngine:
    """An engine that speaks over AttachEngine, with the parts of the connector that speak and keep."""

    def __init__(self, engine_id: str, address: str, recorder: h.Recorder, margin_s: float) -> None:
        self.engine_id = engine_id
        self._recorder = recorder
        self._expires: dict[str, float] = {}
        self._retention = Retention(_POOL, monotonic=time.monotonic)
        self._outbox = RecordingOutbox(engine_id, recorder, margin_s)
        self._blocks = 0
        self._heard: dict[str, str] = {}
        self.session = EngineSession(
            RecordingClient(address, recorder, timeout_s=2.0),
            spec(engine_id),
            self._outbox,
            self._on_event,
            monotonic=time.monotonic,
            margin_s=margin_s,
        )
        self._running = asyncio.create_task(self.session.run())

    @property
    def ready(self) -> bool:
        """Whether it may announce."""
        return self.session.registration is not None

    @property
    def held(self) -> list[str]:
        """Requests whose blocks it holds."""
        return self._retention.request_ids()

    def announce(self, conversation: str, request_id: str, turn: int, life_s: float) -> None:
        """Retain a turn's blocks for so long."""
        self._expires[request_id] = time.monotonic() + life_s
        self._blocks += _BLOCKS
        self._retention.retain(request_id, conversation, range(self._blocks - _BLOCKS, self._blocks))
        value = announcement(self.engine_id, conversation, request_id, turn)
        for dropped in self._outbox.announce(value, expires_at=self._expires[request_id]):
            self._retention.release(dropped)
        self.step()

    def withdraw(self, request_id: str) -> None:
        """Ask for blocks back."""
        self._retention.withdraw(request_id)
        self.step()

    def read(self, request_id: str) -> None:
        """A reader has read the blocks: they are free."""
        self._free(request_id)
        self.session.wake()

    def reset(self) -> None:
        """As after a reset of the engine's cache: everything is withdrawn, then a new epoch begins."""
        self._retention.withdraw_all()
        self.step()
        self.session.start_incarnation()

    def step(self) -> None:
        """Free what has had its time or may go; ask for what is wanted back: as the connector's keeper."""
        now = time.monotonic()
        for request_id in [name for name, expires_at in self._expires.items() if expires_at <= now]:
            self._free(request_id)
        self._retention.tick(self.session.last_contact)
        for request_id in self._retention.take_withdrawals():
            if not self._outbox.withdraw(m.RequestId(request_id)):
                self._heard[request_id] = "never sent"
                self._retention.withdrawn(request_id, claimed=False)
        for request_id in self._retention.take_frees():
            if request_id in self._retention:
                where = h.Place(self.engine_id, self._outbox.epoch, request_id)
                self._recorder.record(h.MayFree(where, self._heard.get(request_id, "silence"), now))
                self._free(request_id)
        self.session.wake()

    async def die(self) -> None:
        """Be gone without a word; the connection closes, as when a process is killed."""
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        self.session._registration = None  # so that closing says no goodbye
        await self.session.aclose(timeout_s=0.1)
        self._recorder.record(h.Died(self.engine_id, time.monotonic()))

    def _free(self, request_id: str) -> None:
        self._expires.pop(request_id, None)
        self._heard.pop(request_id, None)
        self._retention.freed(request_id)
        self._outbox.freed(m.RequestId(request_id))

    def _on_event(self, event: ev.Event) -> None:
        match event:
            case ev.Registered(registration, first):
                self._outbox.epoch = registration.engine_epoch
                self._retention.lease_ttl_s = registration.lease_ttl_s
                self._retention.claim_timeout_s = registration.claim_timeout_s
                if not first:
                    self._retention.hold()
            case ev.Announced(result):
                where = h.Place(self.engine_id, self._outbox.epoch, result.request_id)
                self._recorder.record(h.Announced(where, str(result.outcome), time.monotonic()))
                self._recorder.count(f"announced_{result.outcome}")
                if result.outcome is m.AnnounceOutcome.REFUSED:
                    self._heard[result.request_id] = f"refused: {result.detail}"
                    self._retention.withdraw(result.request_id)
                elif result.outcome is m.AnnounceOutcome.CLAIMED:
                    self._retention.claimed(result.request_id)
            case ev.Withdrawn(request_id, outcome):
                self._heard[request_id] = f"withdrawn: {outcome}"
                self._recorder.count(f"withdrawn_{outcome}")
                self._retention.withdrawn(request_id, claimed=outcome is m.ReleaseOutcome.CLAIMED)
            case ev.Ordered(request_id, reason):
                self._heard[request_id] = f"ordered: {reason}"
                self._recorder.count(f"ordered_{reason}")
                self._retention.release(request_id)
            case ev.Dropped(request_id, _):
                self._retention.release(request_id)
            case _:
                self._recorder.count(type(event).__name__.lower())
        if not isinstance(event, ev.Dropped):  # that one comes while the outbox is being read
            self.step()


class UnaryEngine:
    """An engine that calls, and hears no orders: it frees what it withdrew, and what has had its time."""

    def __init__(self, engine_id: str, address: str, recorder: h.Recorder) -> None:
        self.engine_id = engine_id
        self.held: dict[str, float] = {}
        """When the blocks of each request end, of those whose announcement was answered.

        What was announced without an answer is never withdrawn: the announcement may still come to pass.
        """
        self._epoch = 0
        self._recorder = recorder
        self._client = RecordingClient(address, recorder, timeout_s=1.5)
        self._renewing = asyncio.create_task(self._renew())

    @property
    def ready(self) -> bool:
        """Whether it may announce."""
        return bool(self._epoch)

    async def _renew(self) -> None:
        lease_s = 3.0
        while True:
            try:
                if not self._epoch:
                    given = await self._client.register_engine(spec(self.engine_id))
                    self.held.clear()
                    self._epoch, lease_s = given.engine_epoch, given.lease_ttl_s
                await self._client.renew_engine(m.EngineId(self.engine_id), self._epoch)
            except (UnknownEngineError, StaleEpochError) as error:
                self._recorder.count(f"engine_{type(error).__name__}")
                self._epoch = 0
            except ControlPlaneError as error:
                self._recorder.count(f"engine_{type(error).__name__}")
            await asyncio.sleep(lease_s / 4)

    async def announce(self, conversation: str, request_id: str, turn: int, life_s: float) -> None:
        """Retain a turn's blocks for so long."""
        epoch, now = self._epoch, time.monotonic()
        where = h.Place(self.engine_id, epoch, request_id)
        self._recorder.record(h.Announcing(where, conversation, turn, now + life_s, now))
        value = announcement(self.engine_id, conversation, request_id, turn, life_s)
        result = await self._client.announce_location(m.EngineId(self.engine_id), epoch, value)
        self._recorder.record(h.Announced(where, str(result.outcome), time.monotonic()))
        self._recorder.count(f"announced_{result.outcome}")
        if self._epoch == epoch:
            self.held[request_id] = now + life_s

    async def withdraw(self, request_id: str) -> None:
        """Ask for blocks back; without an answer they are kept."""
        where = h.Place(self.engine_id, self._epoch, request_id)
        outcome = await self._client.withdraw_location(
            m.EngineId(self.engine_id), self._epoch, m.RequestId(request_id)
        )
        self._recorder.count(f"withdrawn_{outcome}")
        if outcome in _AGREED:
            self.held.pop(request_id, None)
            self._recorder.record(h.MayFree(where, f"withdrawn: {outcome}", time.monotonic()))

    async def set_life(self, request_id: str, life_s: float) -> None:
        """Keep blocks for longer or shorter; without an answer the longer life is kept."""
        where, now = h.Place(self.engine_id, self._epoch, request_id), time.monotonic()
        self._recorder.record(h.Renewing(where, now + life_s, now))
        self.held[request_id] = max(self.held.get(request_id, 0.0), now + life_s)
        (result,) = await self._client.renew_locations(
            m.EngineId(self.engine_id), self._epoch, {m.RequestId(request_id): life_s}
        )
        self._recorder.record(h.Renewed(where, result.renewed, time.monotonic()))
        self._recorder.count(f"renewed_{result.renewed}")
        if result.renewed and request_id in self.held:
            self.held[request_id] = now + life_s

    def step(self) -> None:
        """Free what has had its time."""
        now = time.monotonic()
        for request_id in [name for name, expires_at in self.held.items() if expires_at <= now]:
            del self.held[request_id]

    async def die(self) -> None:
        """Be gone without a word."""
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        await self._client.aclose()
        self._recorder.record(h.Died(self.engine_id, time.monotonic()))
