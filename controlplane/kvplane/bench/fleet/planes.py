"""Control planes: the real ones over a store in memory, without a network between."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvplane.bench.fleet.simulation import Simulation
from kvplane.bench.rig import BenchError
from kvplane.client import model as c
from kvplane.client.errors import ControlPlaneUnavailableError
from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.ledger import understood
from kvplane.controlplane.quotas import TenantLimits
from kvplane.controlplane.server import ControlPlane
from kvplane.store.base import Compare, Event, KeyValue, Operation, Put, Transaction
from kvplane.store.clock import Clock
from kvplane.store.memory import MemoryStore

T = TypeVar("T")

_SMALL_MS = 1000
_MESSAGE_S = 0.002
_TIMED = 16
"""Operations of a kind of which one is timed: reading CPU time takes some microseconds itself."""
_KINDS = {
    keys.LOCATIONS: "locations",
    keys.TURNS: "turns",
    keys.CLAIMS: "claims",
    keys.ORDERS: "orders",
    keys.ENGINES: "engines",
    keys.EPOCHS: "engines",
    keys.HOLDINGS: "holders",
    keys.LOADS: "loads",
    keys.PULSES: "pulses",
}


class CountingStore(MemoryStore):
    """A store in memory that counts what is written; as `shared`, replicas follow it as they follow etcd."""

    def __init__(self, clock: Clock, *, shared: bool) -> None:
        super().__init__(clock)
        self._is_shared = shared
        self.transactions = 0
        """Those that wrote something."""
        self.reads = 0
        """Those that only compared."""
        self.failed = 0
        """Those whose compares did not hold."""
        self.written_bytes = 0
        self.writes: Counter[str] = Counter()
        """Puts and deletes, by kind of record."""

    @property
    def shared(self) -> bool:
        """See Store."""
        return self._is_shared

    def observe(self, listener: Callable[[Event], None]) -> Mapping[bytes, KeyValue] | None:  # type: ignore[override]
        """See Store: nobody sees into one that is shared."""
        return None if self._is_shared else super().observe(listener)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Transaction:
        """See Store."""
        done = await super().transact(compares, operations)
        if not done.succeeded:
            self.failed += 1
        elif not operations:
            self.reads += 1
        else:
            self.transactions += 1
            for operation in operations:
                self.writes[_KINDS.get(operation.key[:2], "others")] += 1
                if isinstance(operation, Put):
                    self.written_bytes += len(operation.key) + len(operation.value)
        return done

    def __len__(self) -> int:
        """Return how many records there are."""
        return len(self._items)

    def records(self) -> list[KeyValue]:
        """Return all records there are."""
        return list(self._items.values())


class Listener(Protocol):
    """An engine's session, as its replica sees it."""

    def ordered(self, order: m.Order) -> None:
        """Take an order to free blocks."""

    def wanted(self, request_id: str, ttl_s: float) -> None:
        """Take the wish to keep a request's blocks for so long."""

    def drained(self) -> None:
        """Take the request to announce nothing more."""

    def lost(self) -> None:
        """The replica is gone."""


class Replica:
    """One control plane, with the engines that are attached to it."""

    def __init__(
        self,
        simulation: Simulation,
        store: CountingStore,
        settings: m.Settings,
        limits: TenantLimits | None,
    ) -> None:
        self._simulation = simulation
        self.plane = ControlPlane(store, simulation.clock, settings, limits)
        self.attached: dict[tuple[str, int], Listener] = {}
        self.alive = True
        mirror = self.plane.mirror
        mirror.listen(keys.ORDERS, self._on_order)
        mirror.listen(keys.LOCATIONS, self._on_location)
        mirror.listen(keys.ENGINES, self._on_engine)
        self._tasks = self.plane.start()

    async def stop(self) -> None:
        """Lose it: engines notice at once that their streams broke."""
        self.alive = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        listeners, self.attached = list(self.attached.values()), {}
        for listener in listeners:
            listener.lost()

    def _on_order(self, event: Event) -> None:
        if event.current is not None and self.attached:
            holder = keys.holder_of(event.key)
            listener = self.attached.get((holder.engine_id, holder.engine_epoch))
            if listener is not None:
                order = records.load_order(holder, event.current.value)
                self._simulation.after(_MESSAGE_S, lambda: listener.ordered(order))

    def _on_location(self, event: Event) -> None:
        """As Attachments does for a stream: more is wanted than before, and than there is."""
        if event.current is None or not self.attached:
            return
        if records.location_lacks_ms(event.current.value) <= _SMALL_MS:
            return
        holder, until_ms = records.location_wish(event.current.value)
        before = None if event.previous is None else understood(event.previous, records.location_wish)
        if before is not None and before[0] == holder and until_ms <= before[1]:
            return
        listener = self.attached.get((holder.engine_id, holder.engine_epoch))
        if listener is not None:
            ttl_s = (until_ms - self._simulation.clock.now_ms()) / 1000
            self._simulation.after(_MESSAGE_S, lambda: listener.wanted(holder.request_id, ttl_s))

    def _on_engine(self, event: Event) -> None:
        if event.current is None or event.previous is None or not self.attached:
            return
        engine = records.load_engine(event.current.value)
        listener = self.attached.get((engine.spec.engine_id, engine.engine_epoch))
        if engine.draining and listener is not None:
            self._simulation.after(_MESSAGE_S, listener.drained)


class Planes:
    """All replicas, and what they are asked."""

    def __init__(
        self,
        simulation: Simulation,
        *,
        replicas: int,
        settings: m.Settings,
        limits: TenantLimits | None = None,
    ) -> None:
        self._simulation = simulation
        self._settings = settings
        self._limits = limits
        self._shared = replicas > 1
        self.store = CountingStore(simulation.clock, shared=self._shared)
        self.replicas: list[Replica] = []
        self._count = replicas
        self._next = 0
        self.operations: Counter[str] = Counter()
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        self.timed: Counter[str] = Counter()
        """Of the operations, those whose CPU time was measured: those that did not have to wait."""
        self.listed: tuple[float, list[c.Engine]] = (float("-inf"), [])
        """The registry as it was last asked for, and when."""
        self.engines: dict[str, tuple[m.Engine, m.EngineLoad | None, c.Engine]] = {}
        """By id: an engine as it was last listed, and as a client has it."""
        self._retired: deque[CountingStore] = deque()

    async def start(self) -> None:
        """Start all replicas and wait until they answer: before the simulation begins."""
        for number in range(self._count):
            self.start_replica(number)
        for _ in range(200):
            if all(replica.plane.mirror.caught_up.is_set() for replica in self.replicas):
                return
            await self._simulation.clock.advance(0.1)
        raise BenchError("the control planes did not start")

    def start_replica(self, number: int) -> None:
        """Start a replica that is not there. Alone, it begins with nothing: its state was in memory."""
        if number < len(self.replicas) and self.replicas[number].alive:
            return
        if self.replicas and not self._shared:
            self._retired.append(self.store)
            self.store = CountingStore(self._simulation.clock, shared=False)
        replica = Replica(self._simulation, self.store, self._settings, self._limits)
        if number < len(self.replicas):
            self.replicas[number] = replica
        else:
            self.replicas.append(replica)

    async def stop_replica(self, number: int) -> None:
        """Lose a replica."""
        if number < len(self.replicas) and self.replicas[number].alive:
            await self.replicas[number].stop()

    def stores(self) -> list[CountingStore]:
        """Return the store, and those that were lost with their replica."""
        return [*self._retired, self.store]

    def choose(self) -> Replica:
        """Return the next replica that answers. Raises ControlPlaneUnavailableError."""
        for _ in range(len(self.replicas)):
            self._next = (self._next + 1) % len(self.replicas)
            replica = self.replicas[self._next]
            if replica.alive and replica.plane.mirror.caught_up.is_set():
                return replica
        raise ControlPlaneUnavailableError("no control plane answers")

    async def measured(self, name: str, operation: Coroutine[Any, Any, T]) -> T:
        """Do one operation and count it; of one in a few its CPU time, unless it had to wait."""
        self.operations[name] += 1
        if self.operations[name] % _TIMED:
            return await operation
        events, began = self._simulation.events, time.thread_time()
        result = await operation
        if events == self._simulation.events:
            self.cpu_s[name] += time.thread_time() - began
            self.timed[name] += 1
        return result

    async def aclose(self) -> None:
        """Stop all there is."""
        for number in range(len(self.replicas)):
            replica = self.replicas[number]
            replica.attached.clear()
            await self.stop_replica(number)
        for store in self.stores():
            await store.aclose()
