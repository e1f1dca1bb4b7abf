"""LocationService on the wire: validate, convert, call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

from kvplane.controlplane import convert, keys, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.claims import Claims
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.errors import InvalidFieldError, RevisionGoneError
from kvplane.controlplane.ledger import Ledger, own_location, understood
from kvplane.controlplane.locations import Locations
from kvplane.controlplane.paging import decode_token, encode_token
from kvplane.controlplane.places import Places
from kvplane.controlplane.rates import OperationRates
from kvplane.controlplane.releases import Releases
from kvplane.controlplane.tally import CallTally
from kvplane.controlplane.touches import Touches
from kvplane.controlplane.turn_groups import HIT
from kvplane.controlplane.turn_streams import Write, multiplexed
from kvplane.controlplane.turns import BegunTurn, Turns
from kvplane.store.base import Event
from kvplane.store.errors import CompactedError, FutureRevisionError
from kvplane.tracing.context import Tracer
from kvplane.v1 import location_pb2, location_pb2_grpc

MAX_WATCHES = 256
"""WatchLocations streams of one replica: each is told of every change."""
MAX_TURNS_STREAMS = 1024
"""Turns streams of one replica: a router has one, and each may have hundreds of operations under way."""
_LONG_BYTES = 2048 * validate.HASH_BYTES
"""Of a fingerprint's chain; a search through more entries takes as long as several other operations."""


class LocationServicer(location_pb2_grpc.LocationServiceServicer):
    """Serves locations, turns and claims."""

    def __init__(
        self,
        ledger: Ledger,
        engines: EngineRegistry,
        locations: Locations,
        turns: Turns,
        claims: Claims,
        releases: Releases,
        touches: Touches,
        rates: OperationRates | None = None,
        operations: Mapping[str, CallTally] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._ledger = ledger
        self._engines = engines
        self._locations = locations
        self._turns = turns
        self._claims = claims
        self._releases = releases
        self._touches = touches
        self._rates = rates
        self._tally = ledger.tally
        self._operations = operations
        self._tracer = tracer
        self._searching = asyncio.Lock()
        self._watches = Places("watches", MAX_WATCHES)
        self._streams = Places("Turns streams", MAX_TURNS_STREAMS)

    def _now(self) -> int:
        return self._ledger.clock.now_ms()

    async def AnnounceLocation(
        self, request: location_pb2.AnnounceLocationRequest, context: Any
    ) -> location_pb2.AnnounceLocationResponse:
        """See the protos."""
        engine_id = validate.text("engine_id", request.engine_id)
        engine_epoch = validate.epoch("engine_epoch", request.engine_epoch)
        validate.announcement(request.announcement, engine_id)
        value = convert.announcement_in(request.announcement)
        result = await self._locations.announce(engine_id, engine_epoch, value)
        answer = location_pb2.AnnounceLocationResponse()
        convert.write_announced(answer.result, value.request_id, result)
        return answer

    # Lookup, begin-turn, claim, release and touch come as calls of their own and over Turns. Each is made in
    # two steps: `perform` has the answer as a value, `write` puts it where it goes on its way.

    async def LookupLocation(
        self, request: location_pb2.LookupLocationRequest, context: Any
    ) -> location_pb2.LookupLocationResponse:
        """See the protos."""
        answer = location_pb2.LookupLocationResponse()
        self.write_known(answer, await self.perform_lookup(request))
        return answer

    async def BeginTurn(
        self, request: location_pb2.BeginTurnRequest, context: Any
    ) -> location_pb2.BeginTurnResponse:
        """See the protos."""
        answer = location_pb2.BeginTurnResponse()
        self.write_begun(answer, await self.perform_begin(request), request)
        return answer

    async def ClaimLocation(
        self, request: location_pb2.ClaimLocationRequest, context: Any
    ) -> location_pb2.ClaimLocationResponse:
        """See the protos."""
        answer = location_pb2.ClaimLocationResponse()
        self.write_claimed(answer, await self.perform_claim(request))
        return answer

    async def ReleaseLocation(
        self, request: location_pb2.ReleaseLocationRequest, context: Any
    ) -> location_pb2.ReleaseLocationResponse:
        """See the protos."""
        outcome = await self.perform_release(request)
        return location_pb2.ReleaseLocationResponse(outcome=convert.outcome_out(outcome))

    async def TouchConversation(
        self, request: location_pb2.TouchConversationRequest, context: Any
    ) -> location_pb2.TouchConversationResponse:
        """See the protos."""
        answer = location_pb2.TouchConversationResponse()
        convert.write_touched(answer, await self.perform_touch(request))
        return answer

    async def perform_lookup(self, request: location_pb2.LookupLocationRequest) -> m.Found | m.MissReason:
        """Validate and perform LookupLocation."""
        by_fingerprint = _by_fingerprint(request)
        group = validate.text("turn_group", request.turn_group, optional=True)
        if self._rates is not None:
            self._rates.take(request.key.tenant_id)
        if by_fingerprint:
            scope, fingerprint = convert.key_in(request.key), convert.fingerprint_in(request.fingerprint)
            if len(fingerprint.chain) > _LONG_BYTES:
                await self._in_turn()
            known = self._locations.lookup_prefix(scope, fingerprint)
        else:
            known = self._locations.lookup(convert.key_in(request.key))
        if isinstance(known, m.MissReason):
            self._tally.lookups[known] += 1
        else:
            self._tally.lookups[HIT] += 1
            if group:
                self._tally.groups.found(group)
        return known

    async def _in_turn(self) -> None:
        """Wait until no other search for a long prompt is made: in a row they would hold up all else."""
        async with self._searching:
            await asyncio.sleep(0)

    async def perform_begin(self, request: location_pb2.BeginTurnRequest) -> BegunTurn:
        """Validate and perform BeginTurn."""
        by_fingerprint = _by_fingerprint(request)
        group = validate.text("turn_group", request.turn_group, optional=True)
        request_id = validate.text("request_id", request.request_id)
        wait_s = validate.wait(request.wait) if request.HasField("wait") else None
        if self._rates is not None:
            self._rates.take(request.key.tenant_id)
        fingerprint = convert.fingerprint_in(request.fingerprint) if by_fingerprint else None
        if fingerprint is not None and len(fingerprint.chain) > _LONG_BYTES:
            await self._in_turn()
        begun = await self._turns.begin(convert.key_in(request.key), request_id, wait_s, fingerprint)
        known = begun.known
        if not group:
            self._tally.begun[known if isinstance(known, m.MissReason) else HIT] += 1
        elif isinstance(known, m.MissReason):
            self._tally.groups.missed(group, known)
        else:
            self._tally.groups.found(group)
        return begun

    async def perform_claim(self, request: location_pb2.ClaimLocationRequest) -> m.Claim | m.MissReason:
        """Validate and perform ClaimLocation."""
        validate.key(request.key)
        if request.turn < 0:
            raise InvalidFieldError("turn", "must not be negative")
        if self._rates is not None:
            self._rates.take(request.key.tenant_id)
        outcome = await self._claims.claim(
            convert.key_in(request.key),
            validate.claim_id("request_id", request.request_id),
            validate.text("owner", request.owner),
            reader_engine_id=validate.text("reader_engine_id", request.reader_engine_id, optional=True),
            turn=request.turn,
            wait_s=validate.wait(request.wait) if request.HasField("wait") else None,
        )
        self._tally.claims[outcome if isinstance(outcome, m.MissReason) else HIT] += 1
        return outcome

    async def perform_release(self, request: location_pb2.ReleaseLocationRequest) -> m.ReleaseOutcome:
        """Validate and perform ReleaseLocation."""
        outcome = await self._release(request)
        self._tally.releases[outcome] += 1
        return outcome

    async def _release(self, request: location_pb2.ReleaseLocationRequest) -> m.ReleaseOutcome:
        target = request.WhichOneof("target")
        if target == "end_conversation":
            validate.key(request.end_conversation.key, "end_conversation.key")
            return await self._releases.end_conversation(convert.key_in(request.end_conversation.key))
        if target == "finish_claim":
            return await self._releases.finish_claim(
                validate.text("finish_claim.claim_id", request.finish_claim.claim_id),
                validate.text("finish_claim.owner", request.finish_claim.owner),
            )
        if target == "withdraw":
            engine_id = validate.text("withdraw.engine_id", request.withdraw.engine_id)
            engine_epoch = validate.epoch("withdraw.engine_epoch", request.withdraw.engine_epoch)
            request_id = validate.text("withdraw.request_id", request.withdraw.request_id)
            await self._engines.require(engine_id, engine_epoch)
            return await self._releases.withdraw(m.Holder(engine_id, engine_epoch, request_id))
        raise InvalidFieldError("target", "must be one of end_conversation, finish_claim, withdraw")

    async def perform_touch(self, request: location_pb2.TouchConversationRequest) -> m.Touched:
        """Validate and perform TouchConversation."""
        validate.key(request.key)
        if request.turn < 0:
            raise InvalidFieldError("turn", "must not be negative")
        ttl_s = validate.span("ttl", request.ttl)
        if self._rates is not None:
            self._rates.take(request.key.tenant_id)
        touched = await self._touches.touch(convert.key_in(request.key), ttl_s, request.turn)
        self._tally.touches[touched.noted] += 1
        return touched

    def write_known(self, answer: location_pb2.LookupLocationResponse, known: m.Found | m.MissReason) -> None:
        """Write what is known of a conversation."""
        if isinstance(known, m.MissReason):
            answer.miss_reason = convert.miss_out(known)
        else:
            convert.write_location(answer.location, known.location, self._now(), known.revision)

    def write_begun(
        self,
        answer: location_pb2.BeginTurnResponse,
        begun: BegunTurn,
        request: location_pb2.BeginTurnRequest,
    ) -> None:
        """Write a begun turn, with its conversation unless the request named it."""
        named = bool(request.key.conversation_id)
        convert.write_begun(answer, begun, key=not named, now_ms=self._now())

    def write_claimed(
        self, answer: location_pb2.ClaimLocationResponse, outcome: m.Claim | m.MissReason
    ) -> None:
        """Write a claim, or why there is none."""
        if isinstance(outcome, m.MissReason):
            answer.miss_reason = convert.miss_out(outcome)
        else:
            convert.write_claim(answer.claim, outcome, self._now())

    async def RenewLocations(
        self, request: location_pb2.RenewLocationsRequest, context: Any
    ) -> location_pb2.RenewLocationsResponse:
        """See the protos."""
        engine_id = validate.text("engine_id", request.engine_id)
        engine_epoch = validate.epoch("engine_epoch", request.engine_epoch)
        validate.batch("renewals", len(request.renewals), least=1)
        answer = location_pb2.RenewLocationsResponse()
        for renewal in request.renewals:
            request_id = validate.text("renewals.request_id", renewal.request_id)
            ttl_s = validate.span("renewals.ttl", renewal.ttl)
            granted_s = await self._locations.renew(m.Holder(engine_id, engine_epoch, request_id), ttl_s)
            answer.results.append(convert.renewed_out(request_id, granted_s))
        return answer

    async def ListLocations(
        self, request: location_pb2.ListLocationsRequest, context: Any
    ) -> location_pb2.ListLocationsResponse:
        """See the protos."""
        found, after, revision = await self._locations.list(
            after=decode_token(request.page_token),
            limit=validate.page_size(request.page_size),
            tenant_id=validate.text("tenant_id", request.tenant_id, optional=True),
            engine_id=validate.text("engine_id", request.engine_id, optional=True),
            model=validate.text("model", request.model, optional=True),
            conversation_prefix=validate.text(
                "conversation_id_prefix", request.conversation_id_prefix, optional=True
            ),
        )
        now = self._now()
        locations = [
            convert.location_out(
                item.location, now_ms=now, revision=item.revision, claimed=claimed, brief=True
            )
            for item, claimed in found
        ]
        return location_pb2.ListLocationsResponse(
            locations=locations, next_page_token=encode_token(after), revision=revision
        )

    async def WatchLocations(
        self, request: location_pb2.WatchLocationsRequest, context: Any
    ) -> AsyncIterator[location_pb2.WatchLocationsResponse]:
        """See the protos."""
        if request.from_revision < 0:
            raise InvalidFieldError("from_revision", "must not be negative")
        tenant_id = validate.text("tenant_id", request.tenant_id, optional=True)
        prefix = keys.tenant_locations(tenant_id) if tenant_id else keys.LOCATIONS
        try:
            with self._watches.take():
                async for batch in self._ledger.store.watch(prefix, from_revision=request.from_revision):
                    events = [event for event in map(self._event, batch.events) if event is not None]
                    yield location_pb2.WatchLocationsResponse(revision=batch.revision, events=events)
        except (CompactedError, FutureRevisionError):
            raise RevisionGoneError(request.from_revision) from None

    def _event(self, event: Event) -> location_pb2.LocationEvent | None:
        stored = event.current or event.previous
        if stored is None:
            return None
        gone = event.current is None
        kind = location_pb2.LOCATION_EVENT_TYPE_GONE if gone else location_pb2.LOCATION_EVENT_TYPE_RETAINED
        value, revision = understood(stored, partial(own_location, stored.key)), stored.mod_revision
        if value is None:
            return None
        location = convert.location_out(value, now_ms=self._now(), revision=revision, brief=True)
        return location_pb2.LocationEvent(type=kind, location=location)

    async def Turns(  # type: ignore[override]  # grpc.aio takes handlers that write as well as generators
        self, request_iterator: AsyncIterator[location_pb2.TurnsRequest], context: Any
    ) -> None:
        """See the protos. It writes its answers itself: each layer of generators costs a turn of the loop."""
        await self.serve_turns(request_iterator, context.write)

    async def serve_turns(self, requests: AsyncIterator[location_pb2.TurnsRequest], write: Write) -> None:
        """Serve a Turns stream, whatever it comes by."""
        with self._streams.take():
            await multiplexed(
                self,
                requests,
                write,
                self._ledger.start,
                self._tally,
                self._operations,
                self._tracer,
            )


def _by_fingerprint(request: location_pb2.LookupLocationRequest | location_pb2.BeginTurnRequest) -> bool:
    """Tell whether a conversation is asked for by fingerprint; checks what it is asked for by."""
    by_fingerprint = False
    if request.HasField("fingerprint"):
        validate.prompt(request.fingerprint)
        by_fingerprint = not request.key.conversation_id
    if by_fingerprint:
        validate.scope(request.key)
    else:
        validate.key(request.key)
    return by_fingerprint
