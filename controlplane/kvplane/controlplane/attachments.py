"""One engine's stream: what it says is applied and acknowledged, orders for it are passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import structlog

from kvplane.controlplane import convert, eager, keys, records, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.callers import CURRENT, Caller
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.errors import (
    AddressNotAllowedError,
    ContentionError,
    EngineDrainingError,
    InvalidFieldError,
    ShuttingDownError,
    StaleEpochError,
    SupersededStreamError,
    TenantNotAllowedError,
    UnknownEngineError,
)
from kvplane.controlplane.ledger import Ledger, understood
from kvplane.controlplane.locations import Locations
from kvplane.controlplane.releases import Releases
from kvplane.controlplane.throttle import Throttle
from kvplane.store.base import Event
from kvplane.store.errors import InvalidStoreRequestError, StoreError
from kvplane.v1 import common_pb2, engine_pb2

log = structlog.get_logger(__name__)

T = TypeVar("T")

_REFUSALS = (
    InvalidFieldError,
    EngineDrainingError,
    InvalidStoreRequestError,
    AddressNotAllowedError,
    TenantNotAllowedError,
)
"""What is wrong with an announcement, and no reason to end the stream."""
_MAX_ORDERS = 1024
"""Orders of a kind in one message."""
_SMALL_MS = 1000
"""What a location lacks of the life that is wanted of it, and its engine is not asked for."""
_MAX_UNREAD = 64
"""Acknowledgements that may wait for the engine to read them."""
_TELL_AGAIN_S = 0.25
_STOP_S = 5.0
"""How long a reader that does not stop is waited for."""


class Attachments:
    """Serves AttachEngine."""

    def __init__(
        self, ledger: Ledger, engines: EngineRegistry, locations: Locations, releases: Releases
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._locations = locations
        self._releases = releases
        self._open: dict[tuple[str, int], _Conversation] = {}
        self._transit: dict[tuple[str, int], float] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._closing = False
        self._refused = Throttle()
        ledger.mirror.listen(keys.ORDERS, self._on_order)
        ledger.mirror.listen(keys.LOCATIONS, self._on_location)
        ledger.mirror.listen(keys.ENGINES, self._on_engine)

    @property
    def streams(self) -> int:
        """Number of engines whose streams are open here."""
        return len(self._open)

    def close(self) -> None:
        """End all streams as unavailable, so that engines attach to another replica at once."""
        self._closing = True
        for conversation in self._open.values():
            conversation.end(ShuttingDownError())

    async def aclose(self) -> None:
        """Let go of what still has to be told. Idempotent."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def serve(
        self, requests: AsyncIterator[engine_pb2.AttachEngineRequest]
    ) -> AsyncIterator[engine_pb2.AttachEngineResponse]:
        """Speak with one engine until either side ends. Raises what ends it."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise InvalidFieldError("hello", "must be in the first message of the stream")
        validate.positive("sequence", first.sequence)
        engine_id = validate.text("hello.engine_id", first.hello.engine_id)
        engine_epoch = validate.epoch("hello.engine_epoch", first.hello.engine_epoch)
        if (caller := CURRENT.get()) is not None:
            caller.require_engine(engine_id)
        at = (engine_id, engine_epoch)
        stream = await self._engines.attach(engine_id, engine_epoch)
        draining = self._engines.checked(engine_id, engine_epoch).engine.draining
        conversation = _Conversation(self, at, stream, caller, draining=draining)
        older = self._open.get(at)
        self._open[at] = conversation
        self._ledger.tally.engines["attached"] += 1
        log.info("engine_attached", engine_id=engine_id, engine_epoch=engine_epoch, stream=stream)
        try:
            if older is not None:
                self._ledger.tally.engines["superseded_stream"] += 1
                # What the engine said on it may still be on its way, and is void from here on.
                await older.stop_reading()
                older.end(SupersededStreamError(engine_id))
            conversation.start_reading(first, requests)
            await conversation.send_waiting_orders()
            await conversation.send_due_renewals()
            while (answer := await conversation.answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                conversation.complete(answer)
                yield answer
                if answer.acknowledged_sequence:
                    conversation.was_read()
        finally:
            # What must happen comes before the first await: this may be cancelled again while it waits.
            if self._open.get(at) is conversation:
                del self._open[at]
                self._lost(at, stream)
            self._ledger.tally.engines["detached"] += 1
            log.info("engine_detached", engine_id=engine_id, engine_epoch=engine_epoch, stream=stream)
            await conversation.stop_reading()

    def _lost(self, at: tuple[str, int], stream: int) -> None:
        """The engine has no stream here any more: tell the other replicas, unless it was sent to them."""
        self._engines.detach(*at, stream)
        if not self._closing:
            task = asyncio.create_task(self._tell_silent(at, stream), name="tell-silent")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_silent(self, at: tuple[str, int], stream: int) -> None:
        """Tell it again until it is told: an etcd that comes back lets the lease begin anew."""
        warned = False
        while True:
            try:
                await self._engines.tell_silent(*at, stream)
                return
            except (StoreError, ContentionError) as error:
                if not warned:
                    log.warning("engine_silence_not_told", engine_id=at[0], cause=str(error))
                warned = True
            await self._ledger.clock.sleep(_TELL_AGAIN_S)

    def _on_order(self, event: Event) -> None:
        if event.current is not None and self._open:
            holder = keys.holder_of(event.key)
            conversation = self._open.get((holder.engine_id, holder.engine_epoch))
            if conversation is not None:
                conversation.send([records.load_order(holder, event.current.value)])

    def _on_location(self, event: Event) -> None:
        """Have a location's life prolonged when more is wanted of it than before.

        Not when its engine has made less of it than is wanted: it had its reasons.
        """
        if event.current is None or not self._open:
            return
        if records.location_lacks_ms(event.current.value) <= _SMALL_MS:
            return
        holder, until_ms = records.location_wish(event.current.value)
        before = None if event.previous is None else understood(event.previous, records.location_wish)
        if before is not None and before[0] == holder and until_ms <= before[1]:
            return
        conversation = self._open.get((holder.engine_id, holder.engine_epoch))
        if conversation is not None:
            conversation.want({holder.request_id: until_ms})

    def _on_engine(self, event: Event) -> None:
        if event.previous is not None:
            before = records.load_engine(event.previous.value)
            at = (before.spec.engine_id, before.engine_epoch)
            engine = records.load_engine(event.current.value) if event.current is not None else None
            conversation = self._open.get(at)
            if conversation is not None:
                conversation.on_engine(engine)
            if engine is None or engine.engine_epoch != before.engine_epoch:
                self._transit.pop(at, None)

    def delay_s(self, at: tuple[str, int], sent_at_ms: int) -> float:
        """Return how much longer a message was on its way than the fastest from the same incarnation."""
        if not sent_at_ms:
            return 0.0
        passed = self._ledger.clock.monotonic() - sent_at_ms / 1000
        fastest = self._transit[at] = min(passed, self._transit.get(at, passed))
        return passed - fastest

    async def apply(
        self,
        at: tuple[str, int],
        stream: int,
        request: engine_pb2.AttachEngineRequest,
        caller: Caller | None = None,
    ) -> engine_pb2.AttachEngineResponse:
        """Apply one message of an engine and return its acknowledgement.

        Kinds are applied in the order of the answer's fields; elements of one kind concurrently. A refused
        announcement is answered, and so is an element that names nothing that can be on record: it would be
        said again at each attach, and end each stream. A stale epoch, newer stream or lost lease is raised.
        """
        engine_id, engine_epoch = at
        if caller is not None:
            caller.require_engine(engine_id)
        for field in ("announcements", "withdrawals", "renewals", "freed"):
            validate.batch(field, len(getattr(request, field)))
        delay_s = self.delay_s(at, request.sent_at_ms)
        load = convert.load_in(validate.load(request.load)) if request.HasField("load") else None
        _, engine = await self._engines.renew(engine_id, engine_epoch, load, stream=stream)
        answer = engine_pb2.AttachEngineResponse(
            acknowledged_sequence=request.sequence, draining=engine.draining
        )
        if request.freed:
            await self._each([self._freed(at, wire) for wire in request.freed])
        if request.announcements:
            results = answer.announcements
            await self._each(
                [
                    self._announce(at, stream, wire, delay_s, results.add(), caller)
                    for wire in request.announcements
                ]
            )
        if request.withdrawals:
            answer.withdrawals.extend(
                await self._each([self._withdraw(at, wire) for wire in request.withdrawals])
            )
        if request.renewals:
            answer.renewals.extend(
                await self._each([self._renew(at, wire, delay_s) for wire in request.renewals])
            )
        return answer

    async def _each(self, coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
        return await eager.gather(coroutines, self._ledger.start)

    async def _freed(self, at: tuple[str, int], wire: engine_pb2.Freed) -> None:
        if validate.is_id(wire.request_id):
            await self._releases.freed(m.Holder(*at, wire.request_id))

    async def _withdraw(
        self, at: tuple[str, int], wire: engine_pb2.Withdrawal
    ) -> engine_pb2.WithdrawalResult:
        outcome = m.ReleaseOutcome.NOTHING
        if validate.is_id(wire.request_id):
            outcome = await self._releases.withdraw(m.Holder(*at, wire.request_id))
        return engine_pb2.WithdrawalResult(request_id=wire.request_id, outcome=convert.outcome_out(outcome))

    async def _renew(
        self, at: tuple[str, int], wire: common_pb2.Renewal, delay_s: float
    ) -> common_pb2.RenewalResult:
        granted_s = None
        if validate.is_id(wire.request_id):
            ttl_s = wire.ttl.seconds + wire.ttl.nanos / 1e9 - delay_s  # none may be left
            granted_s = await self._locations.renew(m.Holder(*at, wire.request_id), max(0.0, ttl_s))
        return convert.renewed_out(wire.request_id, granted_s)

    async def _announce(
        self,
        at: tuple[str, int],
        stream: int,
        wire: common_pb2.Announcement,
        delay_s: float,
        answer: common_pb2.AnnouncementResult,
        caller: Caller | None,
    ) -> None:
        engine_id, engine_epoch = at
        try:
            validate.announcement(wire, engine_id, "announcements")
            if caller is not None:
                caller.require_announcement(wire)
            value = convert.announcement_in(wire, delay_s)
            result = await self._locations.announce(engine_id, engine_epoch, value, stream=stream)
        except _REFUSALS as error:
            unlogged = self._refused.due("announcement")
            if unlogged is not None:
                log.warning("announcement_refused", engine_id=engine_id, cause=str(error), unlogged=unlogged)
            result = m.Announced(m.AnnounceOutcome.REFUSED, detail=str(error))
            self._ledger.tally.announcements[m.AnnounceOutcome.REFUSED] += 1
        convert.write_announced(answer, wire.request_id, result)

    async def waiting_orders(self, engine_id: str, engine_epoch: int) -> list[m.Order]:
        """Return the orders that wait for an incarnation."""
        orders = list[m.Order]()
        async for item in self._ledger.scan(keys.incarnation_orders(engine_id, engine_epoch)):
            order = understood(item, partial(records.load_order, keys.holder_of(item.key)))
            if order is not None:
                orders.append(order)
        return orders

    async def due_renewals(self, engine_id: str, engine_epoch: int) -> dict[str, int]:
        """Return until when those of an incarnation's requests are wanted that would not live as long."""
        due, number = dict[str, int](), 0
        async for item in self._ledger.scan(keys.incarnation_holdings(engine_id, engine_epoch)):
            number += 1
            if not number % eager.SLICE:
                await asyncio.sleep(0)  # what never waits would hold up all others
            location_key, _ = understood(item, records.load_holding) or (b"", "")
            stored = self._ledger.mirror.get(location_key) if location_key else None
            lacks_ms = None if stored is None else understood(stored, records.location_lacks_ms)
            if stored is not None and lacks_ms is not None and lacks_ms > _SMALL_MS:
                holder, until_ms = records.location_wish(stored.value)
                if keys.holding(holder) == item.key:
                    due[holder.request_id] = until_ms
        return due

    def ordered(self, order: m.Order) -> None:
        """Count an order that is sent."""
        self._ledger.tally.orders[order.reason] += 1

    def now_ms(self) -> int:
        """Return the time by which deadlines are."""
        return self._ledger.clock.now_ms()


class _Conversation:
    """The state of one stream."""

    def __init__(
        self,
        attachments: Attachments,
        at: tuple[str, int],
        stream: int,
        caller: Caller | None,
        *,
        draining: bool,
    ) -> None:
        self._attachments = attachments
        self._caller = caller
        self._at = at
        self._stream = stream
        self._draining = draining
        self._sequence = 0
        self._orders: list[m.Order] = []
        self._wanted: dict[str, int] = {}  # until when, by request
        self._room = asyncio.Semaphore(_MAX_UNREAD)
        self._stopped = False
        self._reading: asyncio.Task[None] | None = None
        self.answers: asyncio.Queue[engine_pb2.AttachEngineResponse | Exception | None] = asyncio.Queue()

    def was_read(self) -> None:
        """Note that an acknowledgement was taken."""
        self._room.release()

    def end(self, error: Exception) -> None:
        """Have the stream end with an error."""
        self.answers.put_nowait(error)

    def start_reading(
        self,
        first: engine_pb2.AttachEngineRequest,
        requests: AsyncIterator[engine_pb2.AttachEngineRequest],
    ) -> None:
        """Apply messages from now on, in a task of its own; not if stopped before."""
        if not self._stopped:
            self._reading = asyncio.create_task(self._read(first, requests))

    async def stop_reading(self) -> None:
        """Apply nothing more; one that is being applied is done or undone when this returns."""
        self._stopped = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,), timeout=_STOP_S)

    async def _read(
        self,
        first: engine_pb2.AttachEngineRequest,
        requests: AsyncIterator[engine_pb2.AttachEngineRequest],
    ) -> None:
        """Apply messages until the engine ends the stream or one cannot be applied."""
        try:
            await self._apply(first)
            async for request in requests:
                if request.HasField("hello"):
                    raise InvalidFieldError("hello", "must be in the first message only")
                await self._apply(request)
        except Exception as error:
            self.answers.put_nowait(error)
        else:
            self.answers.put_nowait(None)

    async def _apply(self, request: engine_pb2.AttachEngineRequest) -> None:
        if request.sequence <= self._sequence:
            problem = f"must be greater than that of the message before, {self._sequence}"
            raise InvalidFieldError("sequence", problem)
        self._sequence = request.sequence
        await self._room.acquire()  # an engine that does not read is not listened to
        answer = await self._attachments.apply(self._at, self._stream, request, self._caller)
        self._draining = answer.draining
        self.answers.put_nowait(answer)

    async def send_waiting_orders(self) -> None:
        """Send the orders given while the engine was away."""
        orders = await self._attachments.waiting_orders(*self._at)
        if orders:
            self.send(orders)

    def send(self, orders: list[m.Order]) -> None:
        """Pass orders on to the engine: with its next answer, all that have come together by then."""
        if orders:
            self._have_answered()
            self._orders.extend(orders)

    async def send_due_renewals(self) -> None:
        """Send what is wanted of the engine's locations, whether or not it was sent before."""
        if not self._draining:
            self.want(await self._attachments.due_renewals(*self._at))

    def want(self, until_ms: dict[str, int]) -> None:
        """Ask the engine for longer lives, in the same way."""
        if until_ms:
            self._have_answered()
            self._wanted.update(until_ms)

    def _have_answered(self) -> None:
        """Have an answer sent for what is about to wait for one, unless one is coming."""
        if not self._orders and not self._wanted:
            self.answers.put_nowait(engine_pb2.AttachEngineResponse())

    def complete(self, answer: engine_pb2.AttachEngineResponse) -> None:
        """Put into an answer what goes with every one, as it is sent."""
        answer.draining = self._draining
        taken = self._orders[:_MAX_ORDERS]
        del self._orders[:_MAX_ORDERS]
        answer.release_orders.extend([convert.order_out(order) for order in taken])
        for order in taken:
            self._attachments.ordered(order)
        if self._wanted:
            now, some = self._attachments.now_ms(), list(islice(self._wanted.items(), _MAX_ORDERS))
            for request_id, until_ms in some:
                del self._wanted[request_id]
                if until_ms > now:
                    answer.renewal_orders.append(convert.renewal_order_out(request_id, until_ms - now))
        if self._orders or self._wanted:
            self.answers.put_nowait(engine_pb2.AttachEngineResponse())

    def on_engine(self, engine: m.Engine | None) -> None:
        """Tell the engine that it drains, or end a stream that a newer one or another incarnation voids."""
        engine_id, engine_epoch = self._at
        if engine is None:
            self.end(UnknownEngineError(engine_id))
        elif engine.engine_epoch > engine_epoch:
            self.end(StaleEpochError(engine_id, engine_epoch, engine.engine_epoch))
        elif engine.stream > self._stream:
            self.end(SupersededStreamError(engine_id))
        elif engine.draining and not self._draining:
            self._draining = True
            self.answers.put_nowait(engine_pb2.AttachEngineResponse())
