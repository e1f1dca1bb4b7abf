"""One engine's stream: what it says is applied and acknowledged, orders for it are passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import structlog

from kvplane.controlplane import convert, keys, records, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.errors import (
    ContentionError,
    EngineDrainingError,
    InvalidFieldError,
    ShuttingDownError,
    StaleEpochError,
    SupersededStreamError,
    UnknownEngineError,
)
from kvplane.controlplane.feed import Feed
from kvplane.controlplane.ledger import Ledger
from kvplane.controlplane.locations import Locations
from kvplane.controlplane.releases import Releases
from kvplane.store.base import Event
from kvplane.store.errors import InvalidStoreRequestError
from kvplane.v1 import common_pb2, engine_pb2

log = structlog.get_logger(__name__)

_MAX_UNREAD = 64
"""Acknowledgements that may wait for the engine to read them."""
_STOP_S = 5.0
"""How long a reader that does not stop is waited for."""


class Attachments:
    """Serves AttachEngine."""

    def __init__(
        self, ledger: Ledger, engines: EngineRegistry, locations: Locations, releases: Releases, feed: Feed
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._locations = locations
        self._releases = releases
        self._feed = feed
        self._open: dict[tuple[str, int], _Conversation] = {}

    def close(self) -> None:
        """End all streams as unavailable, so that engines attach to another replica at once."""
        for conversation in self._open.values():
            conversation.end(ShuttingDownError())

    async def serve(
        self, requests: AsyncIterator[engine_pb2.AttachEngineRequest]
    ) -> AsyncIterator[engine_pb2.AttachEngineResponse]:
        """Speak with one engine until either side ends. Raises what ends it."""
        first = await anext(requests, None)
        if first is None or not first.HasField("hello"):
            raise InvalidFieldError("hello", "must be in the first message of the stream")
        engine_id = validate.text("hello.engine_id", first.hello.engine_id)
        engine_epoch = validate.epoch("hello.engine_epoch", first.hello.engine_epoch)
        required = await self._engines.require(engine_id, engine_epoch)
        conversation = _Conversation(self, engine_id, engine_epoch, draining=required.engine.draining)
        older = self._open.get((engine_id, engine_epoch))
        self._open[engine_id, engine_epoch] = conversation
        detach = self._engines.attach(engine_id, engine_epoch)
        log.info("engine_attached", engine_id=engine_id, engine_epoch=engine_epoch)
        unlisten = [
            self._feed.listen(keys.incarnation_orders(engine_id, engine_epoch), conversation.on_order),
            self._feed.listen(keys.engine(engine_id), conversation.on_engine),
        ]
        try:
            if older is not None:
                # What the engine said on it may still be on its way, and is void from here on.
                await older.stop_reading()
                older.end(SupersededStreamError(engine_id))
            conversation.start_reading(first, requests)
            await conversation.send_waiting_orders()
            while (answer := await conversation.answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                if answer.acknowledged_sequence:
                    conversation.was_read()
        finally:
            # What must happen comes before the first await: this may be cancelled again while it waits.
            if self._open.get((engine_id, engine_epoch)) is conversation:
                del self._open[engine_id, engine_epoch]
            for stop in unlisten:
                stop()
            detach()
            log.info("engine_detached", engine_id=engine_id, engine_epoch=engine_epoch)
            await conversation.stop_reading()

    async def apply(
        self, engine_id: str, engine_epoch: int, request: engine_pb2.AttachEngineRequest
    ) -> engine_pb2.AttachEngineResponse:
        """Apply one message of an engine, in order, and return its acknowledgement.

        A refused announcement is answered, a stale epoch or lost lease is raised.
        """
        for field in ("announcements", "withdrawals", "renewals", "freed"):
            validate.batch(field, len(getattr(request, field)))
        load = convert.load_in(request.load) if request.HasField("load") else None
        _, engine = await self._engines.renew(engine_id, engine_epoch, load)
        answer = engine_pb2.AttachEngineResponse(
            acknowledged_sequence=request.sequence, draining=engine.draining
        )
        for freed in request.freed:
            validate.text("freed.request_id", freed.request_id)
            await self._releases.freed(m.Holder(engine_id, engine_epoch, freed.request_id))
        for wire in request.announcements:
            answer.announcements.append(await self._announce(engine_id, engine_epoch, wire))
        for withdrawal in request.withdrawals:
            validate.text("withdrawals.request_id", withdrawal.request_id)
            holder = m.Holder(engine_id, engine_epoch, withdrawal.request_id)
            outcome = await self._releases.withdraw(holder)
            answer.withdrawals.add(request_id=withdrawal.request_id, outcome=convert.outcome_out(outcome))
        for renewal in request.renewals:
            holder = m.Holder(engine_id, engine_epoch, renewal.request_id)
            granted_s = await self._locations.renew(holder, validate.span("renewals.ttl", renewal.ttl))
            answer.renewals.append(convert.renewed_out(renewal.request_id, granted_s))
        return answer

    async def _announce(
        self, engine_id: str, engine_epoch: int, wire: common_pb2.Announcement
    ) -> common_pb2.AnnouncementResult:
        try:
            validate.announcement(wire, engine_id, "announcements")
            value = convert.announcement_in(wire)
            result = await self._locations.announce(engine_id, engine_epoch, value)
        except (UnknownEngineError, StaleEpochError):
            raise
        except (InvalidFieldError, EngineDrainingError, ContentionError, InvalidStoreRequestError) as error:
            log.warning("announcement_refused", engine_id=engine_id, cause=str(error))
            result = m.Announced(m.AnnounceOutcome.REFUSED, detail=str(error))
        return convert.announced_out(wire.request_id, result)

    async def waiting_orders(self, engine_id: str, engine_epoch: int) -> list[m.Order]:
        """Return the orders that wait for an incarnation."""
        prefix = keys.incarnation_orders(engine_id, engine_epoch)
        return [
            records.load_order(keys.holder_of(item.key), item.value)
            async for item in self._ledger.scan(prefix)
        ]


class _Conversation:
    """The state of one stream."""

    def __init__(
        self, attachments: Attachments, engine_id: str, engine_epoch: int, *, draining: bool
    ) -> None:
        self._attachments = attachments
        self._engine_id = engine_id
        self._engine_epoch = engine_epoch
        self._draining = draining
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
                await self._apply(request)
        except Exception as error:
            self.answers.put_nowait(error)
        else:
            self.answers.put_nowait(None)

    async def _apply(self, request: engine_pb2.AttachEngineRequest) -> None:
        await self._room.acquire()  # an engine that does not read is not listened to
        answer = await self._attachments.apply(self._engine_id, self._engine_epoch, request)
        self._draining = answer.draining
        self.answers.put_nowait(answer)

    async def send_waiting_orders(self) -> None:
        """Send the orders given while the engine was away."""
        orders = await self._attachments.waiting_orders(self._engine_id, self._engine_epoch)
        if orders:
            self._send(orders)

    def on_order(self, event: Event) -> None:
        """Pass a new order on."""
        if event.current is not None:
            self._send([records.load_order(keys.holder_of(event.key), event.current.value)])

    def _send(self, orders: list[m.Order]) -> None:
        wire = [convert.order_out(order) for order in orders]
        answer = engine_pb2.AttachEngineResponse(release_orders=wire, draining=self._draining)
        self.answers.put_nowait(answer)

    def on_engine(self, event: Event) -> None:
        """Tell the engine that it drains, or end the stream of an incarnation that is over."""
        engine = records.load_engine(event.current.value) if event.current is not None else None
        if engine is None:
            self.answers.put_nowait(UnknownEngineError(self._engine_id))
        elif engine.engine_epoch > self._engine_epoch:
            error = StaleEpochError(self._engine_id, self._engine_epoch, engine.engine_epoch)
            self.answers.put_nowait(error)
        elif engine.draining:
            self._draining = True
            self.answers.put_nowait(engine_pb2.AttachEngineResponse(draining=True))
