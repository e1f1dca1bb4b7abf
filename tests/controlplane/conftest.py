from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.controlplane.harness import Rig, running
from tests.controlplane.wire import Wire


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    await wire.start()
    yield wire
    await wire.stop()
