from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.rig.etcd import EtcdServer


@pytest.fixture(scope="session")
def quiet_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd for these checks alone: they count revisions, and leases of other tests end in theirs."""
    with EtcdServer(tmp_path_factory.mktemp("quiet-etcd") / "data") as server:
        server.wait_ready()
        yield server
