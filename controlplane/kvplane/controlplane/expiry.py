"""What ends by itself: locations at their deadline, claims after their timeout, records of dead engines."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import structlog

from kvplane.controlplane import eager, keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.crowd import Crowd
from kvplane.controlplane.engines import EngineRegistry
from kvplane.controlplane.errors import DomainError
from kvplane.controlplane.fleet_time import FleetTime
from kvplane.controlplane.mirror import Mirror
from kvplane.controlplane.quotas import Quotas
from kvplane.controlplane.releases import Releases
from kvplane.store.base import Event
from kvplane.store.errors import InvalidStoreRequestError, StoreClosedError, StoreError

log = structlog.get_logger(__name__)

_TICK_S = 0.25
_PAUSE_S = 0.001
"""What is due is in no hurry, since nobody is given it: after a few, there is time for others."""
_PATIENCE_MS = 2000
"""How much longer than the replica before it a replica waits for what is due."""


class Sweeper:
    """Ends what is due. Not needed for correctness: every reader checks deadlines and epochs itself.

    Any number of replicas may sweep the same store, each end being a compare-transaction; so that they do
    not all do the same, each waits a little longer than the one before it, in the order of `rank`.
    """

    def __init__(
        self,
        mirror: Mirror,
        releases: Releases,
        engines: EngineRegistry,
        clock: FleetTime,
        settings: m.Settings,
        rank: Callable[[], int] = lambda: 0,
        quotas: Quotas | None = None,
    ) -> None:
        self._rank = rank
        self._quotas = quotas
        self._mirror = mirror
        self._releases = releases
        self._engines = engines
        self._clock = clock
        self._settings = settings
        self._locations: list[tuple[int, bytes]] = []  # heaps of (when it is due, key)
        self._claims: list[tuple[int, bytes]] = []
        self._is_postponed = False
        self._conversations = Crowd()
        self._begun = Crowd()
        self._epochs: OrderedDict[bytes, None] = OrderedDict()
        self._over: dict[tuple[str, int], int] = {}
        mirror.listen(keys.LOCATIONS, self._on_location)
        mirror.listen(keys.CLAIMS, self._on_claim)
        mirror.listen(keys.TURNS, self._conversations.note)
        mirror.listen(keys.BEGUN, self._begun.note)
        mirror.listen(keys.EPOCHS, lambda event: _note(self._epochs, event))
        mirror.listen(keys.ENGINES, self._on_engine)

    def _on_location(self, event: Event) -> None:
        if event.current is not None:
            due_ms = records.location_deadline_ms(event.current.value)
            heapq.heappush(self._locations, (due_ms, event.key))

    def _on_claim(self, event: Event) -> None:
        if event.current is not None:
            keys.claim_id_of(event.key)  # a key that names no claim cannot be swept, and is not counted
            ends = records.claim_deadline_ms(event.current.value) + self._settings.claim_grace_s * 1000
            heapq.heappush(self._claims, (round(ends), event.key))

    def _on_engine(self, event: Event) -> None:
        """Note which incarnations are over: all below the current one, or all up to the one that went."""
        if event.current is None:  # its epoch's record stayed as long as it lived
            engine_epoch = self._mirror.get(keys.epoch(keys.engine_id_of(event.key)))
            if engine_epoch is not None:
                self._epochs[engine_epoch.key] = None
                self._epochs.move_to_end(engine_epoch.key)
        if event.previous is not None:
            gone = records.load_engine(event.previous.value)
            current = records.load_engine(event.current.value) if event.current is not None else None
            if current is None or current.engine_epoch != gone.engine_epoch:
                self._over[gone.spec.engine_id, gone.engine_epoch + 1] = self._clock.now_ms()
        elif event.current is not None:
            engine = records.load_engine(event.current.value)
            self._over[engine.spec.engine_id, engine.engine_epoch] = self._clock.now_ms()

    def overdue_s(self) -> float:
        """Return for how long what is due longest has been so, in seconds; 0 if nothing is."""
        clock = self._clock
        locations = clock.now_ms() - self._locations[0][0] if self._locations else 0
        claims = clock.patient_ms() - self._claims[0][0] if self._claims else 0
        return max(0, locations, claims) / 1000

    async def run(self) -> None:
        """Sweep until the store is closed."""
        while True:
            try:
                await self.sweep()
            except StoreClosedError:
                return
            await self._clock.sleep(_TICK_S)

    async def sweep(self) -> None:
        """End all that is due now, as far as the store takes it."""
        rank, clock = self._rank(), self._clock
        waits_ms = rank * _PATIENCE_MS
        done = await self._sweep_due(
            self._locations, clock.now_ms() - waits_ms, self._releases.expire_location
        )
        done = done and await self._sweep_due(
            self._claims, clock.patient_ms() - waits_ms, self._time_out_claim
        )
        done = done and (bool(rank) or await self._make_room())
        done = done and (bool(rank) or await self._trim_tenants())
        done = done and await self._purge_engines(clock.now_ms() - waits_ms)
        if done:
            self._is_postponed = False

    async def _sweep_due(
        self, due: list[tuple[int, bytes]], until_ms: int, end: Callable[[bytes], Awaitable[object]]
    ) -> bool:
        ended = 0
        while due and due[0][0] <= until_ms:
            ended += 1
            if not ended % eager.SLICE:
                await self._clock.sleep(_PAUSE_S)
            entry = heapq.heappop(due)
            if not await self._try(end(entry[1])):
                heapq.heappush(due, entry)
                return False
        return True

    async def _time_out_claim(self, store_key: bytes) -> None:
        await self._releases.time_out_claim(keys.claim_id_of(store_key))

    async def _make_room(self) -> bool:
        most = self._settings.max_conversations
        return (
            await self._bound_crowd(self._conversations, most, self._releases.evict)
            # They go after a minute, but a flood of requests that name no conversation leaves one each.
            and await self._bound_crowd(self._begun, most, self._releases.forget_begun)
            and await self._bound(self._epochs, self._settings.max_epochs, self._engines.forget_epoch)
        )

    async def _trim_tenants(self) -> bool:
        """Have tenants keep to their quotas, which may have been lowered."""
        if self._quotas is None:
            return True
        for tenant in self._quotas.over():
            if not await self._try(self._quotas.trim(tenant)):
                return False
        return True

    async def _bound_crowd(
        self, known: Crowd, most: int, forget: Callable[[bytes], Awaitable[object]]
    ) -> bool:
        """Forget records as long as there are more than `most`: the oldest of the tenant that has most."""
        while len(known) > most:
            key = known.take()
            if not await self._try(forget(key)):
                known.put_back(key)
                return False
        return True

    async def _bound(
        self, known: OrderedDict[bytes, None], most: int, forget: Callable[[bytes], Awaitable[object]]
    ) -> bool:
        """Forget the oldest of some records as long as there are more than `most`."""
        while len(known) > most:
            key, _ = known.popitem(last=False)
            if not await self._try(forget(key)):
                known[key] = None
                known.move_to_end(key, last=False)
                return False
        return True

    async def _purge_engines(self, until_ms: int) -> bool:
        for (engine_id, below_epoch), since_ms in list(self._over.items()):
            if since_ms <= until_ms:
                if not await self._try(self._releases.purge_engine(engine_id, below_epoch)):
                    return False
                del self._over[engine_id, below_epoch]
                self._engines.forget(engine_id, below_epoch)
        return True

    async def _try(self, ending: Awaitable[object]) -> bool:
        """Tell whether it could be done; what could not is for the next sweep, and logged once."""
        try:
            await ending
        except StoreClosedError:
            raise
        except InvalidStoreRequestError as error:
            log.error("record_not_swept", cause=str(error))  # and never will be
        except (StoreError, DomainError) as error:
            if not self._is_postponed:
                self._is_postponed = True
                log.warning("sweep_postponed", cause=str(error))
            return False
        except Exception:
            log.exception("record_not_swept")  # one bad record is no reason to leave the others
        return True


def _note(known: OrderedDict[bytes, None], event: Event) -> None:
    """Keep the keys of a kind of record in the order in which they were written last."""
    if event.current is None:
        known.pop(event.key, None)
    else:
        known[event.key] = None
        known.move_to_end(event.key)
