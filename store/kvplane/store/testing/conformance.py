"""All conformance checks, the boundaries first."""

from __future__ import annotations

from kvplane.store.testing.checks_boundaries import CHECKLIST as BOUNDARIES
from kvplane.store.testing.checks_leases import CHECKLIST as LEASES
from kvplane.store.testing.checks_transactions import CHECKLIST as TRANSACTIONS
from kvplane.store.testing.checks_watch import CHECKLIST as WATCHES
from kvplane.store.testing.harness import ConformanceCheck

CONFORMANCE_CHECKS: tuple[ConformanceCheck, ...] = (
    *BOUNDARIES.checks,
    *LEASES.checks,
    *TRANSACTIONS.checks,
    *WATCHES.checks,
)
"""What every Store has to pass; see ConformanceCheck."""
