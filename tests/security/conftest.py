from __future__ import annotations

from pathlib import Path

import pytest

from tests.security.authority import Authority


@pytest.fixture(scope="session")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Certificates that no test changes."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    authority.server()
    for role in ("engine", "router", "viewer", "admin", "nobody"):
        authority.client(role, [f"spiffe://kv.example/{role}"])
    authority.client("by-dns", dns=["router.kv.example"])
    authority.client("expired", ["spiffe://kv.example/admin"], expired=True)
    return authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Certificates of the test's own."""
    return Authority(tmp_path)
