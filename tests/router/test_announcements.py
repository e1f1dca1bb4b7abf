"""Engines that announce nothing, and addresses in what engines announce."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvplane.client.errors import InvalidFieldError
from kvplane.client.model import Announcement, EngineRole
from tests.fakes.core import EngineConfig
from tests.router.rig import Rig, chat, long_text, rig, until
from tests.router.test_clients import real_plane

STOCK = EngineConfig(EngineRole.DECODE, connector=False)


async def health(r: Rig, path: str = "/health") -> dict[str, Any]:
    async with r.http.get(r.url + path) as response:
        answer: dict[str, Any] = await response.json()
        return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_decode_engine_without_the_connector_works_and_is_named_cases_8_12(stream: bool) -> None:
    with capture_logs() as logs:
        async with real_plane() as (_, plane), rig(plane=plane, decode=[STOCK], poll_interval_s=0.01) as r:
            for _ in range(3):
                body = chat(long_text(100), stream=stream)
                async with r.http.post(r.url + "/v1/chat/completions", json=body) as response:
                    assert response.status == 200
                    assert await response.read()
            counted = await r.metric("kvplane_router_requests_total")
            assert sum(n for labels, n in counted.items() if '"turn_in_flight"' in labels) == 2
            warned = [entry for entry in logs if entry["event"] == "engines_announce_nothing"]
            await until(lambda: any(entry["event"] == "engines_announce_nothing" for entry in logs))
            answer = await health(r)
            assert answer["status"] == "degraded"
            assert answer["problems"][0].startswith(f"no announcements from {r.d.url}")
            assert "kvplane.connector.plugin" in answer["problems"][0]
            assert answer["problems"][0] in (await health(r, "/ready"))["problems"]
    warned = [entry for entry in logs if entry["event"] == "engines_announce_nothing"]
    assert [entry["log_level"] for entry in warned] == ["warning"]


async def test_engines_that_register_without_an_address_are_not_accused_case_12() -> None:
    async with rig(decode=2, poll_interval_s=0.01) as r:
        polls = r.plane.calls["list_engines"]
        await until(lambda: r.plane.calls["list_engines"] > polls + 5)
        assert await health(r) == {"status": "ok"}
    async with rig(decode=[EngineConfig(EngineRole.DECODE), STOCK], poll_interval_s=0.01) as r:
        polls = r.plane.calls["list_engines"]
        await until(lambda: r.plane.calls["list_engines"] > polls + 5)
        assert f"1 of {r.decode[0].url}, {r.decode[1].url}" in (await health(r))["problems"][0]
        r.plane.down = True
        await until(lambda: r.router.metrics.plane_up._value.get() == 0)
        # Who has registered is not known, then.
        assert (await health(r))["problems"] == ["the control plane does not answer: nothing is reused"]


@pytest.mark.parametrize("name", ["remote_request_id", "remote_port", "remote_engine_id"])
async def test_params_that_lack_a_field_are_refused_by_its_name_case_10(name: str) -> None:
    async with real_plane() as (_, plane), rig(plane=plane) as r:
        seen: list[Exception] = []
        announce = plane.announce_location

        async def without(engine_id: Any, epoch: int, announcement: Any) -> Any:
            params = json.loads(announcement.kv_transfer_params)
            del params[name]
            raw = json.dumps(params).encode()
            try:
                return await announce(engine_id, epoch, _with(announcement, raw))
            except InvalidFieldError as error:
                seen.append(error)
                raise

        r.d.plane = _Announcing(plane, without)
        assert (await r.post(chat("hello"))).status == 200
        await until(lambda: seen)
        assert name in str(seen[0])
        assert (await r.post(chat("hello"))).path == "cold"


def _with(announcement: Announcement, params: bytes) -> Announcement:
    return replace(announcement, kv_transfer_params=params)


class _Announcing:
    """A control plane whose announcements go another way."""

    def __init__(self, plane: Any, announce: Any) -> None:
        self._plane = plane
        self.announce_location = announce

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)


async def test_integers_of_params_arrive_as_integers_and_unknown_fields_arrive_case_11() -> None:
    async with real_plane() as (_, plane), rig(plane=plane) as r:
        announced: list[dict[str, Any]] = []
        announce = plane.announce_location

        async def with_more(engine_id: Any, epoch: int, announcement: Any) -> Any:
            params = json.loads(announcement.kv_transfer_params)
            params["of_another_version"] = {"count": 1, "share": 0.5, "deep": [[1], None, True, "ü"]}
            announced.append(params)
            return await announce(engine_id, epoch, _with(announcement, json.dumps(params).encode()))

        r.d.plane = _Announcing(plane, with_more)
        await r.say(long_text(200))
        assert (await r.say("next", path="pull")).reason == "pulled"
        got = r.p.requests[1]["kv_transfer_params"]
        asked_for = {"do_remote_decode": True, "do_remote_prefill": False, "kvplane": got["kvplane"]}
        assert got == announced[0] | asked_for
        # Equal is not enough: 1.0 equals 1.
        for name in ("remote_block_ids", "remote_port", "of_another_version"):
            assert json.dumps(got[name]) == json.dumps(announced[0][name])


@pytest.mark.parametrize("endpoint", ["http://localhost:1", "http://10.255.255.1:80", "nonsense"])
async def test_only_engines_of_the_pool_are_ever_talked_to_case_38(endpoint: str) -> None:
    """What an engine says of itself, such as localhost, is not where the router sends a turn."""
    async with rig(decode=2) as r:
        await r.say(long_text(200))
        key, location = next(iter(r.plane.locations.items()))
        r.plane.locations[key] = replace(location, endpoint=endpoint)
        reply = await r.say("next", path="direct")
        assert (reply.path, reply.reason) == ("cold", "holder_unusable")
