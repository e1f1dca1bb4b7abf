"""An engine's session with the control plane: registered, attached, announcing, and back after every loss."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kvplane.client import convert
from kvplane.client import events as ev
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import (
    ControlPlaneError,
    ControlPlaneUnavailableError,
    StaleEpochError,
    UnknownEngineError,
)
from kvplane.client.logs import get_logger, trace
from kvplane.client.outbox import Batch, Outbox
from kvplane.client.sparing import Sparing
from kvplane.v1 import engine_pb2

FIRST_RETRY_S = 0.2
LAST_RETRY_S = 1.0
CONNECT_S = 2.0
# Shares of the engine's lease: with several replicas, two that hang can be given up before it ends.
_HEARTBEAT = 0.2
_SILENCE = 0.3
_MAX_UNACKNOWLEDGED = 2  # what is said meanwhile goes together with the next message
_FIRST_ANSWER_S = 2.0  # a replica that does not answer the first message is given up for the next
_LOOK_S = 0.1  # how often a pause without a connection looks for one
_TICK_S = 1.0  # how often a changed load is looked for
_SETTLE_S = 2.0  # how long a new incarnation waits for answers to withdrawals

_log = get_logger("kvplane.session")


@dataclass(slots=True)
class _Sent:
    at: float
    batch: Batch


class EngineSession:
    """Keeps one engine on the control plane's record. Belongs to one event loop; `run` is its life.

    What the engine has to say goes into `outbox` at any time, from any thread, followed by `wake` on the
    loop. What comes back goes to `on_event`, on the loop. With the control plane away nothing fails and
    nothing grows without bound.

    Args:
        client: to call with; the session closes it.
        spec: the engine, as it registers.
        outbox: shared with the engine.
        on_event: called on the loop, must return at once.
        monotonic: clock of the outbox's deadlines.
        sleep: waits between attempts to reconnect.
        margin_s: an acknowledgement slower than this is followed by a renewal with the true life left.
    """

    def __init__(
        self,
        client: ControlPlaneClient,
        spec: m.EngineSpec,
        outbox: Outbox,
        on_event: Callable[[ev.Event], None],
        *,
        monotonic: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        margin_s: float = 5.0,
        address: str = "",
    ) -> None:
        self._client = client
        self._where = {"kvplane_address": address} if address else {}
        self._spec = spec
        self._outbox = outbox
        self._on_event = on_event
        self._monotonic = monotonic
        self._sleep = sleep
        self._margin_s = margin_s
        self._registration: m.Registration | None = None
        self._process_id = uuid.uuid4().hex
        self._incarnations = 0
        self._stream = 0  # number of the current stream; older ones fall silent
        self._sequence = 0
        self._unacknowledged: OrderedDict[int, _Sent] = OrderedDict()
        self._wake = asyncio.Event()
        self._closing = False
        self._restart_by: float | None = None
        self._ping = False
        self._draining = False
        self._reached = False
        self._trouble = ""
        self._sparing = Sparing(monotonic)
        self.attached = False
        """Whether the control plane answers on a stream now."""
        self.fenced = False
        """Whether another incarnation took this one's place."""
        self.last_contact: float | None = None
        """Latest time at which the control plane can have heard of this engine; None: never."""

    @property
    def registration(self) -> m.Registration | None:
        """The current incarnation, if any."""
        return self._registration

    def wake(self) -> None:
        """Look at the outbox now."""
        self._wake.set()

    def start_incarnation(self) -> None:
        """Begin a new incarnation, which takes all locations of this one off the record.

        Put withdrawals in the outbox first: they are given two seconds to be answered.
        """
        self._restart_by = self._monotonic() + _SETTLE_S
        self._ping = True
        self.wake()

    async def run(self) -> None:
        """Stay registered and attached until cancelled, closed or fenced. Raises nothing of its own."""
        delay, cause = FIRST_RETRY_S, ""
        while not self._closing and not self.fenced:
            before, cause = cause, "ended"
            try:
                await self._live()
                if self._registration is None and not self._closing:  # a new incarnation was asked for
                    self._lose("new_incarnation")
                    continue
            except StaleEpochError:
                self._fence()
            except UnknownEngineError:
                self._registration, cause = None, "unknown_engine"
            except ControlPlaneError as error:
                cause = type(error).__name__
                if not self.attached:
                    self._report(cause, error)
            except Exception as error:  # a fault of ours must not end the session for good
                cause = f"fault {type(error).__name__}"
                self._report(cause, error, trace=trace(error))
            answered = self._lose(cause) or (cause == "unknown_engine" != before)
            delay = FIRST_RETRY_S if answered else min(2 * delay, LAST_RETRY_S)
            if not self._closing and not self.fenced:
                await self._pause(delay * random.uniform(0.5, 1.0))

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt; where there was no connection, not longer than until there is one.

        gRPC tries to connect meanwhile, at a pace of its own, which would add up with ours.
        """
        if self._client.connected:
            await self._sleep(seconds)
            return
        nap = asyncio.ensure_future(self._sleep(seconds))
        try:
            while not self._client.connected and not nap.done():
                await asyncio.wait((nap,), timeout=_LOOK_S)
        finally:
            nap.cancel()

    def _fence(self) -> None:
        self.fenced, self._registration = True, None
        hint = "another live engine has this id"
        _log.error("engine_fenced", engine_id=self._spec.engine_id, hint=hint)
        self._on_event(ev.Fenced())

    async def aclose(self, *, timeout_s: float = 1.0) -> None:
        """Take the engine off the record, if that is possible in time, and close the client. Idempotent."""
        self._closing = True
        self.wake()
        registration, self._registration = self._registration, None
        if registration is not None and not self.fenced:
            with contextlib.suppress(ControlPlaneError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._client.deregister_engine(self._spec.engine_id, registration.engine_epoch)
        await self._client.aclose()

    async def _live(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._client.wait_connected()
        except TimeoutError:
            raise ControlPlaneUnavailableError(f"no connection within {CONNECT_S:g} s") from None
        self._reached = True
        if self._registration is None:
            self._registration = await self._client.register_engine(
                self._spec, request_id=f"{self._process_id}#{self._incarnations + 1}"
            )
            self._restart_by = None
            self._incarnations += 1
            self.last_contact = self._monotonic()
            self._tell(
                _log.info,
                "engine_registered",
                engine_epoch=self._registration.engine_epoch,
                role=str(self._spec.role),
            )
            self._on_event(ev.Registered(self._registration, self._incarnations == 1))
        silence_s = _SILENCE * self._registration.lease_ttl_s
        self._stream += 1
        self._outbox.restart()
        answers = self._client.attach_engine(self._messages(self._stream, self._registration))
        try:
            patience_s = min(_FIRST_ANSWER_S, silence_s)
            while not self._closing:
                async with asyncio.timeout(patience_s):
                    message = await anext(answers)
                patience_s = silence_s
                self._receive(message)
                if self._restart_by is not None and self._settled():
                    self._registration = None
                    return
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise ControlPlaneUnavailableError(f"no answer for {patience_s:g} s") from error
        finally:
            self._stream += 1
            self.wake()
            close = getattr(answers, "aclose", None)
            if close is not None:
                await close()

    async def _messages(
        self, stream: int, registration: m.Registration
    ) -> AsyncIterator[engine_pb2.AttachEngineRequest]:
        hello: engine_pb2.EngineHello | None = engine_pb2.EngineHello(
            engine_id=self._spec.engine_id, engine_epoch=registration.engine_epoch
        )
        heartbeat_s = _HEARTBEAT * registration.lease_ttl_s
        said = self._monotonic()
        while stream == self._stream and not self._closing:
            self._wake.clear()
            now = self._monotonic()
            waiting = self._outbox.urgent or self._outbox.load_due or self._ping
            has_room = len(self._unacknowledged) < _MAX_UNACKNOWLEDGED
            if has_room and (hello or waiting or now - said >= heartbeat_s):
                self._ping = False
                batch, expired = self._outbox.take()
                for request_id in expired:
                    self._on_event(ev.Dropped(request_id, "expired"))
                self._sequence += 1
                self._unacknowledged[self._sequence] = _Sent(now, batch)
                message = _to_wire(self._sequence, batch, sent_at_ms=max(1, int(now * 1000)))
                if hello:
                    message.hello.CopyFrom(hello)
                    hello = None
                said = now
                yield message
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(heartbeat_s, _TICK_S)):
                    await self._wake.wait()

    def _receive(self, message: engine_pb2.AttachEngineResponse) -> None:
        self.last_contact = now = self._monotonic()
        if not self.attached:
            self.attached, self._trouble = True, ""
            self._tell(_log.info, "control_plane_attached", held=len(self._outbox))
        while self._unacknowledged and next(iter(self._unacknowledged)) <= message.acknowledged_sequence:
            _, sent = self._unacknowledged.popitem(last=False)
            if now - sent.at > self._margin_s:
                # On record it may outlive the blocks: its life began to count only when it arrived.
                for announcement in sent.batch.announcements:
                    self._outbox.renew(announcement.request_id)
                for request_id in sent.batch.renewals:
                    self._outbox.renew(request_id)
        for wire in message.announcements:
            self._on_event(ev.Announced(convert.announcement_result_from_wire(wire)))
        for withdrawal in message.withdrawals:
            request_id = m.RequestId(withdrawal.request_id)
            outcome = convert.release_outcome_from_wire(withdrawal.outcome)
            if self._outbox.withdrawn(request_id, outcome):
                self._on_event(ev.Withdrawn(request_id, outcome))
        for order in message.release_orders:
            request_id = m.RequestId(order.request_id)
            if self._outbox.ordered(request_id):
                self._on_event(ev.Ordered(request_id, convert.release_reason_from_wire(order.reason)))
        for wanted in message.renewal_orders:
            self._on_event(ev.RenewalOrdered(m.RequestId(wanted.request_id), convert.seconds(wanted.ttl)))
        for renewal in message.renewals:
            self._on_event(ev.Renewed(m.RequestId(renewal.request_id), renewal.renewed))
        if message.draining != self._draining:
            self._draining = message.draining
            self._on_event(ev.DrainRequested(message.draining))
        if self._outbox.urgent:
            self.wake()

    def _settled(self) -> bool:
        if self._restart_by is not None and self._monotonic() >= self._restart_by:
            return True
        return not self._outbox.withdrawing

    def _lose(self, cause: str = "ended") -> bool:
        """Note that the stream is over; returns whether it had been answered at all."""
        self._outbox.lost(sent.batch for sent in self._unacknowledged.values())
        self._unacknowledged.clear()
        was_attached, self.attached = self.attached, False
        reached, self._reached = self._reached, False
        if was_attached or (reached and self._registration is not None):
            # It may have heard us and kept our lease, although no answer came in time.
            self.last_contact = self._monotonic()
        if was_attached and not self._closing and not self.fenced:
            self._trouble = cause
            self._tell(_log.warning, "control_plane_lost", cause=cause, **self._where)
        return was_attached

    def _report(self, trouble: str, error: Exception, **more: str) -> None:
        """Log why there is no stream: once, until it is something else or an answer comes."""
        if trouble == self._trouble or self._closing:
            return
        self._trouble = trouble
        unavailable = isinstance(error, ControlPlaneUnavailableError)
        self._tell(
            _log.warning,
            "control_plane_unreachable" if unavailable else "control_plane_refused",
            error=type(error).__name__ if more else str(error),
            **self._where,
            **more,
        )

    def _tell(self, log: Callable[..., object], event: str, **fields: object) -> None:
        """Log an event that a broken control plane may bring about for hours; a few times an hour."""
        more = self._sparing.fields(event)
        if more is not None:
            log(event, engine_id=self._spec.engine_id, **fields, **more)


def _to_wire(sequence: int, batch: Batch, *, sent_at_ms: int) -> engine_pb2.AttachEngineRequest:
    return engine_pb2.AttachEngineRequest(
        sequence=sequence,
        sent_at_ms=sent_at_ms,
        announcements=[convert.announcement_to_wire(announcement) for announcement in batch.announcements],
        withdrawals=[engine_pb2.Withdrawal(request_id=request_id) for request_id in batch.withdrawals],
        renewals=[convert.renewal_to_wire(request_id, ttl_s) for request_id, ttl_s in batch.renewals.items()],
        freed=[engine_pb2.Freed(request_id=request_id) for request_id in batch.freed],
        load=convert.load_to_wire(batch.load) if batch.load is not None else None,
    )
