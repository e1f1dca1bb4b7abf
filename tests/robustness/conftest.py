"""One fleet for all scenarios: its traffic goes on while one fault after another comes and goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.robustness.fleet import Fleet


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
