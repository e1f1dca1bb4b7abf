"""`kvplane bench store`: what a store's transactions, reads and leases cost, with one and many in flight."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kvplane.bench.figures import Row, Target, percentile
from kvplane.bench.process import cpu_s
from kvplane.bench.rig import BenchError, Options
from kvplane.store.base import Compare, Delete, Operation, Put, Store, Transaction

IN_FLIGHT = 64
VALUE = b"v" * 900
SMALL_VALUE = b"t" * 64
LEASE_S = 900
_CALIBRATION_S = 0.2
_MOST = 20_000
_PREPARED = 40
"""Conversations written by one transaction before anything is measured: 3 keys each, 128 at most."""

Act = Callable[[int], Awaitable[None]]
Measure = Callable[[int, int], Awaitable["Timed"]]
"""Acts so many times, so many at once."""
Write = Callable[[Sequence[Compare], Sequence[Operation]], Awaitable[Transaction]]


@dataclass(frozen=True, slots=True)
class Claimable:
    """A conversation's keys as a claim finds them, all written at `revision`."""

    stem: bytes
    revision: int
    engine: bytes
    engine_revision: int
    lease_id: int

    def claim(self) -> tuple[list[Compare], list[Operation]]:
        """Return what a claim compares and writes: as the control plane's, in number and size."""
        location, claim, turns, holding = (self.stem + part for part in (b"/l", b"/c", b"/t", b"/h"))
        compares = [
            Compare(location, self.revision),
            Compare(claim, 0),
            Compare(turns, self.revision),
            Compare(self.engine, self.engine_revision),
        ]
        operations: list[Operation] = [
            Delete(location),
            Put(claim, VALUE, self.lease_id),
            Put(holding, SMALL_VALUE, self.lease_id),
            Put(turns, SMALL_VALUE, self.lease_id),
        ]
        return compares, operations


async def claimable(write: Write, stem: bytes, count: int, lease_id: int) -> list[Claimable]:
    """Write the keys of `count` conversations and of their engine."""
    engine = stem + b"engine"
    engine_revision = _written(await write([Compare(engine, 0)], [Put(engine, SMALL_VALUE, lease_id)]))
    made = list[Claimable]()
    for start in range(0, count, _PREPARED):
        stems = [stem + b"%08d" % number for number in range(start, min(count, start + _PREPARED))]
        puts = [
            Put(part + suffix, value, lease_id)
            for part in stems
            for suffix, value in ((b"/l", VALUE), (b"/t", SMALL_VALUE), (b"/h", SMALL_VALUE))
        ]
        revision = _written(await write([], puts))
        made += [Claimable(part, revision, engine, engine_revision, lease_id) for part in stems]
    return made


def _written(transaction: Transaction) -> int:
    if not transaction.succeeded:
        raise BenchError("a transaction's compares did not hold, though nobody else writes there")
    return transaction.revision


@dataclass(slots=True)
class Timed:
    """What some acts took: seconds in all, each one's, and the CPU share of this process."""

    elapsed_s: float
    each_s: list[float]
    cpu: float

    def figure(self, in_flight: int) -> float:
        """Return the median in ms with one in flight, else acts per second."""
        return percentile(self.each_s, 0.5) * 1000 if in_flight == 1 else len(self.each_s) / self.elapsed_s


async def timed(act: Act, count: int, in_flight: int) -> Timed:
    """Act `count` times, `in_flight` at once, numbered from 0."""
    numbers, each, clock = iter(range(count)), list[float](), time.perf_counter

    async def work() -> None:
        for number in numbers:
            started = clock()
            await act(number)
            each.append(clock() - started)

    before, began = cpu_s(), clock()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(in_flight):
            tasks.create_task(work())
    elapsed_s = clock() - began
    return Timed(elapsed_s, each, (cpu_s() - before) / elapsed_s)


class Workload(ABC):
    """One kind of act on a store: made ready for `count` of them, unmeasured, then done."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lease_id = 0

    @abstractmethod
    async def ready(self, count: int) -> Act:
        """Write what `count` acts need; returns the act."""

    async def undo(self) -> None:
        """Remove everything again."""
        await self._store.revoke_lease(self._lease_id)

    async def _leased(self) -> tuple[bytes, int]:
        """Return a new stem for keys and the lease that ends them."""
        self._lease_id = (await self._store.grant_lease(LEASE_S)).lease_id
        return b"bench/%s/" % secrets.token_hex(8).encode(), self._lease_id


class Puts(Workload):
    """A compare and a put."""

    async def ready(self, count: int) -> Act:
        """See Workload."""
        stem, lease_id = await self._leased()

        async def act(number: int) -> None:
            key = stem + b"%08d" % number
            _written(await self._store.transact([Compare(key, 0)], [Put(key, VALUE, lease_id)]))

        return act


class Claims(Workload):
    """Transactions as claims make them."""

    async def ready(self, count: int) -> Act:
        """See Workload."""
        stem, lease_id = await self._leased()
        made = await claimable(self._store.transact, stem, count, lease_id)
        transactions = [one.claim() for one in made]

        async def act(number: int) -> None:
            _written(await self._store.transact(*transactions[number]))

        return act


class Gets(Workload):
    """Reads of a key that is there."""

    async def ready(self, count: int) -> Act:
        """See Workload."""
        stem, lease_id = await self._leased()
        key = stem + b"read"
        _written(await self._store.transact([], [Put(key, VALUE, lease_id)]))

        async def act(number: int) -> None:
            if await self._store.get(key) is None:
                raise BenchError("a key that was written is not there")

        return act


class Leases(Workload):
    """Leases granted, which end when all is done."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._granted: list[int] = []

    async def ready(self, count: int) -> Act:
        """See Workload."""
        self._granted = []

        async def act(number: int) -> None:
            self._granted.append((await self._store.grant_lease(LEASE_S)).lease_id)

        return act

    async def undo(self) -> None:
        """See Workload."""
        granted = iter(self._granted)

        async def revoke() -> None:
            for lease_id in granted:
                await self._store.revoke_lease(lease_id)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(IN_FLIGHT):
                tasks.create_task(revoke())


class Undoable(Protocol):
    """Something to do many times."""

    async def ready(self, count: int) -> Act:
        """See Workload."""

    async def undo(self) -> None:
        """See Workload."""


async def once(workload: Undoable, count: int, in_flight: int) -> Timed:
    """Make ready, act, undo."""
    act = await workload.ready(count)
    try:
        return await timed(act, count, in_flight)
    finally:
        await workload.undo()


async def fitting(measure: Measure, in_flight: int, options: Options) -> int:
    """Return how many acts take about the options' seconds."""
    tried = 4 * in_flight
    while True:
        done = await measure(tried, in_flight)
        rate = tried / done.elapsed_s
        if done.elapsed_s >= min(_CALIBRATION_S, options.seconds / 2) or tried >= _MOST:
            return max(in_flight, min(_MOST, round(rate * options.seconds)))
        tried = min(_MOST, tried * 4)


KINDS: dict[str, Callable[[Store], Workload]] = {
    "compare and put": Puts,
    "transaction as a claim's (4 compares, 4 writes)": Claims,
    "get": Gets,
    "lease grant": Leases,
}


async def contract(store: Store, options: Options) -> list[Row]:
    """Measure the store's methods, with one and many in flight."""
    rows = list[Row]()
    for name, kind in KINDS.items():
        for in_flight in (1, IN_FLIGHT):
            measure = partial(once, kind(store))
            count = await fitting(measure, in_flight, options)
            done = list[Timed]()
            for number in range(options.rounds):
                options.progress(
                    f"store: {name}, {in_flight} in flight, round {number + 1} of {options.rounds}"
                )
                done.append(await measure(count, in_flight))
            rows.append(row("store", name, in_flight, done))
    return rows


def row(
    bench: str,
    name: str,
    in_flight: int,
    done: Sequence[Timed],
    against: Sequence[Timed] = (),
    target: Target | None = None,
    note: str = "",
) -> Row:
    """Return the row of some rounds: the median in ms with one in flight, else the rate."""
    return Row(
        bench,
        f"{name}: p50, 1 in flight" if in_flight == 1 else f"{name}: {in_flight} in flight",
        "ms" if in_flight == 1 else "/s",
        tuple(one.figure(in_flight) for one in done),
        tuple(one.figure(in_flight) for one in against),
        target,
        note=note or f"{mean_share(done):.0%} of this process's core",
    )


def mean_share(done: Sequence[Timed]) -> float:
    """Return the mean CPU share of some rounds."""
    return sum(one.cpu for one in done) / len(done)
