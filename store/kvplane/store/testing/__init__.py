"""For tests of stores and of what uses them: a clock to move, faults to order, checks of the contract.

Shipped, so that a store written elsewhere can be checked the same way. Needs no test framework::

    for check in CONFORMANCE_CHECKS:
        await check(factory)

where `factory()` is an async context manager that gives a fresh StoreUnderTest.
"""

from kvplane.store.testing.clock import ManualClock, settle
from kvplane.store.testing.conformance import CONFORMANCE_CHECKS
from kvplane.store.testing.faults import FaultInjectingStore, Gate, StoreCall, When
from kvplane.store.testing.harness import ConformanceCheck, StoreFactory, StoreUnderTest

__all__ = [
    "CONFORMANCE_CHECKS",
    "ConformanceCheck",
    "FaultInjectingStore",
    "Gate",
    "ManualClock",
    "StoreCall",
    "StoreFactory",
    "StoreUnderTest",
    "When",
    "settle",
]
