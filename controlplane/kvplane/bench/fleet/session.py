"""An engine's session with the control planes, without the network: what is said, and when.

What is kept to be said is the client's own Outbox; what is said is done at the replica at once.
"""

from __future__ import annotations

from collections.abc import Callable

from kvplane.bench.fleet.planes import Planes, Replica
from kvplane.bench.fleet.simulation import Simulation
from kvplane.client import events as ev
from kvplane.client import model as c
from kvplane.client.errors import ControlPlaneUnavailableError
from kvplane.client.outbox import Outbox
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import (
    EngineDrainingError,
    InvalidFieldError,
    StaleEpochError,
    SupersededStreamError,
    UnknownEngineError,
)
from kvplane.store.errors import StoreError

_MESSAGE_S = 0.005
"""From what is to be said until its answer is back."""
_REATTACH_S = 0.5
_HEARTBEATS = 3
"""In the life of an engine's lease."""


class PlaneSession:
    """What Keeper needs of a session; see EngineSessionThread. `poke` is called when there are events."""

    def __init__(
        self,
        simulation: Simulation,
        planes: Planes | None,
        spec: m.EngineSpec,
        settings: m.Settings,
        poke: Callable[[], None],
    ) -> None:
        self._simulation = simulation
        self._planes = planes
        self._spec = spec
        self._settings = settings
        self._poke = poke
        self._monotonic = simulation.clock.monotonic
        self._outbox = Outbox(monotonic=self._monotonic)
        self._events: list[ev.Event] = []
        self._replica: Replica | None = None
        self._stream = 0
        self._incarnations = 0
        self._sending = False
        self._due = False
        self._closed = False
        self._draining = False
        self.registration: c.Registration | None = None
        """See Session."""
        self.last_contact: float | None = None
        """See Session."""

    @property
    def attached(self) -> bool:
        """See Session."""
        return self._replica is not None

    # What the engine says.

    def announce(self, announcement: c.Announcement, *, expires_at: float) -> None:
        """See Session."""
        for request_id in self._outbox.announce(announcement, expires_at=expires_at):
            self._tell(ev.Dropped(request_id, "full"))
        self._wake()

    def withdraw(self, request_id: c.RequestId) -> bool:
        """See Session."""
        known = self._outbox.withdraw(request_id)
        self._wake()
        return known

    def renew(self, request_id: c.RequestId, *, expires_at: float) -> bool:
        """See Session."""
        known = self._outbox.renew(request_id, expires_at=expires_at)
        self._wake()
        return known

    def freed(self, request_id: c.RequestId) -> None:
        """See Session."""
        self._outbox.freed(request_id)
        self._wake()

    def set_load(self, load: c.EngineLoad) -> None:
        """See Session."""
        self._outbox.set_load(load)

    def start_incarnation(self) -> None:
        """See Session: engines of the simulation do not reset their caches without dying."""
        raise NotImplementedError

    def drain_events(self) -> list[ev.Event]:
        """See Session."""
        events, self._events = self._events, []
        return events

    # What the replica says.

    def ordered(self, order: m.Order) -> None:
        """See Listener."""
        request_id = c.RequestId(order.holder.request_id)
        if self._outbox.ordered(request_id):
            self._tell(ev.Ordered(request_id, c.ReleaseReason[order.reason.name]))
        self._wake()

    def wanted(self, request_id: str, ttl_s: float) -> None:
        """See Listener."""
        if ttl_s > 0:
            self._tell(ev.RenewalOrdered(c.RequestId(request_id), ttl_s))

    def drained(self) -> None:
        """See Listener."""
        if not self._draining:
            self._draining = True
            self._tell(ev.DrainRequested(True))

    def lost(self) -> None:
        """See Listener."""
        self._replica = None
        if not self._closed:
            self._simulation.after(_REATTACH_S, lambda: self._simulation.start(self.attach()))

    # Life.

    async def attach(self) -> None:
        """Register if need be, and attach to one of the replicas; again a little later if none answers."""
        if self._planes is None or self._closed or self._replica is not None:
            return
        try:
            replica = self._planes.choose()
            plane = replica.plane
            if self.registration is None:
                self._incarnations += 1
                engine = await self._planes.measured("register", plane.engines.register(self._spec))
                settings = self._settings
                self.registration = c.Registration(
                    engine.engine_epoch,
                    settings.engine_lease_s,
                    settings.max_location_ttl_s,
                    settings.claim_life_s,
                )
                self._tell(ev.Registered(self.registration, self._incarnations == 1))
            self._outbox.restart()
            epoch = self.registration.engine_epoch
            self._stream = await self._planes.measured(
                "attach", plane.engines.attach(self._spec.engine_id, epoch)
            )
            if self._closed:
                return
            self._replica = replica
            replica.attached[self._spec.engine_id, epoch] = self
            self.last_contact = self._monotonic()
            for order in await plane.attachments.waiting_orders(self._spec.engine_id, epoch):
                self.ordered(order)
            wanted = await plane.attachments.due_renewals(self._spec.engine_id, epoch)
            for request_id, until_ms in wanted.items():
                self.wanted(request_id, (until_ms - self._simulation.clock.now_ms()) / 1000)
            self._wake()
        except (UnknownEngineError, StaleEpochError):
            self.registration = None
            self.lost()
        except (ControlPlaneUnavailableError, StoreError):
            self.lost()

    def beat(self) -> None:
        """Send what is due, if nothing else a heartbeat now and then; to be called about once a second."""
        if not self.attached or self._sending:
            return
        silent_s = self._monotonic() - (self.last_contact or 0.0)
        if self._outbox.load_due or silent_s >= self._settings.engine_lease_s / _HEARTBEATS:
            self._simulation.start(self._send(beat=True))

    def kill(self) -> None:
        """The engine is dead: its stream breaks."""
        self._closed = True
        replica, registration = self._replica, self.registration
        self._replica = None
        if replica is None or registration is None:
            return
        at = (self._spec.engine_id, registration.engine_epoch)
        replica.attached.pop(at, None)
        replica.plane.engines.detach(*at, self._stream)
        self._simulation.start(replica.plane.engines.tell_silent(*at, self._stream))

    async def leave(self) -> None:
        """Deregister: the engine ends as it should."""
        replica, registration, planes = self._replica, self.registration, self._planes
        self.kill()
        if replica is not None and registration is not None and planes is not None:
            await planes.measured(
                "deregister",
                replica.plane.engines.deregister(self._spec.engine_id, registration.engine_epoch),
            )

    def _tell(self, event: ev.Event) -> None:
        self._events.append(event)
        self._poke()

    def _wake(self) -> None:
        if not self._due and self.attached and self._outbox.urgent:
            self._due = True
            self._simulation.after(_MESSAGE_S, self._flush)

    def _flush(self) -> None:
        self._due = False
        if self.attached and not self._sending:
            self._simulation.start(self._send())

    async def _send(self, *, beat: bool = False) -> None:
        """Say all that waits, as one message does, and take the answers."""
        self._sending = True
        try:
            replica = self._replica
            if replica is not None and (beat or self._outbox.urgent):
                await self._message(replica)
        except (UnknownEngineError, StaleEpochError, SupersededStreamError):
            # As the client does: what was held is announced again by the next incarnation.
            if self.registration is not None and self._replica is not None:
                self._replica.attached.pop((self._spec.engine_id, self.registration.engine_epoch), None)
            self.registration = None
            self.lost()
        except StoreError:
            self.lost()
        finally:
            self._sending = False
        self._wake()

    async def _message(self, replica: Replica) -> None:
        registration, planes, plane = self.registration, self._planes, replica.plane
        assert registration is not None
        assert planes is not None
        engine_id, epoch = self._spec.engine_id, registration.engine_epoch
        batch, expired = self._outbox.take()
        for request_id in expired:
            self._tell(ev.Dropped(request_id, "expired"))
        load = None
        if batch.load is not None:
            of = batch.load
            load = m.EngineLoad(
                of.running_requests,
                of.waiting_requests,
                of.free_blocks,
                of.retained_blocks,
                of.retained_conversations,
            )
        # The registry keeps the lease with whatever an engine says; it is counted as what it was sent for.
        await planes.measured(
            "heartbeat" if load is None else "load",
            plane.engines.renew(engine_id, epoch, load, stream=self._stream),
        )
        self.last_contact = self._monotonic()
        for request_id in batch.freed:
            await planes.measured("freed", plane.releases.freed(m.Holder(engine_id, epoch, request_id)))
        for announcement in batch.announcements:
            await self._announce(planes, replica, engine_id, epoch, announcement)
        for request_id in batch.withdrawals:
            outcome = await planes.measured(
                "withdraw", plane.releases.withdraw(m.Holder(engine_id, epoch, request_id))
            )
            answer = c.ReleaseOutcome[outcome.name]
            if self._outbox.withdrawn(request_id, answer):
                self._tell(ev.Withdrawn(request_id, answer))
        for request_id, ttl_s in batch.renewals.items():
            granted_s = await planes.measured(
                "renew", plane.locations.renew(m.Holder(engine_id, epoch, request_id), ttl_s)
            )
            self._tell(ev.Renewed(request_id, granted_s is not None))

    async def _announce(
        self, planes: Planes, replica: Replica, engine_id: str, epoch: int, value: c.Announcement
    ) -> None:
        key = value.key
        announcement = m.Announcement(
            m.ConversationKey(key.tenant_id, key.model, key.adapter, key.conversation_id),
            value.request_id,
            value.turn,
            value.token_count,
            value.block_count,
            value.kv_transfer_params,
            m.Fingerprint(value.fingerprint.chunk_tokens, value.fingerprint.chain),
            value.ttl_s,
            value.endpoint,
            value.reannounced,
            0 if value.lease_class is None else value.lease_class + 1,  # as on the wire
        )
        try:
            done = await planes.measured(
                "announce",
                replica.plane.locations.announce(engine_id, epoch, announcement, stream=self._stream),
            )
        except (EngineDrainingError, InvalidFieldError) as error:
            done = m.Announced(m.AnnounceOutcome.REFUSED, detail=str(error))
        outcome = c.AnnounceOutcome[done.outcome.name]
        self._tell(
            ev.Announced(c.AnnouncementResult(value.request_id, outcome, done.granted_ttl_s, done.detail))
        )
