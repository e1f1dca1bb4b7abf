"""EngineService on the wire: validate, convert, call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvplane.controlplane import convert, validate
from kvplane.controlplane import model as m
from kvplane.controlplane.attachments import Attachments
from kvplane.controlplane.engines import EngineRegistry, LiveEngine
from kvplane.controlplane.holdings import NOTHING, HoldingsCount
from kvplane.controlplane.paging import decode_token, encode_token
from kvplane.v1 import engine_pb2, engine_pb2_grpc


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Serves the registry of engines."""

    def __init__(
        self,
        engines: EngineRegistry,
        attachments: Attachments,
        holdings: HoldingsCount,
        settings: m.Settings,
    ) -> None:
        self._engines = engines
        self._attachments = attachments
        self._holdings = holdings
        self._settings = settings

    async def RegisterEngine(
        self, request: engine_pb2.RegisterEngineRequest, context: Any
    ) -> engine_pb2.RegisterEngineResponse:
        """See the protos."""
        validate.spec(request.spec)
        validate.text("request_id", request.request_id, optional=True)
        engine = await self._engines.register(convert.spec_in(request.spec), request.request_id)
        return engine_pb2.RegisterEngineResponse(
            engine_epoch=engine.engine_epoch,
            lease_ttl=convert.duration(self._settings.engine_lease_s),
            max_location_ttl=convert.duration(self._settings.max_location_ttl_s),
            claim_timeout=convert.duration(self._settings.claim_life_s),
        )

    async def RenewEngine(
        self, request: engine_pb2.RenewEngineRequest, context: Any
    ) -> engine_pb2.RenewEngineResponse:
        """See the protos."""
        engine_id = validate.text("engine_id", request.engine_id)
        engine_epoch = validate.epoch("engine_epoch", request.engine_epoch)
        load = convert.load_in(validate.load(request.load)) if request.HasField("load") else None
        ttl_s, engine = await self._engines.renew(engine_id, engine_epoch, load)
        return engine_pb2.RenewEngineResponse(lease_ttl=convert.duration(ttl_s), draining=engine.draining)

    async def DrainEngine(
        self, request: engine_pb2.DrainEngineRequest, context: Any
    ) -> engine_pb2.DrainEngineResponse:
        """See the protos."""
        open_claims = await self._engines.drain(validate.text("engine_id", request.engine_id))
        return engine_pb2.DrainEngineResponse(open_claims=open_claims)

    async def DeregisterEngine(
        self, request: engine_pb2.DeregisterEngineRequest, context: Any
    ) -> engine_pb2.DeregisterEngineResponse:
        """See the protos."""
        engine_id = validate.text("engine_id", request.engine_id)
        await self._engines.deregister(engine_id, validate.epoch("engine_epoch", request.engine_epoch))
        return engine_pb2.DeregisterEngineResponse()

    async def ListEngines(
        self, request: engine_pb2.ListEnginesRequest, context: Any
    ) -> engine_pb2.ListEnginesResponse:
        """See the protos."""
        limit = validate.page_size(request.page_size)
        after = decode_token(request.page_token)
        found: Sequence[LiveEngine | tuple[str, int]]
        if request.include_gone:
            found, last = await self._engines.list_all(after=after, limit=limit)
        else:
            found, last = await self._engines.list(after=after, limit=limit)
        answer = engine_pb2.ListEnginesResponse(
            engines=[
                convert.engine_out(engine) if isinstance(engine, LiveEngine) else convert.gone_out(*engine)
                for engine in found
            ],
            next_page_token=encode_token(last),
        )
        if request.with_holdings:
            holdings = await self._holdings.by_engine()
            for engine in answer.engines:
                held = holdings.get(engine.spec.engine_id, NOTHING)
                engine.holdings.CopyFrom(convert.holdings_out(held))
        return answer

    async def AttachEngine(
        self, request_iterator: AsyncIterator[engine_pb2.AttachEngineRequest], context: Any
    ) -> AsyncIterator[engine_pb2.AttachEngineResponse]:
        """See the protos."""
        async for answer in self._attachments.serve(request_iterator):
            yield answer
