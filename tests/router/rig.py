"""A router between fake engines and a control plane in memory, and a client in front of it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvplane.client.model import EngineRole
from kvplane.router.app import RouterServer
from kvplane.router.settings import RouterSettings
from tests.fakes import kv
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.plane import FakePlane

CHAT = "/v1/chat/completions"
LIMITS_S = (0.2, 1.0, 5.0, 25.0)
"""Time limits to try one after the other, where a request has to get somewhere before its limit ends it."""
Body = dict[str, Any]


def chat(*turns: str, conversation: object = "c1", **more: Any) -> Body:
    """Return a request whose messages are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(turns)]
    body: Body = {"model": "fake", "messages": messages, "max_tokens": 8, **more}
    if conversation is not None:
        body["conversation_id"] = conversation
    return body


def long_text(words: int, seed: str = "w") -> str:
    return " ".join(f"{seed}{index}" for index in range(words))


def expected_reply(body: Body) -> str:
    """Return what an engine says that computes the whole prompt itself."""
    kvs, words = kv.chain(kv.prompt_tokens(body)), []
    last = kvs[-1]
    for _ in range(body.get("max_completion_tokens") or body.get("max_tokens") or 16):
        token = kv.reply_token(last)
        words.append(kv.word_of(token))
        last = kv.next_kv(last, token)
    return " ".join(words)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: Body

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def path(self) -> str | None:
        return self.headers.get("x-kvplane-path")

    @property
    def reason(self) -> str | None:
        return self.headers.get("x-kvplane-reason")

    @property
    def reused(self) -> str | None:
        return self.headers.get("x-kvplane-reused-tokens")


@dataclass
class Rig:
    """What a test works with. `p` and `d` are the first engines of their kind."""

    router: RouterServer
    plane: FakePlane
    prefill: Sequence[FakeEngine]
    decode: Sequence[FakeEngine]
    http: aiohttp.ClientSession
    said: dict[str, list[str]] = field(default_factory=dict)

    @property
    def p(self) -> FakeEngine:
        return self.prefill[0]

    @property
    def d(self) -> FakeEngine:
        return self.decode[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router.port}"

    async def post(
        self, body: Body | bytes, *, path: str | None = None, to: str = CHAT, headers: Body | None = None
    ) -> Reply:
        sent = dict(headers or {})
        if path is not None:
            sent["x-kvplane-path"] = path
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.http.post(self.url + to, headers=sent, data=data) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, await response.json(content_type=None))

    async def say(self, text: str, conversation: str = "c1", **options: Any) -> Reply:
        """Say the next thing in a conversation; checks that the answer is that of the true prompt."""
        said = self.said.setdefault(conversation, [])
        said.append(text)
        path, headers = options.pop("path", None), options.pop("headers", None)
        body = chat(*said, conversation=conversation, **options)
        reply = await self.post(body, path=path, headers=headers)
        assert reply.status == 200, reply.body
        assert reply.text == expected_reply(body)
        said.append(reply.text)
        return reply

    async def metric(self, name: str) -> dict[str, float]:
        """Return a metric's values by its labels as they are written."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line.startswith(name))
        return {label.removeprefix(name): float(value) for label, value in values}


@asynccontextmanager
async def rig(
    *,
    prefill: int | Sequence[EngineConfig] = 1,
    decode: int | Sequence[EngineConfig] = 1,
    plane: FakePlane | None = None,
    static: bool = True,
    with_plane: bool = True,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """Run engines and a router; `settings` are the router's."""
    plane = plane or FakePlane()
    async with AsyncExitStack() as stack:
        engines: dict[EngineRole, list[FakeEngine]] = {}
        for role, wanted in ((EngineRole.PREFILL, prefill), (EngineRole.DECODE, decode)):
            # As in the published benchmark, prefill engines remember nothing unless a test says so.
            default = EngineConfig(role, prefix_caching=role is EngineRole.DECODE)
            configs = [default] * wanted if isinstance(wanted, int) else wanted
            engines[role] = [await stack.enter_async_context(FakeEngine(config, plane)) for config in configs]
        if static:
            settings.setdefault("prefill_urls", tuple(e.url for e in engines[EngineRole.PREFILL]))
            settings.setdefault("decode_urls", tuple(e.url for e in engines[EngineRole.DECODE]))
        server = RouterServer(
            RouterSettings(**{"port": 0, "plane_address": "in-memory:1" if with_plane else None, **settings}),
            plane=plane if with_plane else None,
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await stack.enter_async_context(server)
        yield Rig(server, plane, engines[EngineRole.PREFILL], engines[EngineRole.DECODE], http)
        for engine in (*engines[EngineRole.PREFILL], *engines[EngineRole.DECODE]):
            assert engine.violations == []


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens in the background, and stays so; a minute at most."""
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")
