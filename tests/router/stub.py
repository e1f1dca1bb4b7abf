"""Engines that answer what a test says, however odd, and a router in front of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from tests.router.rig import CHAT, Body, Reply, chat

WELL: Body = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5},
}


@dataclass
class Answer:
    """What an engine answers. A body that is no bytes is sent as JSON; `events` makes it a stream."""

    body: Any = field(default_factory=lambda: WELL)
    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    events: bool = False

    async def send(self, request: web.Request) -> web.StreamResponse:
        raw = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        kind = "text/event-stream" if self.events else "application/json"
        out = web.StreamResponse(status=self.status, headers={"Content-Type": kind})
        for name, value in self.headers:
            out.headers.add(name, value)
        await out.prepare(request)
        await out.write(raw)
        return out


class Stub:
    """An engine. `answer` is called with each POST's body; `models` is what it says it serves."""

    def __init__(self, answer: Callable[[Any], Answer] | Answer, *models: str, key: str = "") -> None:
        self.answer = answer
        self.models = models or ("fake",)
        self.key = key
        """Asked for under /v1, as vLLM does with --api-key."""
        self.asked = 0
        self.listed = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    def _refuses(self, request: web.Request) -> bool:
        return bool(self.key) and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self.listed += 1
        if self._refuses(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.json()
        if self._refuses(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await (self.answer if isinstance(self.answer, Answer) else self.answer(body)).send(request)


@dataclass
class Front:
    """A router, and a client of it."""

    router: RouterServer
    http: aiohttp.ClientSession

    async def post(self, to: str = CHAT, headers: dict[str, str] | None = None, **more: Any) -> Reply:
        reply = await self.raw(to, headers, **more)
        return Reply(reply[0], dict(reply[1]), json.loads(reply[2]))

    async def raw(
        self, to: str = CHAT, headers: dict[str, str] | None = None, **more: Any
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        body = chat("hello", **{"conversation": None, **more})
        url = f"http://127.0.0.1:{self.router.port}{to}"
        async with self.http.post(url, json=body, headers=headers, allow_redirects=False) as response:
            sent = [(name.lower(), value) for name, value in response.headers.items()]
            return response.status, sent, await response.read()

    async def ready(self) -> Any:
        async with self.http.get(f"http://127.0.0.1:{self.router.port}/ready") as response:
            return await response.json()


@asynccontextmanager
async def front(*decode: Stub, prefill: tuple[Stub, ...] = (), **settings: Any) -> AsyncIterator[Front]:
    """Run engines, and a router that knows them."""
    async with AsyncExitStack() as stack:
        for engine in (*prefill, *decode):
            await stack.enter_async_context(engine)
        prefill_urls, decode_urls = (tuple(engine.url for engine in each) for each in (prefill, decode))
        options = RouterSettings(port=0, prefill_urls=prefill_urls, decode_urls=decode_urls, **settings)
        router = RouterServer(options)
        http = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Front(await stack.enter_async_context(router), http)
