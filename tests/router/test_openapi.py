"""The document names every route, and the router keeps to it whatever is sent (schemathesis)."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from kvplane.router.openapi import document
from kvplane.router.passing import PASSED
from tests.router.rig import chat, rig

DOCUMENT = document("1.0", PASSED)
EXAMPLES = 12
"""For each operation."""
_CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def _named(route: str) -> str:
    """Return a route of aiohttp's as the document writes it."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route)


async def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    async with rig() as r:
        runner: Any = r.router._runner
        served = {
            (_named(route.resource.canonical), route.method.lower())
            for route in runner.app.router.routes()
            if route.method != "HEAD" and not route.resource.canonical.startswith("/ui")
        }
        async with r.http.get(r.url + "/openapi.json") as response:
            told = await response.json()
        described = {(path, method) for path, item in told["paths"].items() for method in item}
        assert served == described
        assert told["info"]["version"]
        assert {**told, "info": 0} == {**json.loads(json.dumps(DOCUMENT)), "info": 0}


@pytest.fixture(scope="module")
def router_url() -> Iterator[str]:
    """Run a router, with fake engines, on a loop of another thread: schemathesis waits for its answers."""
    started, stop = threading.Event(), asyncio.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        async with rig() as r:
            await r.post(chat("hello"))
            found["url"], found["loop"] = r.url, asyncio.get_running_loop()
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(20)
    yield found["url"]
    found["loop"].call_soon_threadsafe(stop.set)
    thread.join(20)


schema = schemathesis.openapi.from_dict(DOCUMENT)


def _operations() -> list[tuple[str, str]]:
    return [(path, method) for path, item in DOCUMENT["paths"].items() for method in item]


@pytest.mark.parametrize(("path", "method"), _operations())
def test_the_router_keeps_to_the_document(router_url: str, path: str, method: str) -> None:
    load_all_checks()
    operation: Any = schema[path][method.upper()]

    modes = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

    @hypothesis.given(case=hypothesis.strategies.one_of(modes))
    @hypothesis.settings(max_examples=EXAMPLES, deadline=None, database=None)
    def send(case: Any) -> None:
        response = case.call(base_url=router_url, timeout=20)
        case.validate_response(response, checks=_CHECKS)
        assert response.status_code != 500

    send()
