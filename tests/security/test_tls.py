"""TLS of the control plane's port with real handshakes: who connects, and files that change meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from kvplane.client.client import ControlPlaneClient
from kvplane.client.credentials import Credentials, SecuritySettings
from kvplane.client.errors import ControlPlaneUnavailableError, NotAllowedError, UnknownCallerError
from kvplane.client.files import FileError
from kvplane.client.model import ConversationKey, EngineId, EngineRole, EngineSpec
from kvplane.client.turns import TurnsStream
from kvplane.controlplane.access import token_digest
from kvplane.controlplane.security import SecurityError
from kvplane.controlplane.security import SecuritySettings as ServerSecurity
from kvplane.controlplane.server import ControlPlaneServer
from kvplane.controlplane.tls import SESSION_LOOKS, ServerTls, TlsFiles
from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from tests.security.authority import Authority, Pair, replace

GRPCURL = shutil.which("grpcurl", path=str(Path(sys.executable).parent))
ACCESS = """
[[identity]]
name = "decode"
role = "engine"
certificates = ["spiffe://kv.example/engine"]
engine_ids = ["d*"]
addresses = ["peer"]

[[identity]]
name = "front"
role = "router"
certificates = ["spiffe://kv.example/router", "router.kv.example"]

[[identity]]
name = "eyes"
role = "viewer"
certificates = ["spiffe://kv.example/viewer"]

[[identity]]
name = "both"
role = "admin"
certificates = ["spiffe://kv.example/admin"]
token_sha256 = ["{digest}"]
""".format(digest=token_digest("an-admins"))
KEY, OTHER = ConversationKey("t", "m", "c"), ConversationKey("t", "m", "d")
Serve = Callable[[ServerSecurity], Awaitable[tuple[ControlPlaneServer, str]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A function that runs a control plane and returns it with its address."""
    clock = ManualClock()
    running = list[ControlPlaneServer]()

    async def start(security: ServerSecurity) -> tuple[ControlPlaneServer, str]:
        server = ControlPlaneServer(MemoryStore(clock), clock, security=security)
        running.append(server)
        return server, f"127.0.0.1:{await server.start('127.0.0.1:0')}"

    yield start
    for server in running:
        await server.stop(0)


def pair(authority: Authority, name: str) -> Pair:
    return Pair(str(authority.folder / f"{name}.pem"), str(authority.folder / f"{name}.key"))


def files(authority: Authority, *, mutual: bool = True) -> TlsFiles:
    server = pair(authority, "server")
    return TlsFiles(server.cert, server.key, authority.ca if mutual else "")


def shown(authority: Authority, name: str = "", **more: Any) -> SecuritySettings:
    """Return a client's settings, with the certificate of that name."""
    own = pair(authority, name) if name else Pair("", "")
    return SecuritySettings(ca=authority.ca, cert=own.cert, key=own.key, **more)


@asynccontextmanager
async def client_of(address: str, settings: SecuritySettings) -> AsyncIterator[ControlPlaneClient]:
    credentials = await asyncio.to_thread(Credentials, settings)
    async with ControlPlaneClient(address, timeout_s=5, credentials=credentials) as client:
        yield client


async def test_a_client_with_a_certificate_is_served(serve: Serve, issued: Authority) -> None:
    _, address = await serve(ServerSecurity(files(issued)))
    async with client_of(address, shown(issued, "nobody")) as client, TurnsStream(client.open_turns) as turns:
        assert await client.list_engines() == []
        assert (await turns.begin_turn(KEY, "r")).turn
        await client.wait_connected()
        assert client.connected


@pytest.mark.parametrize("name", ["", "expired", "of-another-authority", "plaintext"])
async def test_who_has_no_certificate_of_the_authority_is_not(
    serve: Serve, issued: Authority, authority: Authority, name: str
) -> None:
    _, address = await serve(ServerSecurity(files(issued)))
    settings = shown(issued, name if name == "expired" else "")
    if name == "of-another-authority":
        other = await asyncio.to_thread(authority.client, "other", ["spiffe://kv.example/admin"])
        settings = with_(settings, cert=other.cert, key=other.key)
    credentials = None if name == "plaintext" else await asyncio.to_thread(Credentials, settings)
    async with ControlPlaneClient(address, timeout_s=5, credentials=credentials) as client:
        with pytest.raises(ControlPlaneUnavailableError):
            await client.list_engines()
        with pytest.raises(ControlPlaneUnavailableError):
            await client.wait_connected()


async def test_a_client_takes_only_the_server_it_means(
    serve: Serve, issued: Authority, authority: Authority
) -> None:
    _, address = await serve(ServerSecurity(files(issued, mutual=False)))
    for settings in (
        with_(shown(issued), ca=authority.ca),
        shown(issued, server_name="other.example"),
        SecuritySettings(tls=True),  # the system's authorities
    ):
        async with client_of(address, settings) as client:
            with pytest.raises(ControlPlaneUnavailableError):
                await client.list_engines()
    async with client_of(f"{address},{address}", shown(issued, server_name="localhost")) as client:
        assert await client.list_engines() == []


async def test_roles_by_certificate(serve: Serve, issued: Authority, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    await asyncio.to_thread(access.write_text, ACCESS)
    _, address = await serve(ServerSecurity(files(issued), str(access)))
    async with client_of(address, shown(issued, "engine")) as client:
        host = "http://127.0.0.1:8200"
        await client.register_engine(EngineSpec(EngineId("d1"), EngineRole.DECODE, endpoint=host))
        with pytest.raises(NotAllowedError) as wrong:
            await client.register_engine(EngineSpec(EngineId("p1"), EngineRole.DECODE))
        assert (wrong.value.reason, wrong.value.metadata["engine_id"]) == ("ENGINE_NOT_ALLOWED", "p1")
        elsewhere = EngineSpec(EngineId("d1"), EngineRole.DECODE, endpoint="http://10.0.0.7:1")
        with pytest.raises(NotAllowedError, match=r"10\.0\.0\.7"):
            await client.register_engine(elsewhere)
    for name in ("router", "by-dns"):
        async with client_of(address, shown(issued, name)) as client:
            assert [engine.spec.engine_id for engine in await client.list_engines()] == ["d1"]
            with pytest.raises(NotAllowedError, match="front has the role router"):
                await client.list_locations()
    async with client_of(address, shown(issued, "nobody")) as client:
        with pytest.raises(UnknownCallerError, match=r"certificate of spiffe://kv\.example/nobody"):
            await client.list_engines()


async def test_who_needs_both_a_certificate_and_a_token(
    serve: Serve, issued: Authority, tmp_path: Path
) -> None:
    access, token = tmp_path / "access.toml", tmp_path / "token"
    await asyncio.to_thread(access.write_text, ACCESS)
    await asyncio.to_thread(token.write_text, "an-admins\n")
    _, address = await serve(ServerSecurity(files(issued), str(access)))
    for name, has_token in (("admin", False), ("router", True)):
        settings = shown(issued, name, **({"token_file": str(token)} if has_token else {}))
        async with client_of(address, settings) as client:
            with pytest.raises(UnknownCallerError):
                await client.list_locations()
    async with client_of(address, shown(issued, "admin", token_file=str(token))) as client:
        assert (await client.list_locations())[0] == []


# Files that change


async def looked(server: ControlPlaneServer) -> None:
    assert server._security is not None
    for _ in range(2):  # a file counts once it has stayed the same between two looks
        await server._security.look()


async def looked_of(client: ControlPlaneClient) -> None:
    for _ in range(2):
        await client.look()


async def test_a_new_certificate_is_shown_without_a_restart(serve: Serve, authority: Authority) -> None:
    await asyncio.to_thread(authority.server)
    await asyncio.to_thread(authority.client, "me", ["spiffe://kv.example/router"])
    server, address = await serve(ServerSecurity(files(authority)))
    other = await asyncio.to_thread(Authority, authority.folder, "other-ca")
    mine = shown(authority, "me")
    async with client_of(address, mine) as before, TurnsStream(before.open_turns) as turns:
        assert (await turns.begin_turn(KEY, "r1")).turn
        await asyncio.to_thread(other.server)
        await looked(server)
        async with client_of(address, with_(mine, ca=other.ca)) as after:
            assert await after.list_engines() == []
        async with client_of(address, mine) as late:
            with pytest.raises(ControlPlaneUnavailableError):
                await late.list_engines()
        assert (await turns.begin_turn(OTHER, "r2")).turn, "connections that are there go on"


async def test_a_new_authority_of_callers_counts_without_a_restart(
    serve: Serve, authority: Authority
) -> None:
    await asyncio.to_thread(authority.server)
    server, address = await serve(ServerSecurity(files(authority)))
    other = await asyncio.to_thread(Authority, authority.folder, "other-ca")
    mine = await asyncio.to_thread(other.client, "me", ["spiffe://kv.example/router"])
    settings = with_(shown(authority), cert=mine.cert, key=mine.key)
    async with client_of(address, settings) as client:
        with pytest.raises(ControlPlaneUnavailableError):
            await client.list_engines()
    both = [await asyncio.to_thread(Path(path).read_bytes) for path in (authority.ca, other.ca)]
    await asyncio.to_thread(replace, authority.ca, b"".join(both))
    await looked(server)
    async with client_of(address, settings) as client:
        assert await client.list_engines() == []


@pytest.mark.parametrize("broken", ["nothing", "garbage", "another-key", "half"])
async def test_broken_files_leave_the_old_ones_in_use(
    serve: Serve, authority: Authority, broken: str
) -> None:
    server_pair = await asyncio.to_thread(authority.server)
    server, address = await serve(ServerSecurity(files(authority, mutual=False)))
    if broken == "nothing":
        await asyncio.to_thread(Path(server_pair.cert).unlink)
    elif broken == "garbage":
        await asyncio.to_thread(replace, server_pair.cert, b"no certificate")
    elif broken == "another-key":
        another = await asyncio.to_thread(authority.server, "another")
        await asyncio.to_thread(shutil.copy, another.key, server_pair.key)
    else:
        content = await asyncio.to_thread(Path(server_pair.cert).read_bytes)
        await asyncio.to_thread(replace, server_pair.cert, content[: len(content) // 2])
    with capture_logs() as logs:
        await looked(server)
        await looked(server)
    assert [entry["event"] for entry in logs] == ["certificates_not_reloaded"]
    async with client_of(address, shown(authority)) as client:
        assert await client.list_engines() == []
    await asyncio.to_thread(authority.server)
    with capture_logs() as logs:
        await looked(server)
    assert [entry["event"] for entry in logs] == ["certificates_reloaded"]


async def test_a_name_of_one_kind_is_none_of_the_other(
    serve: Serve, issued: Authority, tmp_path: Path
) -> None:
    await asyncio.to_thread((tmp_path / "access.toml").write_text, ACCESS)
    _, address = await serve(ServerSecurity(files(issued), str(tmp_path / "access.toml")))
    for number, (uris, dns) in enumerate(((["router.kv.example"], []), ([], ["spiffe://kv.example/router"]))):
        await asyncio.to_thread(issued.client, f"odd{number}", uris, dns)
        async with client_of(address, shown(issued, f"odd{number}")) as client:
            with pytest.raises(UnknownCallerError):
                await client.list_engines()


async def test_a_session_is_not_resumed_for_long(authority: Authority) -> None:
    """Who resumes one shows no certificate: it may be over."""
    pair = await asyncio.to_thread(authority.client, "caller", ["spiffe://kv.example/router"])
    await asyncio.to_thread(authority.server)
    tls = await asyncio.to_thread(ServerTls, files(authority))
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", tls.credentials)
    await server.start()
    context = ssl.create_default_context(cafile=authority.ca)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(pair.cert, pair.key)
    context.set_alpn_protocols(["h2"])

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as made,
        ):
            return made.session, made.session_reused

    try:
        session, _ = await asyncio.to_thread(connect, None)
        for _ in range(SESSION_LOOKS - 1):
            await tls.look()
        assert (await asyncio.to_thread(connect, session))[1] is True
        await tls.look()
        assert (await asyncio.to_thread(connect, session))[1] is False
    finally:
        await server.stop(0)


async def test_files_are_looked_at_every_second(serve: Serve, authority: Authority) -> None:
    clock = ManualClock()
    await asyncio.to_thread(authority.server)
    server = ControlPlaneServer(MemoryStore(clock), clock, security=ServerSecurity(files(authority)))
    await server.start("127.0.0.1:0")
    try:
        await asyncio.to_thread(authority.server)
        with capture_logs() as logs:
            for _ in range(400):
                await clock.advance(0.25)
                await asyncio.sleep(0.01)
                if any(entry["event"] == "certificates_reloaded" for entry in logs):
                    break
            else:
                raise AssertionError("nobody looked")
    finally:
        await server.stop(0)


async def test_a_clients_new_certificate_and_authority_are_used_without_a_restart(
    serve: Serve, authority: Authority
) -> None:
    await asyncio.to_thread(authority.server)
    await asyncio.to_thread(authority.client, "me", ["spiffe://kv.example/router"])
    server, address = await serve(ServerSecurity(files(authority)))
    async with client_of(address, shown(authority, "me")) as client, TurnsStream(client.open_turns) as turns:
        assert (await turns.begin_turn(KEY, "r1")).turn
        first = client._link.channel
        other = await asyncio.to_thread(Authority, authority.folder, "ca")  # in place of the first
        await asyncio.to_thread(other.server)
        await asyncio.to_thread(other.client, "me", ["spiffe://kv.example/router"])
        await looked(server)
        await looked_of(client)
        assert client._link.channel is not first
        assert await client.list_engines() == []
        assert first in client._link._streams, "a stream keeps its connection"
        assert (await turns.begin_turn(OTHER, "r2")).turn
        await turns.aclose()
        for _ in range(1000):
            if first not in client._link._streams:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("the old connection is not closed after its last stream")
        assert await client.list_engines() == []


async def test_a_clients_broken_files_leave_the_old_ones_in_use(serve: Serve, authority: Authority) -> None:
    await asyncio.to_thread(authority.server)
    mine = await asyncio.to_thread(authority.client, "me", ["spiffe://kv.example/router"])
    _, address = await serve(ServerSecurity(files(authority)))
    async with client_of(address, shown(authority, "me")) as client:
        await asyncio.to_thread(replace, mine.key, b"nonsense")
        with capture_logs() as logs:
            await looked_of(client)
        assert [entry["event"] for entry in logs] == ["credentials_not_reloaded"]
        assert "nonsense" not in str(logs)
        assert await client.list_engines() == []


async def test_a_new_token_is_sent_from_the_next_call_on(
    serve: Serve, issued: Authority, tmp_path: Path
) -> None:
    access, token = tmp_path / "access.toml", tmp_path / "token"
    entry = '[[identity]]\nname = "v"\nrole = "viewer"\ntoken_sha256 = ["{}"]\n'
    await asyncio.to_thread(access.write_text, entry.format(token_digest("second")))
    await asyncio.to_thread(token.write_text, "first")
    _, address = await serve(ServerSecurity(files(issued, mutual=False), str(access)))
    async with client_of(address, shown(issued, token_file=str(token))) as client:
        with pytest.raises(UnknownCallerError, match="the token is nobody's"):
            await client.list_engines()
        await asyncio.to_thread(replace, str(token), b"second\n")
        channel = client._link.channel
        await looked_of(client)
        assert await client.list_engines() == []
        assert client._link.channel is channel
        await asyncio.to_thread(replace, str(token), b"third")
        await looked_of(client)
        with pytest.raises(UnknownCallerError):
            await client.list_engines()


async def test_what_cannot_be_used_at_the_start_is_said(
    serve: Serve, issued: Authority, tmp_path: Path
) -> None:
    good = files(issued)
    absent, text = str(tmp_path / "absent"), tmp_path / "text"
    await asyncio.to_thread(text.write_text, "text")
    for tls, said in (
        (with_(good, cert=absent), f"{absent}: no such file"),
        (with_(good, key=str(text)), "cannot be read as PEM"),
        (with_(good, key=pair(issued, "router").key), "is not the key of the certificate"),
        (with_(good, client_ca=str(text)), f"{text}: no certificates in PEM"),
        (with_(good, key=str(tmp_path)), "is a directory"),
    ):
        with pytest.raises(SecurityError, match=said.replace(".", r"\.")):
            await serve(ServerSecurity(tls))
    mine = shown(issued, "router")
    for settings, said in (
        (with_(mine, cert=absent), "no such file"),
        (with_(mine, ca=str(text)), "no certificates in PEM"),
        (with_(mine, token_file=absent), "no such file"),
    ):
        with pytest.raises(FileError, match=said):
            await asyncio.to_thread(Credentials, settings)
    for content in ("", "a b", "ä", "x" * 5000):
        await asyncio.to_thread(text.write_text, content)
        with pytest.raises(FileError, match="must be one line"):
            await asyncio.to_thread(Credentials, with_(mine, token_file=str(text)))


async def test_a_token_that_goes_in_clear_to_another_machine_is_logged(tmp_path: Path) -> None:
    token = tmp_path / "token"
    await asyncio.to_thread(token.write_text, "secret")
    credentials = await asyncio.to_thread(Credentials, SecuritySettings(token_file=str(token)))
    for address, warned in (
        ("127.0.0.1:1", False),
        ("localhost:1", False),
        ("[::1]:1", False),
        ("unix:/tmp/x", False),
        ("10.0.0.7:1", True),
        ("dns:///plane:1", True),
        ("127.0.0.1:1,10.0.0.7:1", True),
    ):
        with capture_logs() as logs:
            credentials.warn_if_readable(address)
        assert [entry["event"] for entry in logs] == ["token_sent_unencrypted"] * warned, address
        assert "secret" not in str(logs)


# grpcurl


async def grpcurl(*arguments: str) -> tuple[int, str]:
    assert GRPCURL is not None
    process = await asyncio.create_subprocess_exec(
        GRPCURL, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, said.decode()


async def test_grpcurl_with_certificates(serve: Serve, issued: Authority, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    await asyncio.to_thread(access.write_text, ACCESS)
    _, address = await serve(ServerSecurity(files(issued), str(access)))

    def options(name: str) -> list[str]:
        own = pair(issued, name)
        return ["-cacert", issued.ca, "-cert", own.cert, "-key", own.key]

    code, said = await grpcurl(*options("viewer"), address, "list")
    assert code == 0
    assert "kvplane.v1.LocationService" in said.split()
    code, said = await grpcurl(*options("viewer"), address, "kvplane.v1.EngineService/ListEngines")
    assert code == 0, said
    code, said = await grpcurl(*options("nobody"), address, "list")
    assert code
    assert "Unauthenticated" in said
    code, said = await grpcurl(*options("router"), address, "list")
    assert code
    assert "PermissionDenied" in said
    code, said = await grpcurl("-cacert", issued.ca, address, "list")
    assert code
    health = (address, "grpc.health.v1.Health/Check")
    protos = tmp_path / "health.proto"
    await asyncio.to_thread(
        protos.write_text,
        'syntax = "proto3"; package grpc.health.v1;'
        "message HealthCheckRequest { string service = 1; }"
        "message HealthCheckResponse { ServingStatus status = 1;"
        " enum ServingStatus { UNKNOWN = 0; SERVING = 1; } }"
        "service Health { rpc Check(HealthCheckRequest) returns (HealthCheckResponse); }",
    )
    asked = ("-import-path", str(tmp_path), "-proto", "health.proto")
    code, said = await grpcurl(*options("nobody"), *asked, *health)
    assert code == 0, said
    assert "SERVING" in said


async def test_grpcurl_with_a_token(serve: Serve, issued: Authority, tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    entry = f'[[identity]]\nname = "v"\nrole = "viewer"\ntoken_sha256 = ["{token_digest("a-token")}"]\n'
    await asyncio.to_thread(access.write_text, entry)
    _, address = await serve(ServerSecurity(files(issued, mutual=False), str(access)))
    tls = ("-cacert", issued.ca)
    code, said = await grpcurl(*tls, "-H", "authorization: Bearer a-token", address, "list")
    assert code == 0, said
    code, said = await grpcurl(*tls, "-H", "authorization: Bearer another", address, "list")
    assert code
    assert "Unauthenticated" in said
