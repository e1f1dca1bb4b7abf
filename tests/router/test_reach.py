"""Where the router connects to: engines, and nothing that a registration or a redirect could lead it to."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from structlog.testing import capture_logs

from kvplane.client.model import EngineRole
from kvplane.router.reach import CheckedResolver, Reach, ReachError
from kvplane.router.settings import RouterSettings, SettingsError
from tests.fakes.core import EngineConfig
from tests.router.rig import chat, rig, until
from tests.router.stub import Answer, Stub, front

NEVER = [
    "http://169.254.169.254",
    "http://169.254.1.7:8200",
    "http://[fe80::1]:80",
    "http://[fd00:ec2::254]",
    "http://[::ffff:169.254.169.254]:8200",
    "http://[64:ff9b::a9fe:a9fe]",
    "http://[2002:a9fe:a9fe::1]",
    "http://100.100.100.200",
    "http://168.63.129.16",
    "http://0.0.0.0:8200",
    "http://[::]:8200",
    "http://224.0.0.1",
    "http://255.255.255.255",
    # As C libraries read addresses.
    "http://2852039166",
    "http://0xa9fea9fe",
    "http://0xa9.0xfe.0xa9.0xfe",
    "http://169.16689662",
    "http://127.1",
    "http://0251.0376.0251.0376",
    "http://metadata.google.internal",
    "http://metadata.google.internal.:80",
    "http://instance-data",
]


@pytest.mark.parametrize("url", NEVER)
def test_what_is_no_engine_is_never_called(url: str) -> None:
    assert Reach().refusal(url) is not None
    assert Reach(["10.0.0.0/8", "*.engines"]).refusal(url) is not None


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.2:8200",
        "http://[fd00::7]:8200",
        "http://127.0.0.1:8200",
        "http://[::1]",
        "http://vllm-0.d",
    ],
)
def test_engines_are_called(url: str) -> None:
    assert Reach().refusal(url) is None


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://10.1.2.3:8200", True),
        ("http://[::ffff:10.1.2.3]:8200", True),
        ("http://11.1.2.3:8200", False),
        ("http://192.168.7.7:8200", True),
        ("http://192.168.7.8:8200", False),
        ("http://[fd00::7]:8200", False),
        ("http://127.0.0.1:8200", False),
    ],
)
def test_networks_and_addresses_limit_engines(url: str, allowed: bool) -> None:
    assert (Reach(["10.0.0.0/8", "192.168.7.7", "one.engines"]).refusal(url) is None) is allowed


def test_names_and_suffixes_limit_engines() -> None:
    reach = Reach(["d.example", "*.engines.internal"])
    for name, allowed in (
        ("d.example", True),
        ("d.example.", True),
        ("e.example", False),
        ("a.engines.internal", True),
        ("a.b.engines.internal", True),
        ("engines.internal", False),
        ("aengines.internal", False),
    ):
        assert (reach.refusal(f"http://{name}:8200") is None) is allowed, name


@pytest.mark.parametrize(
    "pattern", ["10.0.0.1/8", "10.0.0.0/40", "http://d", "*", "*.", "a b", "", "1.2.3", "0x7f.1"]
)
def test_patterns_that_say_nothing_are_refused_by_the_flag(pattern: str) -> None:
    with pytest.raises(ReachError):
        Reach([pattern])
    with pytest.raises(SettingsError, match="--engine-hosts"):
        RouterSettings(decode_urls=("http://d",), engine_hosts=(pattern,))


def test_without_encryption_only_this_machine_is_called_unless_that_is_asked_for() -> None:
    reach = Reach(plaintext=False, named=["named"])
    for url, allowed in (
        ("http://127.0.0.1:8200", True),
        ("http://localhost:8200", True),
        ("http://[::1]:8200", True),
        ("http://10.0.0.2:8200", False),
        ("http://d:8200", False),
        ("https://10.0.0.2:8200", True),
        ("http://named:8200", True),
    ):
        assert (reach.refusal(url) is None) is allowed, url


class Names(AbstractResolver):
    """Resolves every name to the same addresses."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self._addresses
        ]

    async def close(self) -> None:
        pass


async def test_a_name_is_called_only_where_it_may_be() -> None:
    names = Names("169.254.169.254", "10.0.0.2", "fe80::1%eth0", "::ffff:169.254.169.254")
    assert [e["host"] for e in await CheckedResolver(Reach(), names).resolve("d", 80)] == ["10.0.0.2"]
    with pytest.raises(OSError, match="d is not called"):
        await CheckedResolver(Reach(), Names("169.254.169.254")).resolve("d", 80)
    # What whoever runs the router has named, is called.
    named = CheckedResolver(Reach(named=["d"]), Names("169.254.7.7"))
    assert [e["host"] for e in await named.resolve("d", 80)] == ["169.254.7.7"]
    limited = CheckedResolver(Reach(["10.0.0.0/8", "*.ok"]), Names("11.0.0.1"))
    assert await limited.resolve("a.ok", 80)
    with pytest.raises(OSError, match="not among --engine-hosts"):
        await limited.resolve("d", 80)
    assert Reach(["10.0.0.0/8"]).address_refusal("d", ipaddress.ip_address("10.9.9.9")) is None


async def test_a_registration_leads_nowhere_else_and_is_named() -> None:
    config = EngineConfig(EngineRole.DECODE, announces_endpoint=True)
    with capture_logs() as logs:
        async with rig(decode=[config], static=False, poll_interval_s=0.01) as r:
            await until(lambda: [e for e in r.router.pool.engines if e.decode])
            (name,) = (n for n, e in r.plane.engines.items() if e.spec.role is EngineRole.DECODE)
            engine = r.plane.engines[name]
            spec = replace(engine.spec, endpoint="http://169.254.169.254/")
            r.plane.engines[name] = replace(engine, spec=spec)
            await until(lambda: not [e for e in r.router.pool.engines if e.decode])
            async with r.http.get(r.url + "/ready") as response:
                problems = (await response.json())["problems"]
            assert any("169.254.169.254 is link-local" in line for line in problems)
    refused = [entry for entry in logs if entry["event"] == "engine_endpoint_refused"]
    assert len(refused) == 1, "said once, not at each poll"


@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/v1/chat/completions", "/v1/embeddings", "/version"]
)
async def test_redirects_of_engines_are_not_followed(path: str) -> None:
    reached = list[str]()

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    target = f"http://127.0.0.1:{runner.addresses[0][1]}/secret"
    try:
        moved = Answer(b"", 307, [("Location", target)])

        class Redirecting(Stub):
            async def _health(self, request: web.Request) -> web.Response:
                raise web.HTTPTemporaryRedirect(target) if path == "/health" else web.HTTPOk

            async def _models(self, request: web.Request) -> web.StreamResponse:
                if path == "/v1/models":
                    raise web.HTTPTemporaryRedirect(target)
                return await super()._models(request)

        async with front(Redirecting(moved)) as f:
            for to in ("/v1/chat/completions", "/v1/embeddings"):
                status, headers, _ = await f.raw(to)
                assert status in (502, 503)
                assert "location" not in dict(headers)
            for to in ("/v1/models", "/version"):
                async with f.http.get(
                    f"http://127.0.0.1:{f.router.port}{to}", allow_redirects=False
                ) as response:
                    assert response.status in (200, 302, 307, 502, 503)
                    assert "location" not in response.headers
        assert reached == []
    finally:
        await runner.cleanup()


async def test_headers_of_engines_own_stay_inside() -> None:
    private = {
        "X-Data-Parallel-Rank": "1",
        "endpoint-load-metrics": "a=1",
        "X-KVPlane-Path": "pull",
        "X-Kept": "y",
    }
    answer = Answer(headers=list(private.items()))
    async with front(Stub(answer)) as f:
        for to in ("/v1/chat/completions", "/v1/embeddings"):
            _, headers, _ = await f.raw(to)
            sent = dict(headers)
            assert sent["x-kept"] == "y"
            assert not {"x-data-parallel-rank", "endpoint-load-metrics"} & sent.keys()
            assert sent.get("x-kvplane-path") != "pull"


STEERING = {
    "x-data-parallel-rank": "1",
    "X_Data_Parallel_Rank": "1",
    "x-kvplane-turn": "7",
    "x-kvplane-tenant": "other",
    "X_KVPLANE_tenant": "other",
    "endpoint-load-metrics-format": "json",
    "x-request-id": "cmpl-___prefill_addr_10.9.9.9:1___decode_addr_10.9.9.9:2_0",
}


@pytest.mark.parametrize(
    "to", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize", "/v1/embeddings"]
)
async def test_what_steers_engines_is_not_taken_from_clients(to: str) -> None:
    seen = list[str]()

    class Watching(Stub):
        async def _post(self, request: web.Request) -> web.StreamResponse:
            seen.append(repr(sorted(request.headers.items())) + (await request.text()))
            return await super()._post(request)

    async with front(Watching(Answer())) as f:
        _, headers, _ = await f.raw(to, STEERING, request_id=STEERING["x-request-id"], prompt="x")
    assert seen
    said = " ".join(seen).lower()
    for word in ("parallel", "x-kvplane", "x_kvplane", "load-metrics", "10.9.9.9"):
        assert word not in said, word
    assert "10.9.9.9" not in repr(headers)


async def test_an_id_that_steers_nothing_goes_on() -> None:
    async with rig() as r:
        await r.post(chat("hello", request_id="mine"), headers={"x-request-id": "also-mine"})
        assert r.d.requests[0]["request_id"] == "mine"
        sent = {name.lower(): value for name, value in r.d.headers[0].items()}
        assert sent["x-request-id"] == "also-mine"


@pytest.mark.parametrize("name", ["kv_transfer_params", "kv%5Ftransfer%5fparams", "ec_transfer_params"])
async def test_a_form_in_a_urls_encoding_that_steers_transfers_is_refused(name: str) -> None:
    async with rig() as r:
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        reply = await r.post(f"model=fake&{name}=x".encode(), to="/v1/audio/transcriptions", headers=kind)
        assert (reply.status, "must not have the field" in reply.body["error"]["message"]) == (400, True)
        assert not r.d.passed
        reply = await r.post(b"model=fake&prompt=x", to="/v1/audio/transcriptions", headers=kind)
        assert reply.status == 200


@pytest.mark.parametrize("to", ["/v1/chat/completions", "/v1/embeddings"])
async def test_trailers_of_clients_reach_no_engine(to: str) -> None:
    seen = list[str]()

    class Watching(Stub):
        async def _post(self, request: web.Request) -> web.StreamResponse:
            seen.append(repr(request.raw_headers) + await request.text())
            return await super()._post(request)

    async with front(Watching(Answer())) as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", f.router.port)
        body = b'{"model":"fake","messages":[]}'
        writer.write(
            f"POST {to} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: X-Other\r\n"
            f"Connection: close\r\n\r\n{len(body):x}\r\n".encode()
            + body
            + b"\r\n0\r\nX-Data-Parallel-Rank: 7\r\nX-KVPlane-Tenant: other\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
    assert b" 200 " in answer.split(b"\r\n")[0]
    assert len(seen) == 1
    for word in ("parallel", "kvplane", "trailer"):
        assert word not in seen[0].lower()
        assert word.encode() not in answer.lower().replace(b"x-kvplane-", b"")
