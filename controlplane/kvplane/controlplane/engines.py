"""The registry of engines: incarnations, epochs, leases, and who has gone silent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import ContentionError, StaleEpochError, UnknownEngineError
from kvplane.controlplane.ledger import ATTEMPTS, Ledger, Stored
from kvplane.store.base import Compare, Delete, Put
from kvplane.store.errors import LeaseNotFoundError

log = structlog.get_logger(__name__)

_EPOCH_KEPT_MS = 7 * 86_400_000
"""Epochs follow the clock; the last one is remembered in case the clock is set back."""


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """An engine on record, with what this replica alone knows of it."""

    engine: m.Engine
    load: m.EngineLoad | None
    attached: bool


@dataclass(frozen=True, slots=True)
class Required:
    """A live incarnation, and the compare that fences a write with it."""

    engine: m.Engine
    unchanged: Compare


class EngineRegistry:
    """Gives out epochs and keeps leases. All state but streams and loads is in the store."""

    def __init__(self, ledger: Ledger, settings: m.Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._loads: dict[tuple[str, int], m.EngineLoad] = {}
        self._attached: dict[tuple[str, int], int] = {}
        self._silent: set[tuple[str, int]] = set()

    async def register(self, spec: m.EngineSpec, registration_id: str = "") -> m.Engine:
        """Start an incarnation: its epoch is larger than any this engine id had.

        With a `registration_id` a repeated call answers with the incarnation it started, while it lives.
        """
        ledger, store = self._ledger, self._ledger.store
        for _ in range(ATTEMPTS):
            current = await ledger.engine(spec.engine_id)
            if current.value and registration_id and current.value.registration_id == registration_id:
                await self.renew(spec.engine_id, current.value.engine_epoch)
                return current.value
            last = await ledger.epoch(spec.engine_id)
            now = ledger.clock.now_ms()
            lease = await store.grant_lease(self._settings.engine_lease_s)
            engine = m.Engine(
                spec=spec,
                engine_epoch=max((last.value or 0) + 1, now),
                lease_id=lease.lease_id,
                registered_at_ms=now,
                registration_id=registration_id,
            )
            written = await ledger.write(
                [current.unchanged(), last.unchanged()],
                [
                    Put(
                        last.key,
                        records.dump_epoch(engine.engine_epoch),
                        await ledger.dust_lease(now + _EPOCH_KEPT_MS),
                    ),
                    Put(current.key, records.dump_engine(engine), lease.lease_id),
                ],
            )
            if written:
                if current.value:
                    await store.revoke_lease(current.value.lease_id)
                log.info(
                    "engine_registered",
                    engine_id=spec.engine_id,
                    engine_epoch=engine.engine_epoch,
                    role=spec.role.name.lower(),
                    replaced_epoch=current.value.engine_epoch if current.value else None,
                )
                return engine
            await store.revoke_lease(lease.lease_id)
        raise ContentionError

    async def require(self, engine_id: str, engine_epoch: int) -> Required:
        """Return the live incarnation. Raises UnknownEngineError or StaleEpochError."""
        stored = await self._ledger.engine(engine_id)
        return Required(self._checked(stored, engine_id, engine_epoch), stored.unchanged())

    def _checked(self, stored: Stored[m.Engine], engine_id: str, engine_epoch: int) -> m.Engine:
        if stored.value is None or engine_epoch > stored.value.engine_epoch:
            raise UnknownEngineError(engine_id)
        if engine_epoch < stored.value.engine_epoch:
            raise StaleEpochError(engine_id, engine_epoch, stored.value.engine_epoch)
        return stored.value

    async def find(self, engine_id: str) -> Stored[m.Engine]:
        """Return the engine's record, if it lives."""
        return await self._ledger.engine(engine_id)

    async def renew(
        self, engine_id: str, engine_epoch: int, load: m.EngineLoad | None = None
    ) -> tuple[float, m.Engine]:
        """Start the lease's ttl anew; returns it in seconds. Never revives. Raises as `require`."""
        engine = (await self.require(engine_id, engine_epoch)).engine
        try:
            lease = await self._ledger.store.keep_lease(engine.lease_id)
        except LeaseNotFoundError:
            raise UnknownEngineError(engine_id) from None
        self._silent.discard((engine_id, engine_epoch))
        if load is not None:
            self._loads[engine_id, engine_epoch] = load
        return lease.ttl_s, engine

    async def drain(self, engine_id: str) -> int:
        """Stop new locations and claims; returns the claims still open. Raises UnknownEngineError."""
        for _ in range(ATTEMPTS):
            stored = await self._ledger.engine(engine_id)
            if stored.value is None:
                raise UnknownEngineError(engine_id)
            if stored.value.draining:
                break
            engine = replace(stored.value, draining=True)
            put = Put(stored.key, records.dump_engine(engine), engine.lease_id)
            if await self._ledger.write([stored.unchanged()], [put]):
                log.info("engine_draining", engine_id=engine_id, engine_epoch=engine.engine_epoch)
                break
        else:
            raise ContentionError
        open_claims = 0
        async for item in self._ledger.scan(keys.engine_holdings(engine_id)):
            open_claims += bool(records.load_holding(item.value)[1])
        return open_claims

    async def deregister(self, engine_id: str, engine_epoch: int) -> None:
        """End an incarnation; anything but the live one is left alone."""
        stored = await self._ledger.engine(engine_id)
        if stored.value is None or stored.value.engine_epoch != engine_epoch:
            return
        if await self._ledger.write([stored.unchanged()], [Delete(stored.key)]):
            await self._ledger.store.revoke_lease(stored.value.lease_id)
            log.info("engine_deregistered", engine_id=engine_id, engine_epoch=engine_epoch)

    async def list(self, *, after: str, limit: int) -> tuple[list[LiveEngine], bool]:
        """Return live engines with ids greater than `after`, and whether more follow."""
        start = keys.engine(after) if after else b""
        page = await self._ledger.store.scan(keys.ENGINES, after=start, limit=limit)
        engines = list[LiveEngine]()
        for item in page.items:
            engine = records.load_engine(item.value)
            at = (engine.spec.engine_id, engine.engine_epoch)
            engines.append(LiveEngine(engine, self._loads.get(at), at in self._attached))
        return engines, page.more

    def attach(self, engine_id: str, engine_epoch: int) -> Callable[[], None]:
        """Note that a stream of the engine is open here; call what is returned when it has ended.

        From then until the next sign of life, nothing of the engine's is handed out by this replica: a
        killed engine's stream ends at once, its lease only later.
        """
        at = (engine_id, engine_epoch)
        self._attached[at] = self._attached.get(at, 0) + 1
        self._silent.discard(at)

        def detach() -> None:
            self._attached[at] -= 1
            if not self._attached[at]:
                del self._attached[at]
                self._silent.add(at)

        return detach

    def is_silent(self, engine_id: str, engine_epoch: int) -> bool:
        """Tell whether the engine's stream broke here and it has not been heard of since."""
        return (engine_id, engine_epoch) in self._silent

    def forget(self, engine_id: str, engine_epoch: int) -> None:
        """Drop what this replica alone knows of an incarnation that is over."""
        self._silent.discard((engine_id, engine_epoch))
        self._loads.pop((engine_id, engine_epoch), None)
