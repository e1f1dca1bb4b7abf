"""What is measured beyond bare counts, where metrics are shown: durations, what is retained, who is there."""

from __future__ import annotations

from collections.abc import Mapping

from kvplane.controlplane.books import RetentionBooks
from kvplane.controlplane.census import EngineCensus
from kvplane.controlplane.mirror import Mirror
from kvplane.controlplane.tally import CallTally, Histogram, Tally
from kvplane.store.base import Store
from kvplane.store.clock import Clock
from kvplane.store.instrumented import InstrumentedStore, Outcome

UNARY = (
    "RegisterEngine",
    "RenewEngine",
    "DrainEngine",
    "DeregisterEngine",
    "ListEngines",
    "AnnounceLocation",
    "LookupLocation",
    "BeginTurn",
    "ClaimLocation",
    "ReleaseLocation",
    "TouchConversation",
    "RenewLocations",
    "ListLocations",
    "GetStatus",
)
STREAMS = ("AttachEngine", "WatchLocations", "Turns")
OPERATIONS = ("lookup", "begin_turn", "claim", "release", "touch")
"""What a Turns stream carries, as the protos name it."""


_TIMED_EVERY = 8
"""Of so many operations of a kind one is timed: they take some 20 microseconds, and timing them one."""


class _Calls(dict[str, CallTally]):
    """Calls by method; one that is added to the API is counted without being named here."""

    def __init__(self, clock: Clock) -> None:
        super().__init__({name: CallTally(clock.monotonic) for name in UNARY})
        self.update({name: CallTally(clock.monotonic, timed=False) for name in STREAMS})
        self._clock = clock

    def __missing__(self, method: str) -> CallTally:
        calls = self[method] = CallTally(self._clock.monotonic)
        return calls


class Meter:
    """Of one control plane. Make it first, then `instrument` the store, then give both to the server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.calls: Mapping[str, CallTally] = _Calls(clock)
        """RPCs by method."""
        self.operations: Mapping[str, CallTally] = {
            name: CallTally(clock.monotonic, every=_TIMED_EVERY) for name in OPERATIONS
        }
        """Operations of Turns streams by kind."""
        self.store_calls: dict[tuple[str, str], int] = {}
        """Calls of the store by method and how they went."""
        self.store_took: dict[str, Histogram] = {}
        """How long those took by method, whatever came of them; of watches nothing."""
        self.tally = Tally(clock.monotonic)
        """All else that is counted, once it follows a control plane; likewise the next three."""
        self.mirror: Mirror | None = None
        self.books: RetentionBooks | None = None
        self.census: EngineCensus | None = None

    def instrument(self, store: Store) -> Store:
        """Return a store that is measured, and otherwise the same.

        One that only this process uses is not: its calls are done at once, and so often that measuring them
        would take a twentieth of all its time.
        """
        return InstrumentedStore(store, self._store_called, self._clock) if store.shared else store

    def _store_called(self, operation: str, seconds: float, outcome: Outcome) -> None:
        at = (operation, outcome._value_)  # the enum's own hash takes as long as all else here
        self.store_calls[at] = self.store_calls.get(at, 0) + 1
        if operation != "watch":
            took = self.store_took.get(operation)
            if took is None:
                took = self.store_took[operation] = Histogram()
            took.observe(seconds)

    def follow(self, mirror: Mirror, tally: Tally) -> Mapping[str, CallTally]:
        """Follow a control plane; returns where the operations of its Turns streams are counted."""
        self.mirror, self.tally = mirror, tally
        self.books = RetentionBooks(mirror, tally, self._clock.monotonic)
        self.census = EngineCensus(mirror)
        return self.operations
