"""The conformance checks notice defects: of each of many broken stores, and each check of at least one."""

from __future__ import annotations

import pytest

import tests.conformance.mutants_leases
import tests.conformance.mutants_transactions
import tests.conformance.mutants_watch  # noqa: F401 - each puts its stores on the list
from kvplane.store.errors import StoreError
from kvplane.store.testing import CONFORMANCE_CHECKS
from tests.conformance.backends import memory_factory
from tests.conformance.mutants import MUTANTS, Mutant

CHECKS = {check.name: check for check in CONFORMANCE_CHECKS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.store.__name__)
async def test_a_defect_is_noticed(mutant: Mutant) -> None:
    assert mutant.checks
    for name in mutant.checks:
        with pytest.raises((AssertionError, StoreError, LookupError)):  # noqa: PT012 - whatever the store says
            await CHECKS[name](memory_factory(mutant.store, patience_s=0.05))
            pytest.fail(f"{name} did not notice")  # an error of its own kind, not caught above


def test_every_check_has_failed_for_some_defect() -> None:
    assert {name for mutant in MUTANTS for name in mutant.checks} == set(CHECKS)
