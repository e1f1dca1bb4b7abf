"""The registry of engines: incarnations, epochs, leases, streams, and who has gone silent."""

from __future__ import annotations

import builtins
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import structlog
from msgspec import Struct

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.errors import (
    LateRegistrationError,
    StaleEpochError,
    SupersededStreamError,
    UnknownEngineError,
)
from kvplane.controlplane.ledger import Decision, Keep, Ledger, Stored, Write, same_state, understood
from kvplane.store.base import Compare, Delete, KeyValue, Lease, Page, Put
from kvplane.store.errors import LeaseNotFoundError, StoreError

log = structlog.get_logger(__name__)

EPOCH_KEPT_MS = 7 * 86_400_000
"""Epochs follow the clock; the last one is remembered in case the clock is set back."""
_MAX_EPOCH = 2**62
"""Epochs follow the clock; what is beyond is damaged."""
_LOAD_EVERY_S = 0.5
"""Loads are for choosing among engines: newer ones are not worth a write. Engines send one a second."""

_Incarnation = tuple[str, int]


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """An engine on record, with its load as last reported."""

    engine: m.Engine
    load: m.EngineLoad | None
    contact: m.EngineContact = m.EngineContact.UNARY
    registered_s: float = 0.0
    """Seconds since it registered."""
    last_seen_s: float | None = None
    """Seconds since this replica heard of it, None if it has not."""
    announcements: int = 0
    """Put on record by this replica."""

    @property
    def attached(self) -> bool:
        """Whether a stream of the engine's is open, at whichever replica."""
        return self.engine.contact is m.EngineContact.ATTACHED


class Required(Struct, frozen=True, gc=False):
    """A live incarnation, and the compare that fences a write with it."""

    engine: m.Engine
    unchanged: Compare


class EngineRegistry:
    """Gives out epochs and keeps leases. All state is in the store; what is here saves round trips."""

    def __init__(self, ledger: Ledger, settings: m.Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._decoded: dict[str, Stored[m.Engine]] = {}
        self._kept: dict[_Incarnation, tuple[float, Lease]] = {}
        self._loads: dict[_Incarnation, tuple[float, m.EngineLoad]] = {}
        self._broken: dict[_Incarnation, int] = {}
        self._heard: dict[_Incarnation, float] = {}
        self._announced: dict[_Incarnation, int] = {}

    # Finding.

    def find(self, engine_id: str) -> Stored[m.Engine]:
        """Return the engine's record as last known, if it lives."""
        item = self._ledger.mirror.get(keys.engine(engine_id))
        cached = self._decoded.get(engine_id)
        if item is None:
            if cached is not None:
                del self._decoded[engine_id]
            return Stored(keys.engine(engine_id), None, 0)
        if cached is None or cached.revision != item.mod_revision:
            cached = Stored(item.key, understood(item, records.load_engine), item.mod_revision)
            self._decoded[engine_id] = cached
        return cached

    def _loaded(self, item: KeyValue) -> Stored[m.Engine]:
        """Return an engine's record as read from the store, decoded before if it is what is known."""
        known = self._ledger.mirror.get(item.key)
        if known is None or known.mod_revision != item.mod_revision:
            return Stored(item.key, understood(item, records.load_engine), item.mod_revision)
        try:
            engine_id = keys.engine_id_of(item.key)
        except UnicodeDecodeError:  # of a record that nobody here has written
            return Stored(item.key, understood(item, records.load_engine), item.mod_revision)
        return self.find(engine_id)

    async def require(self, engine_id: str, engine_epoch: int, stream: int = 0) -> Required:
        """Return the live incarnation, asking the store itself before saying no.

        Raises UnknownEngineError, StaleEpochError, or, with a `stream` that is not its newest,
        SupersededStreamError.
        """
        engine = self.find(engine_id).value
        if engine is None or engine.engine_epoch != engine_epoch or (stream and engine.stream != stream):
            await self._ledger.refresh(keys.engine(engine_id))
        return self.checked(engine_id, engine_epoch, stream)

    def checked(self, engine_id: str, engine_epoch: int, stream: int = 0) -> Required:
        """Return the live incarnation as last known. Raises as `require`."""
        stored = self.find(engine_id)
        engine = stored.value
        if engine is None or engine_epoch > engine.engine_epoch:
            raise UnknownEngineError(engine_id)
        if engine_epoch < engine.engine_epoch:
            raise StaleEpochError(engine_id, engine_epoch, engine.engine_epoch)
        if stream and stream != engine.stream:
            raise SupersededStreamError(engine_id)
        return Required(engine, stored.unchanged())

    def is_silent(self, engine: m.Engine) -> bool:
        """Tell whether the engine's newest stream broke and nothing has been heard of it since."""
        if engine.contact is m.EngineContact.SILENT:
            return True
        return self._broken.get((engine.spec.engine_id, engine.engine_epoch)) == engine.stream != 0

    async def list(self, *, after: bytes, limit: int) -> tuple[list[LiveEngine], bytes]:
        """Return live engines after a position (b"": from the first), and the position to go on from.

        That is b"" at the end. Positions are ids, as bytes.
        """
        start = keys.ENGINES + after if after else b""
        page = await self._ledger.store.scan(keys.ENGINES, after=start, limit=limit)
        loaded = [self._loaded(item).value for item in page.items]
        engines = [engine for engine in loaded if engine is not None]
        return [self._live(engine) for engine in engines], _position(page)

    async def list_all(
        self, *, after: bytes, limit: int
    ) -> tuple[builtins.list[LiveEngine | tuple[str, int]], bytes]:
        """Return the same with those that are gone, of which only (id, last epoch) are known."""
        start = keys.EPOCHS + after if after else b""
        page = await self._ledger.store.scan(keys.EPOCHS, after=start, limit=limit)
        found: builtins.list[LiveEngine | tuple[str, int]] = []
        for item in page.items:
            engine_id = understood(item, partial(_engine_id, item.key))
            engine = self.find(engine_id).value if engine_id is not None else None
            if engine_id is None:
                continue
            if engine is not None:
                found.append(self._live(engine))
            else:
                found.append((engine_id, understood(item, records.load_epoch) or 0))
        return found, _position(page)

    def _live(self, engine: m.Engine) -> LiveEngine:
        """Return a live engine with all that is known of it."""
        clock = self._ledger.clock
        heard = self._heard.get((engine.spec.engine_id, engine.engine_epoch))
        return LiveEngine(
            engine,
            self._load(engine),
            m.EngineContact.SILENT if self.is_silent(engine) else engine.contact,
            max(0.0, (clock.now_ms() - engine.registered_at_ms) / 1000),
            None if heard is None else clock.monotonic() - heard,
            self._announced.get((engine.spec.engine_id, engine.engine_epoch), 0),
        )

    def announced(self, engine_id: str, engine_epoch: int) -> None:
        """Count an announcement that is on record."""
        at = (engine_id, engine_epoch)
        self._announced[at] = self._announced.get(at, 0) + 1

    def _load(self, engine: m.Engine) -> m.EngineLoad | None:
        item = self._ledger.mirror.get(keys.load(engine.spec.engine_id))
        if item is None:
            return None
        engine_epoch, load = understood(item, records.load_load) or (0, None)
        return load if engine_epoch == engine.engine_epoch else None

    # Incarnations.

    async def register(self, spec: m.EngineSpec, registration_id: str = "") -> m.Engine:
        """Start an incarnation: its epoch is larger than any this engine id had.

        With a `registration_id` a repeated call answers with the incarnation it started, while it lives. Of
        ids "NAME#NUMBER" with the same name the one with the higher number is the later registration; a
        call that comes after a later one's would end that for good, and is refused: LateRegistrationError.
        """
        ledger, store = self._ledger, self._ledger.store
        engine_key, epoch_key = keys.engine(spec.engine_id), keys.epoch(spec.engine_id)
        await ledger.refresh(engine_key, epoch_key)
        lease = await store.grant_lease(self._settings.engine_lease_s)

        def attempt() -> Decision[tuple[m.Engine, m.Engine | None]]:
            current, last = self.find(spec.engine_id), ledger.epoch(spec.engine_id)
            compares = same_state(current, last)
            if current.value and registration_id and current.value.registration_id == registration_id:
                return Decision((current.value, None), compares)
            if current.value and _is_late(registration_id, current.value.registration_id):
                raise LateRegistrationError(spec.engine_id, current.value.engine_epoch)
            now = ledger.clock.now_ms()
            before = max(last.value or 0, current.value.engine_epoch if current.value else 0)
            engine = m.Engine(
                spec=spec,
                engine_epoch=max(min(before, _MAX_EPOCH) + 1, now),
                lease_id=lease.lease_id,
                registered_at_ms=now,
                registration_id=registration_id,
            )
            writes: list[Write] = [
                Keep(epoch_key, records.dump_epoch(engine.engine_epoch), now + EPOCH_KEPT_MS),
                Put(engine_key, records.dump_engine(engine), lease.lease_id),
            ]
            return Decision((engine, current.value), compares, writes)

        try:
            engine, replaced = await ledger.decide(attempt)
        except BaseException:
            with suppress(StoreError):
                await store.revoke_lease(lease.lease_id)
            raise
        if engine.lease_id != lease.lease_id:
            await store.revoke_lease(lease.lease_id)
            await self.renew(spec.engine_id, engine.engine_epoch)
            return engine
        if replaced is not None:
            await store.revoke_lease(replaced.lease_id)
            ledger.tally.engines["replaced"] += 1
        ledger.tally.engines["registered"] += 1
        log.info(
            "engine_registered",
            engine_id=spec.engine_id,
            engine_epoch=engine.engine_epoch,
            role=spec.role.name.lower(),
            replaced_epoch=replaced.engine_epoch if replaced else None,
        )
        self._heard[spec.engine_id, engine.engine_epoch] = ledger.clock.monotonic()
        return engine

    async def renew(
        self, engine_id: str, engine_epoch: int, load: m.EngineLoad | None = None, *, stream: int = 0
    ) -> tuple[float, m.Engine]:
        """Have the lease last; returns what is left of it, in seconds. Never revives. Raises as `require`.

        The store is asked once per quarter of the ttl. Without a `stream` it is also a sign of life of an
        engine whose stream broke.
        """
        engine = (await self.require(engine_id, engine_epoch, stream)).engine
        at, now = (engine_id, engine_epoch), self._ledger.clock.monotonic()
        self._heard[at] = now
        kept = self._kept.get(at)
        if kept is None or now - kept[0] >= kept[1].ttl_s / 4:
            try:
                kept = now, await self._ledger.store.keep_lease(engine.lease_id)
            except LeaseNotFoundError:
                self._kept.pop(at, None)
                raise UnknownEngineError(engine_id) from None
            self._kept[at] = kept
        if not stream and self.is_silent(engine):
            self._broken.pop(at, None)
            engine = await self._set_contact(engine, m.EngineContact.UNARY) or engine
        if load is not None:
            await self._report(engine, load)
        return kept[1].ttl_s - (now - kept[0]), engine

    async def _report(self, engine: m.Engine, load: m.EngineLoad) -> None:
        at, now = (engine.spec.engine_id, engine.engine_epoch), self._ledger.clock.monotonic()
        reported = self._loads.get(at)
        if reported is not None and (reported[1] == load or now - reported[0] < _LOAD_EVERY_S):
            return
        self._loads[at] = now, load
        value = records.dump_load(engine.engine_epoch, load)
        await self._ledger.commit([], [Put(keys.load(engine.spec.engine_id), value, engine.lease_id)])

    async def drain(self, engine_id: str) -> int:
        """Stop new locations and claims; returns the claims still open. Raises UnknownEngineError."""
        ledger = self._ledger
        await ledger.refresh(keys.engine(engine_id))

        def attempt() -> Decision[m.Engine | None]:
            stored = self.find(engine_id)
            if stored.value is None:
                raise UnknownEngineError(engine_id)
            if stored.value.draining:
                return Decision(None, [stored.unchanged()])
            engine = replace(stored.value, draining=True)
            put = Put(stored.key, records.dump_engine(engine), engine.lease_id)
            return Decision(engine, [stored.unchanged()], [put])

        drained = await ledger.decide(attempt)
        if drained is not None:
            ledger.tally.engines["drained"] += 1
            log.info("engine_draining", engine_id=engine_id, engine_epoch=drained.engine_epoch)
        open_claims = 0
        async for item in ledger.scan(keys.engine_holdings(engine_id)):
            _, claim_id = understood(item, records.load_holding) or (b"", "")
            open_claims += bool(claim_id)
        return open_claims

    async def deregister(self, engine_id: str, engine_epoch: int) -> None:
        """End an incarnation; anything but the live one is left alone."""
        await self._ledger.refresh(keys.engine(engine_id))

        def attempt() -> Decision[m.Engine | None]:
            stored = self.find(engine_id)
            if stored.value is None or stored.value.engine_epoch != engine_epoch:
                return Decision(None)
            return Decision(stored.value, [stored.unchanged()], [Delete(stored.key)])

        ended = await self._ledger.decide(attempt)
        if ended is not None:
            await self._ledger.store.revoke_lease(ended.lease_id)
            self._ledger.tally.engines["deregistered"] += 1
            log.info("engine_deregistered", engine_id=engine_id, engine_epoch=engine_epoch)

    # Streams.

    async def attach(self, engine_id: str, engine_epoch: int) -> int:
        """Note that a stream of the engine's begins; returns its number, which makes older ones void.

        Raises UnknownEngineError, StaleEpochError.
        """
        await self.require(engine_id, engine_epoch)

        def attempt() -> Decision[int]:
            required = self.checked(engine_id, engine_epoch)
            engine = required.engine
            attached = replace(engine, stream=engine.stream + 1, contact=m.EngineContact.ATTACHED)
            put = Put(keys.engine(engine_id), records.dump_engine(attached), engine.lease_id)
            return Decision(attached.stream, [required.unchanged], [put])

        return await self._ledger.decide(attempt)

    def detach(self, engine_id: str, engine_epoch: int, stream: int) -> None:
        """Note that a stream has ended: from now on nothing of the engine's is handed out by this replica.

        Until its next sign of life, that is: a killed engine's stream ends at once, its lease only later.
        """
        self._broken[engine_id, engine_epoch] = stream

    async def tell_silent(self, engine_id: str, engine_epoch: int, stream: int) -> None:
        """Have the other replicas know what `detach` noted, unless the engine has a newer stream."""
        engine = self.find(engine_id).value
        if engine is not None and engine.engine_epoch == engine_epoch and engine.stream == stream:
            await self._set_contact(engine, m.EngineContact.SILENT)

    async def _set_contact(self, engine: m.Engine, contact: m.EngineContact) -> m.Engine | None:
        """Write how an incarnation is heard of; None if it or its stream is another by now."""

        def attempt() -> Decision[m.Engine | None]:
            stored = self.find(engine.spec.engine_id)
            current = stored.value
            if current is None or current.engine_epoch != engine.engine_epoch:
                return Decision(None)
            if current.stream != engine.stream:
                return Decision(None)
            changed = replace(current, contact=contact)
            put = Put(stored.key, records.dump_engine(changed), current.lease_id)
            return Decision(changed, [stored.unchanged()], [put])

        return await self._ledger.decide(attempt)

    async def forget_epoch(self, epoch_key: bytes) -> None:
        """Forget the last epoch of an engine id that does not live; a later one follows the clock."""
        engine_id = keys.engine_id_of_epoch(epoch_key)

        def attempt() -> Decision[None]:
            engine = self.find(engine_id)
            if engine.value is not None:
                return Decision(None)
            return Decision(None, [engine.unchanged()], [Delete(epoch_key)])

        await self._ledger.decide(attempt)

    def forget(self, engine_id: str, below_epoch: int) -> None:
        """Drop what this replica alone knows of incarnations that are over."""
        self.find(engine_id)  # which forgets it, if it is no more
        for known in (self._kept, self._loads, self._broken, self._heard, self._announced):
            for at in [at for at in known if at[0] == engine_id and at[1] < below_epoch]:
                del known[at]


def _is_late(registration_id: str, current: str) -> bool:
    """Tell whether a registration is numbered as an earlier one of the process whose current one is given."""
    name, mark, number = registration_id.rpartition("#")
    current_name, _, current_number = current.rpartition("#")
    if not mark or name != current_name or not (number.isdecimal() and current_number.isdecimal()):
        return False
    return int(number) < int(current_number)


def _position(page: Page) -> bytes:
    """Return what a page of engines or epochs ended at, b"" if none follows."""
    return page.items[-1].key[len(keys.ENGINES) :] if page.more else b""


def _engine_id(epoch_key: bytes, _: bytes) -> str:
    """Return whose a stored epoch is. Raises ValueError for a key that names no engine."""
    return keys.engine_id_of_epoch(epoch_key)
