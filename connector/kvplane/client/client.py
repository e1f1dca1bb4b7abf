"""The async client: one method per RPC, values in and out, every call with a deadline."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from kvplane.client import convert
from kvplane.client import model as m
from kvplane.client.credentials import Credentials, Metadata
from kvplane.client.errors import from_rpc_error
from kvplane.client.link import Link, open_channel
from kvplane.client.streams import streamed
from kvplane.tracing.context import CURRENT, HEADER
from kvplane.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    location_pb2,
    location_pb2_grpc,
    status_pb2,
    status_pb2_grpc,
)

T = TypeVar("T")

__all__ = ["ControlPlaneClient", "open_channel"]


async def _call(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


class ControlPlaneClient:
    """Calls a control plane. Belongs to one event loop.

    Every method raises a ControlPlaneError: ControlPlaneUnavailableError when there was no answer within
    `timeout_s` seconds (each call may set its own), others as the errors module says. Misses are answers.
    `credentials` follow their files for as long as the client lives.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 2.0,
        channel: grpc.aio.Channel | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._link = Link(address, channel, credentials, self._use)

    def _use(self, channel: grpc.aio.Channel) -> None:
        # The generated stubs type async calls as sync ones.
        self._engines: Any = engine_pb2_grpc.EngineServiceStub(channel)
        self._locations: Any = location_pb2_grpc.LocationServiceStub(channel)
        self._status: Any = status_pb2_grpc.StatusServiceStub(channel)

    @property
    def _metadata(self) -> Metadata | None:
        if (span := CURRENT.get()) is None:
            return self._link.metadata
        return (*(self._link.metadata or ()), (HEADER, span.traceparent))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the channel; calls under way fail as unavailable. Idempotent."""
        await self._link.aclose()

    @property
    def connected(self) -> bool:
        """Whether there is a connection now; asking brings none about."""
        return self._link.channel.get_state() is grpc.ChannelConnectivity.READY

    async def wait_connected(self) -> None:
        """Connect, if need be, and wait for it; not before that can a call reach anyone.

        Raises ControlPlaneUnavailableError once an attempt has failed.
        """
        await self._link.wait_connected()

    async def look(self) -> None:
        """Look at the files of the credentials now, as is done every second."""
        await self._link.look()

    # Engines

    async def register_engine(self, spec: m.EngineSpec, *, request_id: str = "") -> m.Registration:
        """Start an incarnation; with a `request_id` repeating the call does not start another."""
        request = engine_pb2.RegisterEngineRequest(spec=convert.spec_to_wire(spec), request_id=request_id)
        answer = await _call(
            self._engines.RegisterEngine(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        return m.Registration(
            answer.engine_epoch,
            convert.seconds(answer.lease_ttl),
            convert.seconds(answer.max_location_ttl),
            convert.seconds(answer.claim_timeout),
        )

    async def renew_engine(
        self, engine_id: m.EngineId, engine_epoch: int, load: m.EngineLoad | None = None
    ) -> tuple[float, bool]:
        """Renew the lease; returns its ttl in seconds and whether the engine is to drain."""
        request = engine_pb2.RenewEngineRequest(
            engine_id=engine_id,
            engine_epoch=engine_epoch,
            load=convert.load_to_wire(load) if load is not None else None,
        )
        answer = await _call(
            self._engines.RenewEngine(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        return convert.seconds(answer.lease_ttl), answer.draining

    async def drain_engine(self, engine_id: m.EngineId) -> int:
        """Stop new locations and claims on an engine; returns the number of claims still open."""
        request = engine_pb2.DrainEngineRequest(engine_id=engine_id)
        answer = await _call(
            self._engines.DrainEngine(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        return int(answer.open_claims)

    async def deregister_engine(self, engine_id: m.EngineId, engine_epoch: int) -> None:
        """End an incarnation and all its locations. Idempotent."""
        request = engine_pb2.DeregisterEngineRequest(engine_id=engine_id, engine_epoch=engine_epoch)
        await _call(self._engines.DeregisterEngine(request, timeout=self._timeout_s, metadata=self._metadata))

    async def get_status(self, *, timeout_s: float | None = None) -> m.PlaneStatus:
        """Return how the answering replica does."""
        request = status_pb2.GetStatusRequest()
        return convert.status_from_wire(
            await _call(
                self._status.GetStatus(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
            )
        )

    async def list_engines(
        self, *, include_gone: bool = False, with_holdings: bool = False, timeout_s: float | None = None
    ) -> list[m.Engine]:
        """Return all live engines, ordered by id; if asked to, also those gone, and what each holds."""
        engines, token = list[m.Engine](), ""
        while True:
            request = engine_pb2.ListEnginesRequest(
                page_size=1000, page_token=token, include_gone=include_gone, with_holdings=with_holdings
            )
            page = await _call(
                self._engines.ListEngines(
                    request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
                )
            )
            engines += [convert.engine_from_wire(engine) for engine in page.engines]
            token = page.next_page_token
            if not token:
                return engines

    def attach_engine(
        self, requests: AsyncIterator[engine_pb2.AttachEngineRequest]
    ) -> AsyncIterator[engine_pb2.AttachEngineResponse]:
        """Open an engine's stream; EngineSession is what speaks on it. Errors come from the iteration."""
        return streamed(self._link.opened(self._engines.AttachEngine(metadata=self._metadata)), requests)

    # Locations

    async def announce_location(
        self, engine_id: m.EngineId, engine_epoch: int, announcement: m.Announcement
    ) -> m.AnnouncementResult:
        """Put a location on record. Idempotent."""
        request = location_pb2.AnnounceLocationRequest(
            engine_id=engine_id,
            engine_epoch=engine_epoch,
            announcement=convert.announcement_to_wire(announcement),
        )
        answer = await _call(
            self._locations.AnnounceLocation(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        return convert.announcement_result_from_wire(answer.result)

    async def lookup_location(
        self,
        key: m.ConversationKey,
        *,
        fingerprint: m.Fingerprint | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> m.Location | m.MissReason:
        """Return what could be claimed now, taking nothing; `turn_group` as in `begin_turn`.

        With a `fingerprint` of the prompt the key's conversation_id may be "": it is then found by it.
        """
        request = location_pb2.LookupLocationRequest(
            key=convert.key_to_wire(key),
            fingerprint=convert.fingerprint_to_wire(fingerprint) if fingerprint is not None else None,
            turn_group=turn_group,
        )
        answer = await _call(
            self._locations.LookupLocation(
                request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
            )
        )
        if answer.HasField("location"):
            return convert.location_from_wire(answer.location)
        return convert.miss_from_wire(answer.miss_reason)

    async def begin_turn(
        self,
        key: m.ConversationKey,
        request_id: str,
        *,
        wait_s: float | None = None,
        fingerprint: m.Fingerprint | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> m.BegunTurn:
        """Number a turn about to run and tell what is known; `wait_s` None means the server's default.

        Requests with one `turn_group` are counted as one turn.

        With a `fingerprint` of the prompt the key's conversation_id may be "": the conversation is then found
        by it, or begun under an id of the control plane's.
        """
        request = location_pb2.BeginTurnRequest(
            key=convert.key_to_wire(key),
            request_id=request_id,
            wait=convert.duration(wait_s) if wait_s is not None else None,
            fingerprint=convert.fingerprint_to_wire(fingerprint) if fingerprint is not None else None,
            turn_group=turn_group,
        )
        answer = await _call(
            self._locations.BeginTurn(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        )
        return convert.begun_from_wire(answer, key)

    async def touch_conversation(
        self, key: m.ConversationKey, ttl_s: float, *, turn: int = 0, timeout_s: float | None = None
    ) -> m.Touched:
        """Ask for a conversation's location to be kept for `ttl_s` seconds from now, if its engine can.

        With a `turn`, only that one's. What is kept for longer already stays so.
        """
        request = location_pb2.TouchConversationRequest(
            key=convert.key_to_wire(key), turn=turn, ttl=convert.duration(ttl_s)
        )
        answer = await _call(
            self._locations.TouchConversation(
                request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
            )
        )
        return convert.touched_from_wire(answer)

    async def claim_location(
        self,
        key: m.ConversationKey,
        request_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> m.Claim | m.MissReason:
        """Take the location for one reader. Repeating it with the same `request_id` gives the same claim."""
        request = location_pb2.ClaimLocationRequest(
            key=convert.key_to_wire(key),
            request_id=request_id,
            owner=owner,
            reader_engine_id=reader_engine_id,
            turn=turn,
            wait=convert.duration(wait_s) if wait_s is not None else None,
        )
        answer = await _call(
            self._locations.ClaimLocation(
                request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
            )
        )
        if answer.HasField("claim"):
            return convert.claim_from_wire(answer.claim)
        return convert.miss_from_wire(answer.miss_reason)

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        """Say that the reader is done, with or without having read. Idempotent."""
        target = location_pb2.FinishClaim(claim_id=claim_id, owner=owner)
        return await self._release(location_pb2.ReleaseLocationRequest(finish_claim=target))

    async def end_conversation(self, key: m.ConversationKey) -> m.ReleaseOutcome:
        """Release what a conversation retains. Idempotent."""
        target = location_pb2.EndConversation(key=convert.key_to_wire(key))
        return await self._release(location_pb2.ReleaseLocationRequest(end_conversation=target))

    async def withdraw_location(
        self, engine_id: m.EngineId, engine_epoch: int, request_id: m.RequestId
    ) -> m.ReleaseOutcome:
        """Take a location off the record so that its engine may free it, unless a reader holds it."""
        target = location_pb2.WithdrawLocation(
            engine_id=engine_id, engine_epoch=engine_epoch, request_id=request_id
        )
        return await self._release(location_pb2.ReleaseLocationRequest(withdraw=target))

    async def _release(self, request: location_pb2.ReleaseLocationRequest) -> m.ReleaseOutcome:
        answer = await _call(
            self._locations.ReleaseLocation(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        return convert.release_outcome_from_wire(answer.outcome)

    async def renew_locations(
        self, engine_id: m.EngineId, engine_epoch: int, ttls_s: dict[m.RequestId, float]
    ) -> list[m.RenewalResult]:
        """Set the life left of retained locations, in seconds; never revives one."""
        renewals = [convert.renewal_to_wire(request_id, ttl_s) for request_id, ttl_s in ttls_s.items()]
        request = location_pb2.RenewLocationsRequest(
            engine_id=engine_id, engine_epoch=engine_epoch, renewals=renewals
        )
        answer = await _call(
            self._locations.RenewLocations(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        return [convert.renewal_result_from_wire(result) for result in answer.results]

    async def list_locations(
        self, *, tenant_id: str = "", engine_id: str = "", model: str = "", conversation_prefix: str = ""
    ) -> tuple[list[m.Location], int]:
        """Return all locations, without params and fingerprints, and the revision to watch from, less one."""
        locations, token, revision = list[m.Location](), "", 0
        while True:
            page = await self.list_locations_page(
                page_token=token,
                tenant_id=tenant_id,
                engine_id=engine_id,
                model=model,
                conversation_prefix=conversation_prefix,
            )
            locations += page.locations
            revision, token = revision or page.revision, page.next_page_token
            if not token:
                return locations, revision

    async def list_locations_page(
        self,
        *,
        page_size: int = 1000,
        page_token: str = "",
        tenant_id: str = "",
        engine_id: str = "",
        model: str = "",
        conversation_prefix: str = "",
    ) -> m.LocationPage:
        """Return at most `page_size` (1 to 1000) locations, from a token of the page before on."""
        request = location_pb2.ListLocationsRequest(
            page_size=page_size,
            page_token=page_token,
            tenant_id=tenant_id,
            engine_id=engine_id,
            model=model,
            conversation_id_prefix=conversation_prefix,
        )
        page = await _call(
            self._locations.ListLocations(request, timeout=self._timeout_s, metadata=self._metadata)
        )
        locations = tuple(convert.location_from_wire(location) for location in page.locations)
        return m.LocationPage(locations, page.revision, page.next_page_token)

    async def watch_locations(
        self, *, from_revision: int = 0, tenant_id: str = ""
    ) -> AsyncIterator[m.LocationEvent]:
        """Iterate over changes; after an error resume from the last event's revision + 1."""
        request = location_pb2.WatchLocationsRequest(from_revision=from_revision, tenant_id=tenant_id)
        call = self._link.opened(self._locations.WatchLocations(request, metadata=self._metadata))
        async for message in streamed(call):
            for event in message.events:
                gone = event.type == location_pb2.LOCATION_EVENT_TYPE_GONE
                yield m.LocationEvent(message.revision, gone, convert.location_from_wire(event.location))

    def open_turns(self) -> Any:
        """Open a Turns stream, for TurnsStream to speak on."""
        return self._link.opened(self._locations.Turns(metadata=self._metadata))

    async def turns(
        self, batches: AsyncIterator[Sequence[location_pb2.TurnsOperation]]
    ) -> AsyncIterator[Iterable[location_pb2.TurnsResult]]:
        """Send batches of operations over one stream; yields batches of results, in any order."""

        async def requests() -> AsyncIterator[location_pb2.TurnsRequest]:
            async for batch in batches:
                yield location_pb2.TurnsRequest(operations=batch)

        async for message in streamed(self.open_turns(), requests()):
            yield message.results
