"""The status page: its data, who may read it, and the page itself in a real Chromium if there is one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvplane.router import status
from kvplane.router.metrics import RouterMetrics
from tests.router import chromium
from tests.router.rig import Rig, chat, long_text, rig
from tests.router.stub import Stub, front

FILES = ("/ui", "/ui/page.js", "/ui/style.css", "/ui/data")


NAME = "a conversation's name"


async def played(r: Rig) -> None:
    """Play a conversation of a cold turn, one that carries on, and a request that fails."""
    first = chat(long_text(100))
    reply = await r.post(first)
    assert reply.status == 200
    assert (await r.post(chat(long_text(100), reply.text, "more"))).path == "direct"
    r.d.faults.append("422")
    assert (await r.post(chat("other", conversation=NAME))).status == 422
    for conversation in ("c3", "c4"):
        async with r.http.post(
            r.url + "/v1/chat/completions", json=chat("stream it", conversation=conversation, stream=True)
        ) as response:
            await response.read()


async def data(r: Rig) -> dict[str, Any]:
    async with r.http.get(r.url + "/ui/data") as response:
        assert response.status == 200
        assert response.headers["cache-control"] == "no-store"
        told: dict[str, Any] = await response.json()
        return told


async def test_the_data_tells_paths_engines_and_recent_requests() -> None:
    async with rig() as r:
        await played(r)
        told = await data(r)
        assert (told["ready"], told["control_plane"], told["problems"], told["workers"]) == (
            True,
            "up",
            [],
            1,
        )
        paths = told["paths"]
        assert (paths["direct"]["answered"], paths["direct"]["reused"]) == (1, 1)
        assert (paths["cold"]["answered"], paths["cold"]["reused"], paths["cold"]["failed"]) == (3, 0, 1)
        assert paths["direct"]["reasons"] == {"new_text_short": 1}
        assert paths["cold"]["ttft"]["buckets"]["+Inf"] == 2
        assert 0 < paths["cold"]["ttft"]["sum_s"] < 60
        by_role = {engine["roles"][0]: engine for engine in told["engines"]}
        assert by_role["decode"]["state"] == "up"
        assert by_role["decode"]["models"] == ["fake"]
        assert [line["conversation"] for line in told["recent"]][-1] == told["recent"][-2]["conversation"]
        assert [line["status"] for line in told["recent"]] == [200, 200, 422, 200, 200]
        assert told["recent"][3]["path"] == "direct"
        assert NAME not in json.dumps(told)  # conversations are hashed


def test_only_reasons_that_used_kv_again_count_as_reuse() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.requests.labels("pull", "pulled", "2xx").inc(3)
    metrics.requests.labels("pull", "local_hit", "2xx").inc(2)
    metrics.requests.labels("pull", "mismatch", "2xx").inc(4)
    metrics.requests.labels("pull", "pulled", "5xx").inc(7)
    metrics.requests.labels("cold", "none", "4xx").inc(1)
    metrics.reused_tokens.labels("pull").inc(500)
    told = status.paths(registry.collect())
    assert (told["pull"]["answered"], told["pull"]["reused"], told["pull"]["failed"]) == (9, 5, 7)
    assert told["pull"]["reused_tokens"] == 500
    assert list(told["pull"]["reasons"]) == ["mismatch", "pulled", "local_hit"]
    assert (told["cold"]["answered"], told["cold"]["failed"]) == (0, 1)


async def test_what_is_wrong_is_on_it() -> None:
    async with rig() as r:
        await r.p.stop()
        await r.post(chat("hello"))
        told = await data(r)
        assert told["engines"][0]["state"] == "down"
        assert any("does not answer" in problem for problem in told["problems"])


@pytest.mark.parametrize("path", FILES)
async def test_only_those_who_may_read_explanations_may_read_it(path: str) -> None:
    far = {"x-forwarded-for": "10.1.2.3"}
    for remote, wanted in ((False, 403), (True, 200)):
        async with front(Stub(lambda body: pytest.fail("asked")), debug_remote=remote) as f:
            url = f"http://127.0.0.1:{f.router.port}{path}"
            async with f.http.get(url, headers=far) as response:
                assert response.status == wanted
            async with f.http.get(url) as response:
                assert response.status == 200
                policy = response.headers["content-security-policy"]
                assert policy.startswith("default-src 'none'")
                assert "unsafe" not in policy
            async with f.http.post(url) as response:
                assert response.status == 405


@pytest.mark.skipif(
    chromium.find() is None, reason="no Chromium here (Debian: chromium), so /ui is not looked at"
)
async def test_the_page_in_a_real_chromium(tmp_path: Path) -> None:
    program = await asyncio.to_thread(chromium.find)
    assert program is not None
    hostile = "<img src=x onerror=document.title='broken'>"
    async with rig() as r, chromium.page(program, tmp_path / "profile") as page:
        await played(r)
        async with r.http.post(
            r.url + "/v1/chat/completions", json=chat("hi", model=hostile), headers={"x-request-id": hostile}
        ) as response:
            await response.read()
        await page.open(r.url + "/ui")
        await page.until("document.querySelectorAll('#recent tr').length === 6")
        assert await page.value("document.getElementById('state').textContent") == "ready, control plane up"
        assert await page.value("document.getElementById('hit-all').textContent") == "25.0 %"
        assert await page.value("document.querySelector('#paths tr th').textContent") == "direct"
        assert "new_text_short 1" in await page.value("document.getElementById('paths').textContent")
        assert await page.value("document.querySelectorAll('#engines tr').length") == 2
        # New figures come by themselves, and a rate with them.
        for number in range(3):
            await r.post(chat("again", conversation=f"again {number}"))
        await page.until("document.querySelectorAll('#recent tr').length === 9")
        assert await page.value("document.getElementById('hit-now').textContent") == "0.0 %"

        # Each answer with new requests is a point of the graph; the line needs two.
        assert not await page.value("document.querySelector('#hit-graph polyline') !== null")
        await r.post(chat("again", conversation="again 3"))
        await page.until("document.querySelector('#hit-graph polyline') !== null")
        assert "hit rate between" in await page.value(
            "document.getElementById('hit-graph').getAttribute('aria-label')"
        )

        # By keyboard alone: the link over the navigation, the button, then what scrolls, and the filter.
        seen = list[str]()
        for _ in range(6):
            await page.press("Tab")
            seen.append(
                await page.value("document.activeElement.id || document.activeElement.className || 'other'")
            )
        assert seen == ["skip", "pause", "wide", "wide", "filter", "wide"]
        await page.value("document.getElementById('filter').focus()")
        await page.write("direct")
        await page.until("document.querySelectorAll('#recent tr').length === 1")
        await page.write("nonsense")
        await page.until("!document.getElementById('nothing').hidden")
        await page.value("document.getElementById('pause').focus()")
        await page.press("Enter")
        assert await page.value("document.getElementById('pause').getAttribute('aria-pressed')") == "true"

        # As a screen reader has it: every table, button and field has a name.
        tree = (await page.call("Accessibility.getFullAXTree"))["nodes"]
        named = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree
            if not node["ignored"]
            and node["role"]["value"] in ("table", "button", "searchbox", "image", "link")
        ]
        assert {role for role, _ in named} >= {"table", "button", "searchbox", "image", "link"}
        assert [role for role, name in named if not name] == []

        folder = Path(os.environ.get("KVPLANE_SCREENSHOTS", tmp_path))
        await page.value("document.getElementById('filter').value = ''")
        await page.value("showRecent(latest)")
        for name, dark, width in (("light", False, 1280), ("dark", True, 1280), ("narrow", False, 400)):
            file = folder / f"ui-{name}.png"
            shot = await page.screenshot(dark=dark, width=width)
            await asyncio.to_thread(file.write_bytes, shot)
            assert len(shot) > 10_000
            wide = await page.value("document.documentElement.scrollWidth")
            assert wide <= width  # tables scroll by themselves, the page does not
        assert await page.value("document.title") == "kvplane router"
        assert page.said == []
        # It works offline: nothing is asked of anybody else.
        assert [url for url in page.asked if not url.startswith((r.url, "data:"))] == []


def test_the_page_is_part_of_what_is_installed() -> None:
    for name in ("index.html", "page.js", "style.css"):
        assert status.__file__ is not None
        assert (Path(status.__file__).parent / "ui" / name).is_file()


async def test_an_engine_that_reports_nothing_retains_an_unknown_number() -> None:
    async with (
        front(Stub(lambda body: pytest.fail("asked")), explained_turns=0) as f,
        f.http.get(f"http://127.0.0.1:{f.router.port}/ui/data") as response,
    ):
        told = await response.json()
    assert told["recent"] == []  # nothing is on record
    assert told["engines"][0]["retained_blocks"] is None
    assert told["control_plane"] == "none"
