from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.controlplane.harness import Rig, running


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running() as rig:
        yield rig
