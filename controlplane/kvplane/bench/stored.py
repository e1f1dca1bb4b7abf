"""`kvplane bench store`: the benches of a store, by name."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import uvloop

from kvplane.bench import etcd, stores
from kvplane.bench.figures import Row
from kvplane.bench.rig import BenchError, Options, placed
from kvplane.store.base import Store
from kvplane.store.clock import Clock, SystemClock
from kvplane.store.errors import StoreError
from kvplane.store.etcd import EtcdSettings, EtcdStore
from kvplane.store.etcd.url import SCHEMES, etcd_settings
from kvplane.store.url import open_store

CONTRACT, CLAIMS = "contract", "claims"


def names(url: str) -> list[str]:
    """Return the benches that there are for a store's URL."""
    return [CONTRACT, CLAIMS] if _is_etcd(url) else [CONTRACT]


def shown(url: str) -> str:
    """Return what may be shown of a URL: nothing that could be secret."""
    return f"etcd://{','.join(etcd_settings(url).endpoints)}" if _is_etcd(url) else "memory://"


def run(url: str, chosen: Sequence[str], options: Options) -> list[Row]:
    """Run benches one after another; blocks. Raises BenchError, ServerDiedError, StoreUrlError."""
    with placed() as (server_core, _):
        return uvloop.run(_run(url, chosen, options, server_core))


async def _run(url: str, chosen: Sequence[str], options: Options, core: int | None) -> list[Row]:
    rows, clock = list[Row](), SystemClock()
    settings = etcd.own_prefix(etcd_settings(url)) if _is_etcd(url) else None
    try:
        if CONTRACT in chosen:
            async with _opened(url, settings, clock) as store:
                rows += await stores.contract(store, options)
        if CLAIMS in chosen and settings is not None:
            rows += await etcd.run(settings, clock, options, core)
    except* grpc.aio.AioRpcError as errors:
        raise BenchError(f"a call failed: {_first(errors)}") from None
    except* StoreError as errors:
        raise BenchError(f"the store does not answer: {_first(errors)}") from None
    return rows


def _opened(url: str, settings: EtcdSettings | None, clock: Clock) -> Store:
    return open_store(url, clock) if settings is None else EtcdStore(settings, clock)


def _is_etcd(url: str) -> bool:
    return url.partition("://")[0].lower() in SCHEMES


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
