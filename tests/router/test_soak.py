"""The soaks of `soak.py`, small."""

from __future__ import annotations

from tests.router.soak import disconnects, kills


async def test_clients_that_leave_at_random_moments_leave_nothing_case_28() -> None:
    left = await disconnects(150)
    assert left["disconnects_counted"] > 10


async def test_killed_engines_cost_only_the_streams_they_had_begun_case_48() -> None:
    out = await kills(64, seconds=4.0, every_s=1.0)
    assert not out.refused
    assert out.whole > 64
