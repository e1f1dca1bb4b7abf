"""Router, engines and commands against a control plane with TLS and roles, each as who it is."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from structlog.testing import capture_logs

from kvplane.cli.config import Config
from kvplane.cli.errors import ConfigError
from kvplane.cli.security import check_grpc_reach, check_up, client_security, server_security
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.credentials import Credentials, SecuritySettings
from kvplane.connector.config import ConfigError as ConnectorError
from kvplane.connector.config import read_config
from kvplane.connector.inquiry import Answer
from kvplane.connector.pull import PullPlan
from kvplane.controlplane.security import SecuritySettings as ServerSecurity
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.controlplane.tls import TlsFiles
from kvplane.router.app import RouterServer, RouterStartError
from kvplane.router.settings import RouterSettings
from kvplane.store.clock import SystemClock
from kvplane.store.memory import MemoryStore
from tests.connector.test_asking_plane import Fleet
from tests.fakes.attach import until
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.plane import FakePlane
from tests.router.rig import Rig, long_text
from tests.security.authority import Authority, Pair

PROGRAM = (sys.executable, "-c", "import sys; from kvplane.cli.entry import main; sys.exit(main())")
ACCESS = """
[[identity]]
name = "prefill"
role = "engine"
certificates = ["spiffe://kv.example/prefill"]
engine_ids = ["prefill-*", "p?"]
addresses = ["peer"]

[[identity]]
name = "decode"
role = "engine"
certificates = ["spiffe://kv.example/decode"]
engine_ids = ["decode-*", "d?"]
addresses = ["peer", "10.0.0.7"]

[[identity]]
name = "router"
role = "router"
certificates = ["spiffe://kv.example/router"]
tenants = ["default"]

[[identity]]
name = "ops"
role = "admin"
certificates = ["spiffe://kv.example/admin"]
"""
NAMES = {m.EngineRole.PREFILL: "prefill", m.EngineRole.DECODE: "decode"}


class Place:
    """Certificates and an access file, for a control plane and its callers."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.server = self.authority.server()
        for name in ("prefill", "decode", "router", "admin", "stranger"):
            self.authority.client(name, [f"spiffe://kv.example/{name}"])
        self.access = folder / "access.toml"
        self.access.write_text(ACCESS)
        tls = TlsFiles(self.server.cert, self.server.key, self.authority.ca)
        self.security = ServerSecurity(tls, str(self.access))

    def pair(self, name: str) -> Pair:
        folder = self.authority.folder
        return Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))

    def shown(self, name: str) -> SecuritySettings:
        own = self.pair(name)
        return SecuritySettings(ca=self.authority.ca, cert=own.cert, key=own.key)

    def extra(self, name: str) -> dict[str, str]:
        """Return an engine's extra config."""
        own = self.pair(name)
        return {"kvplane_ca": self.authority.ca, "kvplane_cert": own.cert, "kvplane_key": own.key}

    def options(self, name: str) -> tuple[str, ...]:
        """Return a command's options."""
        own = self.pair(name)
        return ("--plane-ca", self.authority.ca, "--plane-cert", own.cert, "--plane-key", own.key)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@asynccontextmanager
async def hops(place: Place, router: str) -> AsyncIterator[Rig]:
    """Run a control plane, engines and a router, the last with the certificate of that name."""
    async with AsyncExitStack() as stack:
        clock = SystemClock()
        server = ControlPlaneServer(MemoryStore(clock), clock, security=place.security)
        address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        stack.push_async_callback(server.stop, 0.1)
        engines = list[FakeEngine]()
        for role, name in NAMES.items():
            credentials = await asyncio.to_thread(Credentials, place.shown(name))
            client = await stack.enter_async_context(ControlPlaneClient(address, credentials=credentials))
            config = EngineConfig(role, prefix_caching=role is m.EngineRole.DECODE)
            engines.append(await stack.enter_async_context(FakeEngine(config, cast(FakePlane, client))))
        settings = RouterSettings(
            port=0,
            plane_address=address,
            plane_security=place.shown(router),
            prefill_urls=(engines[0].url,),
            decode_urls=(engines[1].url,),
            plane_timeout_s=5.0,
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        running = await stack.enter_async_context(RouterServer(settings))
        yield Rig(running, cast(FakePlane, client), engines[:1], engines[1:], http)


@pytest.mark.parametrize("path", ["pull", "direct"])
async def test_a_conversation_over_mutual_tls(place: Place, path: str) -> None:
    async with hops(place, "router") as r:
        await r.say(long_text(200))
        for _ in range(2):
            reply = await r.say("and then", path=path)
            assert reply.path == path
            assert int(reply.reused or 0) > 190


@pytest.mark.parametrize(
    ("who", "problem"),
    [("stranger", "certificate of spiffe://kv.example/stranger"), ("decode", "may not call ListEngines")],
)
async def test_a_router_that_is_refused_serves_cold_and_says_why_once(
    place: Place, who: str, problem: str
) -> None:
    with capture_logs() as logs:
        async with hops(place, who) as r:
            for number in range(4):
                reply = await r.say(long_text(100) if not number else "on")
                assert reply.path == "cold"
            said = [entry for entry in logs if entry["event"] == "control_plane_unavailable"]
            assert len(said) == 1, said
            assert problem in said[0]["problem"]
            assert "hint" not in said[0]


async def test_a_router_of_another_tenant_serves_cold_and_stays_with_its_control_plane(place: Place) -> None:
    await asyncio.to_thread(place.access.write_text, ACCESS.replace('["default"]', '["other"]'))
    with capture_logs() as logs:
        async with hops(place, "router") as r:
            for number in range(4):
                reply = await r.say(long_text(100) if not number else "on")
                assert reply.path == "cold"
    events = [entry["event"] for entry in logs]
    assert "control_plane_unavailable" not in events
    said = [entry for entry in logs if entry["event"] == "control_plane_denied"]
    assert [(entry["call"], entry["reason"]) for entry in said] == [("begin_turn", "TENANT_NOT_ALLOWED")]


async def test_a_prefill_engine_asks_and_claims_over_mutual_tls(place: Place) -> None:
    fleet = Fleet(place.security, {role: place.shown(name) for role, name in NAMES.items()})
    await fleet.start()
    try:
        tokens = list(range(200))
        first = await fleet.ask(tokens)
        await fleet.announce(first.begun, tokens)
        answer: Answer = await fleet.ask([*tokens, *range(500, 600)])
        assert answer.claim is not None
        assert isinstance(answer.plan, PullPlan)
        assert answer.claim.owner.startswith("p0@")
    finally:
        await fleet.stop()


async def test_an_engine_that_is_taken_out_and_put_back(place: Place) -> None:
    """It goes cold, says so once, and is back by itself; what it holds is on record again."""
    fleet = Fleet(place.security, {role: place.shown(name) for role, name in NAMES.items()})
    await fleet.start()
    try:
        begun = (await fleet.ask(tokens := list(range(200)))).begun
        await fleet.announce(begun, tokens)
        out = ACCESS.replace("spiffe://kv.example/decode", "spiffe://kv.example/nobody")
        with capture_logs() as logs:
            await asyncio.to_thread(place.access.write_text, out)
            await until(lambda: not fleet.d.attached)
            await until(lambda: any("spiffe://kv.example/decode" in e.get("error", "") for e in logs))
            await asyncio.to_thread(place.access.write_text, ACCESS)
            await until(lambda: fleet.d.attached)
        refused = [e for e in logs if e["event"] == "control_plane_refused"]
        # gRPC's client may tell "Internal error from Core" where it is refused before it has written; the
        # reason is then told again, as after any other.
        known = ["Core" not in entry["error"] for entry in refused]
        assert 1 <= known.count(True) <= 1 + known.count(False), refused
    finally:
        await fleet.stop()


async def test_a_router_whose_files_cannot_be_used_does_not_start(place: Place) -> None:
    own = place.pair("router")
    settings = RouterSettings(
        port=0,
        plane_address="127.0.0.1:1",
        decode_urls=("http://127.0.0.1:1",),
        plane_security=SecuritySettings(ca=own.key, cert=own.cert, key=own.key),
    )
    with pytest.raises(RouterStartError, match=r"--plane-ca .*: no certificates"):
        await RouterServer(settings).start()


# The connector's settings


def test_the_connectors_files_are_checked_when_the_engine_starts(place: Place) -> None:
    base = {"kvplane_address": "127.0.0.1:1", **place.extra("decode")}
    assert read_config(base, {}).security == place.shown("decode")
    assert read_config({"kvplane_address": "a:1"}, {}).security.empty
    assert read_config({"kvplane_address": "a:1", "kvplane_tls": True}, {}).security.tls
    for change, said in (
        ({"kvplane_key": ""}, "kvplane_key: missing beside cert"),
        ({"kvplane_cert": place.pair("router").cert}, "kvplane_key: .* is not the key of the certificate"),
        ({"kvplane_ca": "/absent"}, "kvplane_ca: /absent: no such file"),
        ({"kvplane_token_file": "/absent"}, "kvplane_token_file: /absent: no such file"),
        ({"kvplane_address": "10.0.0.1:1,10.0.0.2:1"}, "kvplane_server_name: missing"),
        ({"kvplane_tls": "yes"}, "kvplane_tls: 'yes' is not true or false"),
        ({"kvplane_ca": 1}, "kvplane_ca: 1 is not a string"),
        ({"kvplane_certs": "x"}, r"did you mean kvplane_cert\?"),
    ):
        with pytest.raises(ConnectorError, match=said):
            read_config({**base, **change}, {})


# The commands


async def run(*arguments: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert b"Traceback" not in err
    return process.returncode or 0, out.decode(), err.decode()


async def test_commands_show_who_they_are(place: Place) -> None:
    server = place.server
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        *("serve", "--grpc-port", "0", "--grpc-host", "0.0.0.0", "--access", str(place.access)),
        *("--grpc-tls-cert", server.cert, "--grpc-tls-key", server.key),
        *("--grpc-client-ca", place.authority.ca),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    events = list[dict[str, Any]]()
    try:
        while not events or events[-1]["event"] != "control_plane_started":
            events.append(json.loads(await asyncio.wait_for(process.stderr.readline(), 120)))
        assert events[-1]["tls"] == "mutual"
        assert "listening_beyond_loopback" not in [entry["event"] for entry in events]
        at = ("--plane", f"127.0.0.1:{events[-1]['port']}", "--timeout", "60")
        (ops, stranger, bare), absent = (
            await asyncio.gather(
                run("engines", *at, "--output", "json", *place.options("admin")),
                run("engines", *at, *place.options("stranger")),
                run("engines", *at, "--plane-ca", place.authority.ca),
            ),
            await run("engines", *at, "--plane-token-file", "/absent"),
        )
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 120)
    assert ops[0] == 0, ops
    assert (stranger[0], bare[0], absent[0]) == (2, 2, 2)
    assert "refused: caller is not known" in stranger[2]
    assert "/absent: no such file" in absent[2]


def configured(**options: Any) -> None:
    """Check options as the commands do before they start anything."""
    config = Config(**options)
    server_security(config)
    check_grpc_reach(config)
    client_security(config, config.plane)
    check_up(config)


PAIR = {"grpc_tls_cert": "c", "grpc_tls_key": "k"}
NAMED = {"plane_ca": "a", "plane_server_name": "plane.internal"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"grpc_tls_cert": "c"}, "--grpc-tls-key is missing"),
        ({"grpc_tls_key": "k"}, "--grpc-tls-cert is missing"),
        ({"grpc_client_ca": "a"}, "--grpc-client-ca: needs --grpc-tls-cert"),
        ({"grpc_host": "0.0.0.0"}, "give it --grpc-tls-cert, --grpc-tls-key and --access"),
        ({"grpc_host": "0.0.0.0", "access": "a"}, "give it --grpc-tls-cert"),
        ({"grpc_host": "::", **PAIR}, "give it --access or --grpc-client-ca"),
        ({"access": "a"}, "--plane-token-file is missing"),
        (PAIR, "--plane-ca is missing"),
        (
            {"grpc_host": "0.0.0.0", "access": "a", **PAIR, "plane_ca": "a", "plane_token_file": "t"},
            "--plane-server-name is missing: with --grpc-host 0.0.0.0",
        ),
        ({**PAIR, "grpc_client_ca": "a", "plane_ca": "a"}, "--plane-cert is missing"),
        ({"plane_cert": "c"}, "--plane-key: missing beside cert; a certificate"),
        ({"plane": "10.0.0.1:1,10.0.0.2:1", "plane_tls": True}, "--plane-server-name: missing"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configured(**options)


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({}, []),
        (
            {"grpc_host": "0.0.0.0", **PAIR, "access": "x", **NAMED, "plane_token_file": "t"},
            [],
        ),
        ({"grpc_host": "0.0.0.0", "allow_remote": True}, [(False, False)]),
        ({"grpc_host": "0.0.0.0", "allow_remote": True, **PAIR, **NAMED}, [(True, False)]),
        ({"grpc_host": "127.0.0.1", **PAIR, "plane_ca": "a"}, []),
    ],
)
def test_a_port_that_others_reach_needs_a_flag_unless_it_is_guarded(
    options: dict[str, Any], warned: list[tuple[bool, bool]]
) -> None:
    with capture_logs() as logs:
        configured(**options)
    assert [(entry["encryption"], entry["authentication"]) for entry in logs] == warned


@pytest.mark.parametrize(
    "options",
    [("--access", "/absent"), ("--grpc-tls-cert", "/absent", "--grpc-tls-key", "/absent")],
)
async def test_a_file_that_is_not_there_is_said_in_one_line(options: tuple[str, ...]) -> None:
    code, _, err = await run("serve", "--grpc-port", "0", *options)
    assert code == 2
    assert err == f"kvplane: {options[-2]} /absent: no such file or directory\n"
