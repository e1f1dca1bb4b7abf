"""Every backend passes every check of the store's contract."""

from __future__ import annotations

import asyncio

import pytest

from kvplane.store.testing import CONFORMANCE_CHECKS, ConformanceCheck, StoreFactory
from tests.conformance.backends import BACKENDS, Backend


@pytest.fixture
def factory(backend: Backend, request: pytest.FixtureRequest) -> StoreFactory:
    """Makes fresh stores of the backend that is tested."""
    return backend.factory(request.getfixturevalue("quiet_etcd").endpoint if backend.needs_etcd else "")


@pytest.mark.parametrize("check", CONFORMANCE_CHECKS, ids=lambda check: check.name)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
async def test_store_conforms(backend: Backend, factory: StoreFactory, check: ConformanceCheck) -> None:
    if check.needs_controllable_clock and not backend.controllable_clock:
        pytest.skip("this backend's clock cannot be moved")
    before = asyncio.all_tasks()
    await check(factory)
    left = asyncio.all_tasks() - before
    if left:  # gRPC's own, of calls that were cancelled, end when its thread has said so
        await asyncio.wait(left, timeout=2.0)
    assert not asyncio.all_tasks() - before, "the check or the store left tasks behind"


def test_checks_are_described_and_named_once() -> None:
    assert len({check.name for check in CONFORMANCE_CHECKS}) == len(CONFORMANCE_CHECKS)
    assert all(check.description for check in CONFORMANCE_CHECKS)
