"""What one tenant can find out about another's conversations: nothing, in any way there is to ask.

Each attempt on what is another's is made on what nobody has as well: the answers are the same, byte for byte,
but for times and ids of their own.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvplane.client.model import EngineRole
from tests.fakes.core import EngineConfig
from tests.router.rig import CHAT, Rig, chat, long_text, rig
from tests.router.tenants import bearer, write
from tests.router.test_clients import real_plane

RESPONSES = "/v1/responses"
SECRET, NOBODYS = "ticket-of-alices-77", "ticket-of-nobody-77"
"""As long as each other."""
_OWN = re.compile(rb"(resp|msg|chatcmpl|cmpl)[-_][0-9a-f_-]{8,}|\"created(_at)?\": ?[0-9.]+")
_TIMES = ("date", "x-kvplane-prefill-ms")


@dataclass
class World:
    """Alice has talked; Mallory is bob."""

    r: Rig
    plane: Any
    said: list[str]
    request_id: str
    response_id: str
    salt: str

    async def answer(self, method: str, path: str, who: str = "bob", **options: Any) -> bytes:
        """Return all of an answer that is not its own."""
        headers = {**bearer(who), "x-request-id": "mine", **options.pop("headers", {})}
        async with self.r.http.request(method, self.r.url + path, headers=headers, **options) as response:
            raw = await response.read()
            sent = sorted((n.lower(), v) for n, v in response.headers.items() if n.lower() not in _TIMES)
            return _OWN.sub(b"<own>", repr((response.status, sent)).encode() + raw)

    async def is_untouched(self) -> bool:
        """Tell whether Alice's conversation goes on as if nobody had tried anything."""
        body = chat(*self.said, "on", conversation=SECRET)
        reply = await self.r.post(body, headers=bearer("alice"))
        return reply.status == 200 and reply.path == "direct" and int(reply.reused or 0) > 190


@asynccontextmanager
async def world(folder: Path, top: str = "", **settings: Any) -> AsyncIterator[World]:
    file = await asyncio.to_thread(write, folder, top=top)
    configs = [EngineConfig(role, prefix_caching=True) for role in (EngineRole.PREFILL, EngineRole.DECODE)]
    options = {
        "prefill": configs[:1],
        "decode": configs[1:],
        "tenants_file": file,
        "debug_remote": True,
        **settings,
    }
    async with real_plane() as (_, plane), rig(plane=plane, **options) as r:
        text = long_text(200)
        headers = bearer("alice") | {"x-request-id": "alices-request"}
        first = await r.post(chat(text, conversation=SECRET), headers=headers)
        body = {"model": "fake", "input": text, "max_output_tokens": 4}
        stored = await r.post(body, to=RESPONSES, headers=bearer("alice"))
        salt = str(r.d.requests[-1].get("cache_salt"))
        yield World(r, plane, [text, first.text], "alices-request", str(stored.body["id"]), salt)


Attempt = Callable[[World, str], Awaitable[bytes]]
"""Tries something on a conversation by its id."""


def going_on(path: str = "auto", **where: str) -> Attempt:
    """Go on with the conversation, named in a field or header."""

    async def attempt(w: World, name: str) -> bytes:
        fields = {field: name for field in where.values() if not field.startswith("x-")}
        headers = {field: name for field in where.values() if field.startswith("x-")}
        body = chat(*w.said, "go on", conversation=None) | fields
        return await w.answer("POST", CHAT, json=body, headers={"x-kvplane-path": path, **headers})

    return attempt


FIELDS = ("conversation", "prompt_cache_key", "session_id", "x-conversation-id", "x-session-id")


@pytest.mark.parametrize(
    ("field", "path"),
    [
        *(("conversation_id", path) for path in ("auto", "cold", "pull", "direct")),
        *((f, "auto") for f in FIELDS),
    ],
)
async def test_reading_and_claiming(tmp_path: Path, field: str, path: str) -> None:
    attempt = going_on(path, field=field)
    answers = list[bytes]()
    for name in (SECRET, NOBODYS):
        async with world(tmp_path) as w:
            answers.append(await attempt(w, name))
            held = await locations(w, "alice")
            assert held == 2
            assert await w.is_untouched()
    assert answers[0] == answers[1]
    assert b"unknown_conversation" in answers[0] or b"forced" in answers[0]


async def locations(w: World, tenant: str) -> int:
    found, _ = await w.plane.list_locations()
    return sum(location.key.tenant_id == tenant for location in found)


async def test_ending_and_keeping(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for method, suffix, body in (
            ("DELETE", "", None),
            ("POST", "/touch", {"ttl_s": 100}),
            ("POST", "/touch", {}),
            ("POST", "/touch", {"ttl_s": -1}),
            ("GET", "", None),
        ):
            answers = [
                (await w.answer(method, f"/v1/conversations/{name}{suffix}", json=body)).replace(
                    name.encode(), b"ID"
                )
                for name in (SECRET, NOBODYS)
            ]
            assert answers[0] == answers[1], method
        assert await locations(w, "alice") == 2
        assert await w.is_untouched()


async def test_explanations(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        answers = [
            (await w.answer("GET", f"/debug/turns/{name}")).replace(name.encode(), b"ID")
            for name in (w.request_id, "nobody-request")
        ]
        assert answers[0] == answers[1]
        assert b"404" in answers[0]
        # Nor does a request of the same id take another's place.
        await w.r.post(chat("x"), headers=bearer("bob") | {"x-request-id": w.request_id})
        told = await w.answer("GET", f"/debug/turns/{w.request_id}", who="alice")
        assert b'"status":200' in told
        assert b'"prompt_estimated":null' not in told


@pytest.mark.parametrize(
    ("method", "suffix"),
    [("GET", ""), ("POST", "/cancel"), ("GET", "?stream=true"), ("GET", "?starting_after=1")],
)
async def test_stored_responses(tmp_path: Path, method: str, suffix: str) -> None:
    async with world(tmp_path) as w:
        own = await w.answer(method, f"{RESPONSES}/{w.response_id}{suffix}", who="alice")
        tries = [w.response_id, changed(w.response_id), w.response_id[:-32], "resp_unknown"]
        before = len(w.r.d.requests)
        answers = [
            (await w.answer(method, f"{RESPONSES}/{name}{suffix}")).replace(name.encode(), b"ID")
            for name in tries
        ]
        plain = [
            re.sub(rb"'content-length', '\d+'", b"", answer.replace(b"<own>", b"ID")) for answer in answers
        ]
        assert len(set(plain)) == 1, plain
        assert answers[0] == answers[1]
        assert b"not found" in answers[0]
        assert len(w.r.d.requests) == before
        assert method == "POST" or b"not found" not in own


async def test_going_on_from_a_response(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        body = {"model": "fake", "input": "and then", "max_output_tokens": 4}
        own = await w.r.post(
            body | {"previous_response_id": w.response_id}, to=RESPONSES, headers=bearer("alice")
        )
        assert own.status == 200
        for stream in (False, True):
            before = len(w.r.d.requests)
            answers = list[bytes]()
            for name in (w.response_id, changed(w.response_id)):
                more = {"previous_response_id": name, "stream": stream}
                answers.append(
                    (await w.answer("POST", RESPONSES, json=body | more)).replace(name.encode(), b"ID")
                )
            assert answers[0] == answers[1]
            assert b"(404," in answers[0]
            assert len(w.r.d.requests) == before


def changed(response_id: str) -> str:
    """Return an id that nobody has."""
    return response_id[:8] + ("0" if response_id[8] != "0" else "1") + response_id[9:]


async def test_a_response_cannot_be_given_an_id_that_others_have(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        body = {"model": "fake", "input": "mine", "max_output_tokens": 4, "request_id": w.response_id}
        reply = await w.r.post(body, to=RESPONSES, headers=bearer("bob"))
        assert reply.status == 200
        assert reply.body["id"] != w.response_id
        assert reply.body["id"].startswith("resp_")
        own = await w.answer("GET", f"{RESPONSES}/{w.response_id}", who="alice")
        assert b"mine" not in own


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["split", "decode-alone"])
async def test_prefix_caches(tmp_path: Path, automatic: bool, alone: bool) -> None:
    """What the engines have cached of another's prompt is neither used nor counted, whatever salt is sent."""

    async def cached(w: World, who: str, **more: Any) -> int:
        name = None if automatic else f"own {more}"
        body = chat(w.said[0], conversation=name, **({"n": 2} if alone else {}), **more)
        reply = await w.r.post(body, headers=bearer(who))
        assert reply.status == 200
        assert reply.path == "cold"
        return int(reply.body["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with world(tmp_path) as w:
        salts: list[dict[str, str]] = [{}, {"cache_salt": w.salt}, {"cache_salt": "x"}]
        assert [await cached(w, "bob", **salt) for salt in salts] == [0, 0, 0]
        if alone:
            assert await cached(w, "alice", user="x") > 100, "its own is used"


async def test_the_same_words_of_two_tenants_are_two_conversations(tmp_path: Path) -> None:
    answers = list[bytes]()
    for first in ("alice", "nobody"):
        async with world(tmp_path) as w:
            words = long_text(150, "both")
            if first == "alice":
                before = await w.r.post(chat(words, conversation=None), headers=bearer("alice"))
                said = [words, before.text, "and then"]
            body = chat(*said, conversation=None)
            answers.append(await w.answer("POST", CHAT, json=body))
    assert answers[0] == answers[1]


async def test_who_claims_to_be_another_is_not(tmp_path: Path) -> None:
    """Nothing that a client writes says whose request it is."""
    async with world(tmp_path) as w:
        claims = {"x-kvplane-tenant": "alice", "x-tenant-id": "alice", "X-KVPlane-Tenant-Id": "alice"}
        body = chat(*w.said, "on", conversation=SECRET, tenant_id="alice", tenant="alice", user="alice")
        body["kv_transfer_params"] = {"kvplane": {"tenant_id": "alice", "conversation_id": SECRET}}
        reply = await w.r.post(body, headers={**bearer("bob"), **claims})
        assert reply.reason == "unknown_conversation"
        for leg in (*w.r.p.requests, *w.r.d.requests):
            params = leg.get("kv_transfer_params") or {}
            assert params.get("kvplane", {}).get("tenant_id") in (None, "alice", "bob")
        last = w.r.d.requests[-1]["kv_transfer_params"]["kvplane"]
        assert last["tenant_id"] == "bob"
        assert await w.is_untouched()


async def test_lists_and_pages_tell_tenants_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for path in ("/metrics", "/ui", "/ui/data", "/health", "/ready", "/version", "/v1/models"):
            said = await w.answer("GET", path)
            for word in (SECRET, "alice", w.request_id, w.response_id, w.salt):
                assert word.encode() not in said, (path, word)
        assert json.loads((await w.answer("GET", "/ready")).split(b"]", 1)[1].lstrip(b")")) == {
            "ready": True,
            "draining": False,
        }


async def test_with_shared_prefix_caches_that_would_not_be_so(tmp_path: Path) -> None:
    """Shows that the checks above can fail; the option is for deployments of tenants who may know."""
    async with world(tmp_path, top="cache_salt = false") as w:
        body = chat(w.said[0], conversation="own", n=2)
        reply = await w.r.post(body, headers=bearer("bob"))
        assert reply.body["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert reply.reason != "pulled"
