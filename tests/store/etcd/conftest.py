"""Stores in the tests' etcd, and servers of a test's own."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest

from deploy.rig.etcd import EtcdCluster, EtcdServer
from kvplane.store.clock import SystemClock
from kvplane.store.etcd import EtcdSettings, EtcdStore

_numbers = itertools.count()

MakeStore = Callable[..., EtcdStore]
StartEtcd = Callable[..., EtcdServer]


@pytest.fixture
async def make_store() -> AsyncIterator[MakeStore]:
    """A function that gives a store by its endpoints; its other arguments are those of EtcdSettings.

    Without a prefix each has one of its own. They are closed at the end.
    """
    async with AsyncExitStack() as stores:

        def make(endpoints: str, *, clock: SystemClock | None = None, **settings: Any) -> EtcdStore:
            settings.setdefault("prefix", b"/test/%d/" % next(_numbers))
            store = EtcdStore(EtcdSettings(tuple(endpoints.split(",")), **settings), clock or SystemClock())
            stores.push_async_callback(store.aclose)
            return store

        yield make


@pytest.fixture
def store(make_store: MakeStore, etcd_server: EtcdServer) -> EtcdStore:
    """A store in the tests' etcd."""
    return make_store(etcd_server.endpoint, timeout_s=10.0)


@pytest.fixture
def start_etcd(tmp_path: Path) -> Iterator[StartEtcd]:
    """A function that starts an etcd of the test's own; arguments as EtcdServer's."""
    with ExitStack() as stops:

        def start(**options: Any) -> EtcdServer:
            server = EtcdServer(tmp_path / "etcd" / "data", **options)
            stops.callback(server.stop, 2.0)
            server.start()
            server.wait_ready()
            return server

        yield start


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Three members."""
    with EtcdCluster(tmp_path / "etcd", 3) as cluster:
        cluster.wait_ready()
        cluster.leader()
        yield cluster
