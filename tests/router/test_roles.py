"""Engines that are given with one role and registered with another."""

from __future__ import annotations

from kvplane.client.model import EngineId, EngineRole, EngineSpec
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
