"""A router that lives, and for nothing: `/health` says so, and stays 200."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.router.rig import Rig, chat, rig, until


async def told(r: Rig, path: str = "/health") -> dict[str, Any]:
    async with r.http.get(r.url + path) as response:
        assert response.status == 200 or path == "/ready"
        answer: dict[str, Any] = await response.json()
        return answer


async def degraded(r: Rig) -> str:
    """Return the one problem, which /ready names as well."""
    answer = await told(r)
    assert answer["status"] == "degraded"
    (problem,) = answer["problems"]
    assert (await told(r, "/ready"))["problems"].count(problem) == 1
    return str(problem)


async def test_without_a_control_plane_nothing_is_reused() -> None:
    async with rig(with_plane=False) as r:
        assert "--plane HOST:PORT" in await degraded(r)
        assert (await told(r, "/ready"))["ready"]


async def test_a_control_plane_that_is_gone_and_comes_back() -> None:
    async with rig(poll_interval_s=0.01) as r:
        assert await told(r) == {"status": "ok"}
        r.plane.down = True
        await until(lambda: r.router.metrics.plane_up._value.get() == 0)
        assert await degraded(r) == "the control plane does not answer: nothing is reused"
        r.plane.down = False
        await until(lambda: r.router.metrics.plane_up._value.get() == 1)
        assert await told(r) == {"status": "ok"}


async def test_engines_that_are_all_down() -> None:
    async with rig() as r:
        await r.d.stop()
        reply = await r.post(chat("hello"))
        assert reply.body["error"]["message"] == "No decode engine can be reached."
        assert await degraded(r) == "no decode engine answers: requests get 503"


@pytest.mark.parametrize("decode_dns", [(), ("http://nowhere.invalid:8200",)])
async def test_no_engine_that_anybody_has_named(decode_dns: tuple[str, ...]) -> None:
    with capture_logs() as logs:
        async with rig(static=False, decode_dns=decode_dns) as r:
            reply = await r.post(chat("hello"))
            assert (reply.status, reply.reason) == (503, "decode_unreachable")
            said = reply.body["error"]["message"]
            assert said.startswith("No decode engine is known: give --decode, or set kvplane_endpoint")
            assert (await degraded(r)).startswith("no decode engine is known")
    warned = [entry["remedy"] for entry in logs if entry["event"] == "engines_not_named"]
    # Those that names stand for may come later.
    assert len(warned) == (0 if decode_dns else 1)


async def test_one_url_in_both_roles_is_said_in_the_log_at_the_start() -> None:
    urls = ("http://127.0.0.1:1",)
    with capture_logs() as logs:
        async with rig(prefill_urls=urls, decode_urls=urls, with_plane=False):
            pass
    (problem,) = [entry["problem"] for entry in logs if entry["event"] == "engine_in_wrong_role"]
    assert "named both as a prefill and as a decode engine" in problem


async def test_an_engine_that_cannot_be_connected_to_is_told_without_tls() -> None:
    async with rig(decode=2, probe_interval_s=0.01) as r:
        with capture_logs() as logs:
            await r.d.stop()
            await until(lambda: any(entry["event"] == "engine_went_down" for entry in logs))
    (problem,) = [entry["problem"] for entry in logs if entry["event"] == "engine_went_down"]
    assert problem.endswith(f"cannot connect to 127.0.0.1:{r.d.port}: Connection refused")
