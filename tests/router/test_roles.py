"""Engines that are given with one role and registered with another."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from kvplane.client.model import EngineId, EngineRole, EngineSpec
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.plane import FakePlane
from tests.router.rig import rig, until


async def test_engines_given_in_the_wrong_role_are_named() -> None:
    async with rig() as r:
        for url, role in ((r.p.url, EngineRole.DECODE), (r.d.url, EngineRole.PREFILL)):
            await r.plane.register_engine(EngineSpec(EngineId(url), role, endpoint=url))
        await until(lambda: len(r.router.pool.misplaced()) == 2)
        async with r.http.get(f"{r.url}/ready") as response:
            problems = (await response.json())["problems"]
        assert f"{r.p.url} is given with --prefill, but registered as a decode engine" in problems
        assert f"{r.d.url} is given with --decode, but registered as a prefill engine" in problems


async def test_of_two_swapped_engines_without_an_address_both_are_named_once_one_is_known() -> None:
    async with rig(poll_interval_s=0.02) as r:
        await r.say("hello")  # the prefill engine's answer names it
        for engine, role in ((r.p, EngineRole.DECODE), (r.d, EngineRole.PREFILL)):
            record = r.plane.engines[engine.engine_id]
            assert not record.spec.endpoint
            r.plane.engines[engine.engine_id] = replace(record, spec=replace(record.spec, role=role))
        await until(lambda: len(r.router.pool.misplaced()) == 2)
        assert r.router.pool.misplaced() == [
            f"{r.p.url} is given with --prefill, but registered as a decode engine",
            f"{r.d.url} is given with --decode, but seems to be registered as a prefill engine",
        ]
        # Where more are registered than named, it may be any of them.
        other = EngineSpec(EngineId("other"), EngineRole.DECODE)
        await r.plane.register_engine(other)
        await until(lambda: len(r.router.pool.misplaced()) == 1)


async def test_an_engine_in_both_roles_that_registered_as_both_without_an_address_is_not_accused() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(EngineConfig(EngineRole.DECODE), FakePlane()))
        r = await stack.enter_async_context(rig(prefill_urls=(engine.url,), decode_urls=(engine.url,)))
        assert len(r.router.pool.misplaced()) == 1
        await r.plane.register_engine(EngineSpec(EngineId("x"), EngineRole.BOTH))
        await until(lambda: not r.router.pool.misplaced())


async def test_one_engine_in_both_roles_is_named_unless_it_registered_as_both() -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(FakeEngine(EngineConfig(EngineRole.DECODE), FakePlane()))
        r = await stack.enter_async_context(rig(prefill_urls=(engine.url,), decode_urls=(engine.url,)))
        async with r.http.get(f"{r.url}/ready") as response:
            answer = await response.json()
        assert answer["ready"]
        assert any("named both as a prefill and as a decode engine" in line for line in answer["problems"])
        await r.plane.register_engine(EngineSpec(EngineId("x"), EngineRole.BOTH, endpoint=engine.url))
        await until(lambda: not r.router.pool.misplaced())


async def test_what_an_engine_answers_to_is_not_narrowed_to_what_it_registered() -> None:
    """An engine registers the names of its model; adapters are known to its HTTP server only."""
    async with rig() as r:
        engines = r.router.pool.engines
        await until(lambda: all(engine.models for engine in engines))
        for engine in engines:
            engine.models |= {"fake-adapter"}  # as GET /v1/models says
            spec = EngineSpec(
                EngineId(f"named {engine.url}"),
                EngineRole.PREFILL if engine.prefill else EngineRole.DECODE,
                endpoint=engine.url,
                served_models=("fake",),
            )
            await r.plane.register_engine(spec)
        await until(lambda: all(any("named" in name for name in engine.engine_ids) for engine in engines))
        assert all(engine.models == {"fake", "fake-adapter"} for engine in engines)
