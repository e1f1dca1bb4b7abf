"""Who is let in where there are tenants, and what is made of their requests."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs
from yarl import URL

from kvplane.router.app import RouterStartError
from kvplane.router.passing import PASSED
from kvplane.router.settings import RouterSettings, SettingsError
from tests.router.rig import CHAT, Rig, chat, long_text, rig, until
from tests.router.stub import Answer, Stub, front
from tests.router.tenants import KEYS, bearer, hashed, write

ANTHROPIC = "/v1/messages"


@asynccontextmanager
async def tenants(
    folder: Path, *, more: str = "", alice: str = "", top: str = "", **settings: Any
) -> AsyncIterator[Rig]:
    file = await asyncio.to_thread(write, folder, more, alice=alice, top=top)
    async with rig(tenants_file=file, **settings) as r:
        yield r


async def ask(r: Rig, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
    body: dict[str, Any] | None = {} if method == "POST" else None
    async with r.http.request(method, r.url + path, headers=headers, json=body) as response:
        raw = await response.read()
        return response.status, response.headers, json.loads(raw) if raw[:1] == b"{" else raw


def routes(r: Rig) -> set[tuple[str, str]]:
    """Return all that the router serves, from its own table."""
    assert r.router._runner is not None
    found = set[tuple[str, str]]()
    for route in r.router._runner.app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        for name in ("{conversation_id}", "{response_id}", "{request_id}", "{model}"):
            path = path.replace(name, "x")
        found.add((route.method, path))
    return found


OPEN = {"/health", "/ready", "/version"}
FOR_OPERATORS = {"/metrics", "/ui", "/ui/data", "/ui/page.js", "/ui/style.css"}


async def test_every_route_but_three_wants_a_key(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        all_routes = routes(r)
        assert {path for _, path in all_routes} >= {
            CHAT,
            *PASSED,
            "/debug/turns/x",
            "/v1/models",
            *FOR_OPERATORS,
        }
        for method, path in {*all_routes, ("GET", "/no/such/path"), ("PUT", CHAT)}:
            status, headers, _ = await ask(r, method, path)
            if path in OPEN:
                assert status in (200, 503), path
                continue
            assert (status, headers["WWW-Authenticate"].split()[0] in ("Bearer", "Basic")) == (401, True), (
                path
            )
            for wrong in (
                {"Authorization": "Bearer wrong"},
                {"x-api-key": "wrong"},
                {"Authorization": "Basic eDp5"},
            ):
                status, headers, _ = await ask(r, method, path, wrong)
                assert status == 401, (path, wrong)
        assert not r.p.requests
        assert not r.d.requests


async def test_tenants_and_operators_have_routes_of_their_own(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        for method, path in {(method, path) for method, path in routes(r) if path not in OPEN}:
            tenant = (await ask(r, method, path, bearer("alice")))[0]
            operator = (await ask(r, method, path, bearer("operator")))[0]
            if path in FOR_OPERATORS:
                assert (tenant, operator) == (403, 200), path
            elif path.startswith("/debug/"):
                assert (tenant, operator) == (404, 404), path
            else:
                assert tenant not in (401, 403, 500), path
                assert operator == 403, path


@pytest.mark.parametrize("how", ["%{:02x}", "%{:02X}"])
async def test_a_path_written_in_another_way_is_the_same_path(tmp_path: Path, how: str) -> None:
    async with tenants(tmp_path) as r:
        for path in (*FOR_OPERATORS, *OPEN, "/v1/models", "/debug/turns/x"):
            for at in range(1, len(path)):
                if path[at] != "/":
                    other = URL(r.url + path[:at] + how.format(ord(path[at])) + path[at + 1 :], encoded=True)
                    for who in ("alice", "operator"):
                        plain = (await ask(r, "GET", path, bearer(who)))[0]
                        async with r.http.get(other, headers=bearer(who)) as answer:
                            assert answer.status == plain, (who, other)


async def test_a_browser_can_show_an_operators_key(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        status, headers, _ = await ask(r, "GET", "/ui")
        assert (status, headers["WWW-Authenticate"].startswith("Basic ")) == (401, True)
        for who, wanted in (("operator", 200), ("alice", 403)):
            basic = "Basic " + b64encode(f"anyone:{KEYS[who]}".encode()).decode()
            assert (await ask(r, "GET", "/ui/data", {"Authorization": basic}))[0] == wanted
            assert (await ask(r, "GET", "/v1/models", {"Authorization": basic}))[0] == 401


@pytest.mark.parametrize(
    "headers",
    [
        bearer("alice"),
        {"authorization": f"bearer  {KEYS['alice']} "},
        {"x-api-key": KEYS["alice"]},
        {"X-Api-Key": KEYS["alice"], **bearer("alice")},
    ],
)
async def test_a_key_comes_either_way(tmp_path: Path, headers: dict[str, str]) -> None:
    async with tenants(tmp_path) as r:
        assert (await r.post(chat("hello"), headers=headers)).status == 200
        (key,) = r.plane.locations
        assert key.tenant_id == "alice"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": KEYS["alice"]},
        {"Authorization": f"Basic {KEYS['alice']}"},
        {"Authorization": f"Token {KEYS['alice']}"},
        {"Authorization": f"Bearer {KEYS['alice']} x"},
        {"x-api-key": KEYS["alice"].upper()},
        {"x-api-key": KEYS["bob"], **bearer("alice")},
        {"x-api-key": "é"},
        {"cookie": f"key={KEYS['alice']}"},
    ],
)
async def test_what_is_no_key_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    async with tenants(tmp_path) as r:
        reply = await r.post(chat("hello"), headers=headers)
        assert reply.status == 401
        assert reply.body["error"]["type"] == "AuthenticationError"
        assert KEYS["alice"] not in json.dumps(reply.body) + json.dumps(reply.headers)


async def test_refusals_have_the_shape_of_the_api(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        for who, status, kinds in (
            (None, 401, ("AuthenticationError", "authentication_error")),
            ("operator", 403, ("PermissionDeniedError", "permission_error")),
        ):
            headers = {} if who is None else bearer(who)
            reply = await r.post(chat("hello"), headers=headers)
            assert (reply.status, reply.body["error"]["type"], reply.body["error"]["code"]) == (
                status,
                kinds[0],
                status,
            )
            reply = await r.post(chat("hello"), to=ANTHROPIC, headers=headers)
            assert (reply.status, reply.body["type"], reply.body["error"]["type"]) == (
                status,
                "error",
                kinds[1],
            )
            assert reply.headers["x-request-id"]
            assert 'realm="kvplane"' in reply.headers["www-authenticate"]


async def test_who_is_not_let_in_is_counted(tmp_path: Path) -> None:
    async with tenants(tmp_path, alice="concurrent_requests = 1\nrequests_per_second = 0.01") as r:
        for who in (None, None, "operator", "alice", "alice"):
            await r.post(chat("hello"), headers={} if who is None else bearer(who))
        _, _, metrics = await ask(r, "GET", "/metrics", bearer("operator"))
        for status, times in (("401", 2), ("403", 1), ("429", 1)):
            assert f'kvplane_router_refused_total{{status="{status}"}} {times}.0'.encode() in metrics


async def test_keys_are_exchanged_while_it_runs_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        gate = r.router._gate
        assert gate is not None

        async def looked() -> bool:
            first = await gate.look()
            return await gate.look() or first

        async def let_in(key: str) -> bool:
            return (await ask(r, "GET", "/v1/models", {"x-api-key": key}))[0] == 200

        assert await let_in("bobs-old-key")
        file = tmp_path / "tenants.toml"
        text = await asyncio.to_thread(file.read_text)
        with capture_logs() as logs:
            await asyncio.to_thread(file.write_text, text.replace("[tenants.bob]", "[tenants.bob]\nkey = 1"))
            assert not await looked()
        (said,) = [entry for entry in logs if entry["event"] == "files_kept"]
        assert "[tenants.bob] key is unknown; did you mean keys?" in said["problem"]
        assert await let_in("bobs-old-key")

        await asyncio.to_thread(file.write_text, text.replace(hashed("bobs-old-key"), hashed("bobs-new-key")))
        assert await looked()
        assert [await let_in(key) for key in ("bobs-old-key", "bobs-new-key", KEYS["bob"])] == [
            False,
            True,
            True,
        ]


async def test_neither_keys_nor_sessions_of_clients_reach_engines_or_logs(tmp_path: Path) -> None:
    seen = list[str]()

    class Watching(Stub):
        async def _post(self, request: web.Request) -> web.StreamResponse:
            seen.append(repr(request.raw_headers) + await request.text())
            return await super()._post(request)

        async def _models(self, request: web.Request) -> web.StreamResponse:
            seen.append(repr(request.raw_headers))
            return await super()._models(request)

    headers = {
        **bearer("alice"),
        "x-api-key": KEYS["alice"],
        "cookie": "secret-cookie",
        "x-session-id": "the-session",
        "X-Vllm-Priority": "-9",
    }
    more = {
        "session_id": "the-session",
        "request_id": "chosen",
        "priority": -9,
        "vllm_xargs": {"session_id": "the-session"},
    }
    file = await asyncio.to_thread(write, tmp_path)
    with capture_logs() as logs:
        async with front(Watching(Answer()), tenants_file=file) as f:
            for to in (CHAT, "/v1/completions", "/v1/responses", ANTHROPIC, "/v1/embeddings", "/tokenize"):
                await f.raw(to, headers, **more)
            url = f"http://127.0.0.1:{f.router.port}"
            for path in ("/v1/models", "/version"):
                async with f.http.get(url + path, headers=headers) as response:
                    await response.read()
            async with f.http.get(url + "/metrics", headers=bearer("operator")) as response:
                metrics = await response.text()
    assert len(seen) >= 7
    for word in (KEYS["alice"], "secret-cookie", "the-session", "chosen", "-9"):
        assert word not in " ".join(seen), word
        assert word not in repr(logs) + metrics, word


async def test_engines_get_the_routers_key_in_place_of_the_tenants(tmp_path: Path) -> None:
    keys = tmp_path / "engine-keys"
    await asyncio.to_thread(keys.write_text, "wrong\nengines-own\n")
    file = await asyncio.to_thread(write, tmp_path)
    async with front(
        Stub(Answer(), key="engines-own"), tenants_file=file, engine_api_key_file=str(keys)
    ) as f:
        for to in (CHAT, "/v1/embeddings"):
            status, _, body = await f.raw(to, bearer("alice"))
            assert status == 200, body
        async with f.http.get(
            f"http://127.0.0.1:{f.router.port}/v1/models", headers=bearer("bob")
        ) as response:
            assert response.status == 200


async def test_prefix_caches_are_apart_for_each_tenant_and_for_its_own_salts(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        salts = dict[tuple[str, str | None], str]()
        for who in ("alice", "bob"):
            for own in (None, "mine"):
                more = {} if own is None else {"cache_salt": own}
                await r.post(chat("hello", conversation=None, **more), headers=bearer(who))
                assert r.p.requests[-1]["cache_salt"] == r.d.requests[-1]["cache_salt"]
                salts[who, own] = r.d.requests[-1]["cache_salt"]
        assert len(set(salts.values())) == 4
        assert all(0 < len(salt) <= 128 and salt.isalnum() for salt in salts.values())
        # Knowing another's salt is of no use.
        await r.post(chat("hello", conversation=None, cache_salt=salts["alice", None]), headers=bearer("bob"))
        assert r.d.requests[-1]["cache_salt"] not in salts.values()
        for wrong in ("", 5, ["x"]):
            reply = await r.post(chat("hello", cache_salt=wrong), headers=bearer("bob"))
            assert (reply.status, reply.body["error"]["param"]) == (400, "cache_salt")
        async with r.http.post(
            r.url + "/v1/embeddings", json={"model": "fake", "input": "x"}, headers=bearer("bob")
        ):
            pass
        assert (
            json.loads(r.p.passed[-1][1] if r.p.passed else r.d.passed[-1][1])["cache_salt"]
            == salts["bob", None]
        )


async def test_salts_are_the_same_on_every_router_and_can_be_left_out(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        await r.post(chat("hello"), headers=bearer("alice"))
        salt = r.d.requests[-1]["cache_salt"]
    async with tenants(tmp_path) as r:
        await r.post(chat("hello"), headers=bearer("alice"))
        assert r.d.requests[-1]["cache_salt"] == salt
    async with tenants(tmp_path, top="cache_salt = false") as r:
        await r.post(chat("hello", cache_salt="own"), headers=bearer("alice"))
        assert r.d.requests[-1]["cache_salt"] == "own"


@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
async def test_reuse_works_with_salts(tmp_path: Path, path: str) -> None:
    async with tenants(tmp_path) as r:
        await r.say(long_text(200), headers=bearer("alice"))
        reply = await r.say("next", path=path, headers=bearer("alice"))
        assert reply.path == path
        assert (int(reply.reused or 0) > 190) is (path != "cold")


async def test_a_key_that_is_exchanged_keeps_its_tenants_conversations(tmp_path: Path) -> None:
    """Also where conversations are told by their messages: of a tenant, keys tell nobody apart."""
    async with tenants(tmp_path) as r:
        body = chat(long_text(200), conversation=None)
        first = await r.post(body, headers={"x-api-key": "bobs-old-key"})
        again = body | {"messages": [*body["messages"], *chat("x", first.text, "on")["messages"][1:]]}
        assert (await r.post(again, headers={"x-api-key": KEYS["bob"]})).path == "direct"


async def test_only_operators_are_told_how_engines_do(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        for headers in ({}, bearer("alice"), {"x-api-key": "wrong"}):
            assert (await ask(r, "GET", "/ready", headers))[2] == {"ready": True, "draining": False}
            assert (await ask(r, "GET", "/health", headers))[2] == {"status": "ok"}
        assert "problems" in (await ask(r, "GET", "/ready", bearer("operator")))[2]


async def test_an_operator_sees_all_explanations_a_tenant_its_own(tmp_path: Path) -> None:
    async with tenants(tmp_path) as r:
        for who in ("alice", "bob"):
            await r.post(chat("hello", conversation=who), headers={**bearer(who), "x-request-id": "same"})
        models = list[Any]()
        for who in ("alice", "bob", "operator"):
            status, _, told = await ask(r, "GET", "/debug/turns/same", bearer(who))
            assert status == 200
            models.append(told["conversation"])
        assert models[0] != models[1] == models[2]


# Quotas


async def test_requests_beyond_the_rate_are_told_when_to_come_again(tmp_path: Path) -> None:
    async with tenants(tmp_path, alice="requests_per_second = 0.04\nburst = 2") as r:
        statuses = [(await r.post(chat("hello"), headers=bearer("alice"))).status for _ in range(3)]
        assert statuses == [200, 200, 429]
        for to, kind in ((CHAT, "RateLimitError"), (ANTHROPIC, "rate_limit_error")):
            reply = await r.post(chat("hello"), to=to, headers=bearer("alice"))
            assert (reply.status, reply.body["error"]["type"]) == (429, kind)
            assert 20 <= int(reply.headers["retry-after"]) <= 25
        assert (await r.post(chat("hello"), headers=bearer("bob"))).status == 200


async def test_no_more_requests_at_a_time_than_allowed(tmp_path: Path) -> None:
    async with tenants(tmp_path, alice="concurrent_requests = 2") as r:
        r.d.gate.clear()
        running = [asyncio.create_task(r.post(chat("x"), headers=bearer("alice"))) for _ in range(2)]
        await until(lambda: len(r.d.requests) == 2)
        for to in (CHAT, "/v1/embeddings"):
            assert (await r.post(chat("x"), to=to, headers=bearer("alice"))).status == 429
        other = asyncio.create_task(r.post(chat("x"), headers=bearer("bob")))
        await until(lambda: len(r.d.requests) == 3)
        r.d.gate.set()
        assert [reply.status for reply in await asyncio.gather(*running, other)] == [200] * 3
        assert (await r.post(chat("x"), headers=bearer("alice"))).status == 200


async def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path) -> None:
    async with tenants(tmp_path, alice="concurrent_requests = 1") as r:
        r.d.gate.clear()
        for _ in range(3):
            task = asyncio.create_task(r.post(chat("x"), headers=bearer("alice")))
            await until(lambda: r.d.requests)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not r.router._admission.requests)
            r.d.requests.clear()
        r.d.gate.set()
        assert (await r.post(chat("x"), headers=bearer("alice"))).status == 200


async def test_tokens_are_a_budget(tmp_path: Path) -> None:
    async with tenants(tmp_path, alice="tokens_per_minute = 300") as r:
        for to in (CHAT, "/v1/embeddings"):
            reply = await r.post(chat(long_text(300)), to=to, headers=bearer("alice"))
            assert reply.status == (200 if to == CHAT else 429)
        reply = await r.post(chat("short"), headers=bearer("alice"))
        assert (reply.status, "used up" in reply.body["error"]["message"]) == (429, True)
        assert int(reply.headers["retry-after"]) >= 1
        assert (await r.post(chat("short"), headers=bearer("bob"))).status == 200


# Starting


@pytest.mark.parametrize("missing", ["file", "secret"])
async def test_a_router_does_not_start_without_its_tenants(tmp_path: Path, missing: str) -> None:
    file = await asyncio.to_thread(write, tmp_path)
    await asyncio.to_thread((Path(file) if missing == "file" else tmp_path / "secret").unlink)
    with pytest.raises(RouterStartError, match=r"^--tenants .*no such file") as caught:
        async with rig(tenants_file=file):
            pass
    assert "\n" not in str(caught.value)


def test_one_tenant_for_all_and_a_file_of_them_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="--tenant acme: leave it out"):
        RouterSettings(decode_urls=("http://d",), tenant_id="acme", tenants_file="t")
