"""The control plane as a router's client: the client's values, without the wire."""

from __future__ import annotations

from collections.abc import Mapping

from kvplane.bench.fleet.planes import Planes
from kvplane.bench.fleet.simulation import Simulation
from kvplane.client import model as c
from kvplane.client.errors import ControlPlaneUnavailableError, NotOwnerError
from kvplane.controlplane import model as m
from kvplane.controlplane.engines import LiveEngine
from kvplane.controlplane.errors import NotClaimOwnerError
from kvplane.store.errors import StoreError

_PAGE = 1000
_MOMENT_S = 0.5
_MISSES: Mapping[m.MissReason, c.MissReason] = {reason: c.MissReason[reason.name] for reason in m.MissReason}


class PlaneClient:
    """What a router asks; see PlaneClient of the router."""

    def __init__(self, simulation: Simulation, planes: Planes) -> None:
        self._simulation = simulation
        self._clock = simulation.clock
        self._planes = planes

    async def begin_turn(
        self,
        key: c.ConversationKey,
        request_id: str,
        *,
        wait_s: float | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> c.BegunTurn:
        """See ControlPlaneClient."""
        turns = self._planes.choose().plane.turns
        try:
            begun = await self._planes.measured("begin_turn", turns.begin(_key(key), request_id, wait_s))
        except StoreError as error:
            raise ControlPlaneUnavailableError(str(error)) from None
        found = begun.known if isinstance(begun.known, m.Found) else None
        return c.BegunTurn(
            begun.turn,
            None if found is None else self._location(found),
            _MISSES[begun.known] if isinstance(begun.known, m.MissReason) else None,
            key,
            begun.turn_index,
            None if begun.idle_ms is None else begun.idle_ms / 1000,
            begun.lease_class - 1 if begun.lease_class else None,
        )

    async def lookup_location(
        self, key: c.ConversationKey, *, timeout_s: float | None = None, turn_group: str = ""
    ) -> c.Location | c.MissReason:
        """See ControlPlaneClient."""
        known = self._planes.choose().plane.locations.lookup(_key(key))
        return self._location(known) if isinstance(known, m.Found) else _MISSES[known]

    async def claim_location(
        self,
        key: c.ConversationKey,
        request_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> c.Claim | c.MissReason:
        """See ControlPlaneClient."""
        claims = self._planes.choose().plane.claims
        claiming = claims.claim(
            _key(key), request_id, owner, reader_engine_id=reader_engine_id, turn=turn, wait_s=wait_s
        )
        try:
            claim = await self._planes.measured("claim", claiming)
        except StoreError as error:
            raise ControlPlaneUnavailableError(str(error)) from None
        if isinstance(claim, m.MissReason):
            return _MISSES[claim]
        timeout = (claim.deadline_ms - self._clock.now_ms()) / 1000
        return c.Claim(claim.claim_id, claim.owner, self._location(m.Found(claim.location, 0)), timeout)

    async def finish_claim(self, claim_id: str, owner: str) -> c.ReleaseOutcome:
        """See ControlPlaneClient."""
        releases = self._planes.choose().plane.releases
        try:
            done = await self._planes.measured("finish_claim", releases.finish_claim(claim_id, owner))
        except NotClaimOwnerError as error:
            raise NotOwnerError(str(error)) from None
        except StoreError as error:
            raise ControlPlaneUnavailableError(str(error)) from None
        return c.ReleaseOutcome[done.name]

    async def end_conversation(self, key: c.ConversationKey) -> c.ReleaseOutcome:
        """See ControlPlaneClient."""
        releases = self._planes.choose().plane.releases
        done = await self._planes.measured("end_conversation", releases.end_conversation(_key(key)))
        return c.ReleaseOutcome[done.name]

    async def touch_conversation(
        self, key: c.ConversationKey, ttl_s: float, *, turn: int = 0, timeout_s: float | None = None
    ) -> c.Touched:
        """See ControlPlaneClient."""
        touches = self._planes.choose().plane.touches
        touched = await self._planes.measured("touch", touches.touch(_key(key), ttl_s, turn))
        remaining_ms = touched.remaining_ms
        return c.Touched(touched.noted, None if remaining_ms is None else remaining_ms / 1000)

    async def list_engines(self) -> list[c.Engine]:
        """See ControlPlaneClient. Routers that ask within a moment get the same answer, to save time."""
        if self._simulation.now - self._planes.listed[0] > _MOMENT_S:
            self._planes.listed = self._simulation.now, await self._list()
        else:
            self._planes.choose()
        return self._planes.listed[1]

    async def _list(self) -> list[c.Engine]:
        registry = self._planes.choose().plane.engines
        found, after = list[c.Engine](), b""
        while True:
            page, after = await self._planes.measured("list_engines", registry.list(after=after, limit=_PAGE))
            found += [self._engine(live) for live in page]
            if not after:
                return found

    def _engine(self, live: LiveEngine) -> c.Engine:
        """Return an engine's value, the same as before if nothing has changed: there are many of them."""
        engine_id = live.engine.spec.engine_id
        known = self._planes.engines.get(engine_id)
        if known is None or known[0] is not live.engine or known[1] != live.load:
            spec, load = live.engine.spec, live.load
            value = c.Engine(
                c.EngineSpec(
                    c.EngineId(engine_id),
                    c.EngineRole[spec.role.name],
                    endpoint=spec.endpoint,
                    total_blocks=spec.total_blocks,
                    served_models=spec.served_models,
                ),
                live.engine.engine_epoch,
                live.engine.draining,
                live.attached,
                None
                if load is None
                else c.EngineLoad(
                    load.running_requests,
                    load.waiting_requests,
                    load.free_blocks,
                    load.retained_blocks,
                    load.retained_conversations,
                ),
            )
            known = self._planes.engines[engine_id] = live.engine, load, value
        return known[2]

    def _location(self, found: m.Found) -> c.Location:
        of = found.location
        key = of.key
        return c.Location(
            c.ConversationKey(key.tenant_id, key.model, key.conversation_id, key.adapter),
            c.EngineId(of.holder.engine_id),
            of.holder.engine_epoch,
            c.RequestId(of.holder.request_id),
            of.turn,
            of.token_count,
            of.block_count,
            of.kv_transfer_params,
            c.Fingerprint(of.fingerprint.chunk_tokens, of.fingerprint.chain),
            (of.deadline_ms - self._clock.now_ms()) / 1000,
            found.revision,
            of.endpoint,
            of.data_parallel_rank,
        )


def _key(key: c.ConversationKey) -> m.ConversationKey:
    return m.ConversationKey(key.tenant_id, key.model, key.adapter, key.conversation_id)
