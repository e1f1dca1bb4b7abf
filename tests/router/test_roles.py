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
