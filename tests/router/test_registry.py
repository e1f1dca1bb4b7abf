"""Engines that are known by their registration come and go with it, but for a control plane that forgot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import aiohttp

from kvplane.client import model as m
from kvplane.client.model import EngineRole
from kvplane.router.pool import EnginePool
from tests.fakes.core import EngineConfig
from tests.router.rig import chat, long_text, rig, until


def _spec(name: str) -> m.EngineSpec:
    return m.EngineSpec(m.EngineId(name), EngineRole.BOTH, endpoint=f"http://{name}:1")


def _registered(spec: m.EngineSpec, epoch: int, *, draining: bool = False) -> m.Engine:
    return m.Engine(spec, epoch, draining, True, None)


def _pool(session: aiohttp.ClientSession, monotonic: Callable[[], float]) -> EnginePool:
    return EnginePool(session, prefill_urls=(), decode_urls=(), probe_interval_s=1, monotonic=monotonic)


async def test_engines_come_from_the_registry_and_go_with_it() -> None:
    configs = [
        EngineConfig(role, announces_endpoint=True) for role in (EngineRole.PREFILL, EngineRole.DECODE)
    ]
    async with rig(prefill=configs[:1], decode=configs[1:], static=False, poll_interval_s=0.02) as r:
        assert (await r.say(long_text(100))).path == "cold"
        assert (await r.say("next")).path == "direct"
        await r.plane.deregister_engine(r.d.engine_id, 0)
        await until(lambda: not r.router.pool.decode_engines())
        assert (await r.post(chat("hello"))).status == 503


async def test_static_and_registered_engines_are_one_by_their_url() -> None:
    config = EngineConfig(EngineRole.DECODE, announces_endpoint=True)
    async with rig(decode=[config]) as r:
        decode = r.router.pool.decode_engines()
        assert [(e.url, e.engine_ids, e.static) for e in decode] == [(r.d.url, (r.d.engine_id,), True)]


async def test_engines_outlast_a_control_plane_that_forgot_them() -> None:
    """One that keeps its state in memory knows no engine when it has been started again."""
    now, engines = 0.0, [_spec(name) for name in "abc"]
    async with aiohttp.ClientSession() as session:
        pool = _pool(session, lambda: now)
        before = [_registered(spec, epoch, draining=epoch == 3) for epoch, spec in enumerate(engines, 1)]
        pool.merge(before)
        a, b, _ = pool.engines
        pool.merge([])
        assert list(pool.engines) == [a, b], "who was draining goes"
        assert not pool.engine_id(a), "and none is known to hold anything"
        now += 20
        pool.merge([_registered(engines[0], 11)])
        assert list(pool.engines) == [a, b]
        assert pool.engine_id(a) == "a"
        now += 10
        pool.merge([_registered(engines[0], 11)])
        assert list(pool.engines) == [a], "who has not come back in half a minute goes"


async def test_a_control_plane_that_forgot_keeps_no_engine_that_is_down_or_elsewhere() -> None:
    engines = [_spec(name) for name in "abc"]
    async with aiohttp.ClientSession() as session:
        pool = _pool(session, lambda: 0.0)
        pool.merge([_registered(spec, epoch) for epoch, spec in enumerate(engines, 1)])
        pool.failed(pool.engines[0], "killed")
        pool.merge([_registered(replace(engines[1], endpoint="http://moved:1"), 12)])
        assert [engine.url for engine in pool.engines] == ["http://c:1", "http://moved:1"]


async def test_requests_are_served_while_a_control_plane_has_forgotten_all() -> None:
    configs = [
        EngineConfig(role, announces_endpoint=True) for role in (EngineRole.PREFILL, EngineRole.DECODE)
    ]
    async with rig(prefill=configs[:1], decode=configs[1:], static=False, poll_interval_s=0.01) as r:
        await r.say("hello")
        forgotten = dict(r.plane.engines)
        r.plane.engines.clear()
        r.plane.locations.clear()
        await until(lambda: not r.router.pool.registered)
        assert (await r.say("next")).path == "cold"
        r.plane.engines.update(forgotten)
        await until(lambda: r.router.pool.registered)
        await r.say("and next")
        assert (await r.say("and last")).path == "direct"
