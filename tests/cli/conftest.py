from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.cli.fleet import Fleet, fleet


@pytest.fixture
async def f() -> AsyncIterator[Fleet]:
    async with fleet() as made:
        yield made
