"""TLS in front of the router and towards engines: served, demanded, exchanged while it runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web
from structlog.testing import capture_logs

from kvplane.router.app import RouterServer, RouterStartError
from kvplane.router.reloading import FileProblemError, Reloaded
from kvplane.router.settings import RouterSettings, SettingsError
from kvplane.router.tls import EngineFiles, ServerFiles, Tls
from tests.router.rig import CHAT, chat
from tests.router.stub import WELL

US, THEM, CLIENTS = trustme.CA(), trustme.CA(), trustme.CA()


def write(folder: Path, name: str, ca: trustme.CA, host: str = "127.0.0.1") -> tuple[str, str]:
    """Write a certificate and its key; returns where."""
    leaf = ca.issue_cert(host)
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    return str(cert), str(key)


def write_ca(folder: Path, name: str, *authorities: trustme.CA) -> str:
    file = folder / f"{name}.pem"
    file.write_bytes(b"".join(ca.cert_pem.bytes() for ca in authorities))
    return str(file)


def trusting(ca: trustme.CA, identity: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    if identity is not None:
        identity.issue_cert("client").configure_cert(context)
    return context


def shown_by(ca: trustme.CA) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    return context


@asynccontextmanager
async def engine(context: ssl.SSLContext | None) -> AsyncIterator[str]:
    """Run an engine that answers everything well; gives its URL."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": "fake"}]})
        return web.json_response(WELL)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    scheme = "http" if context is None else "https"
    try:
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(port: int, context: ssl.SSLContext) -> int:
    """Send a request on a connection of its own."""
    connector = aiohttp.TCPConnector(ssl=context)
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post(f"https://127.0.0.1:{port}{CHAT}", json=chat("hello")) as response,
    ):
        await response.read()
        return response.status


@asynccontextmanager
async def router(url: str, **settings: Any) -> AsyncIterator[RouterServer]:
    async with RouterServer(RouterSettings(port=0, decode_urls=(url,), **settings)) as server:
        yield server


async def looked(reloaded: Reloaded[Any]) -> bool:
    """Look as often as it takes for a change to count."""
    first = await reloaded.look()
    return await reloaded.look() or first


async def test_the_router_serves_https_and_nothing_else(tmp_path: Path) -> None:
    files = ServerFiles(*await asyncio.to_thread(write, tmp_path, "r", US))
    mine, others = await asyncio.to_thread(lambda: (trusting(US), trusting(THEM)))
    async with engine(None) as url, router(url, tls=files) as r:
        assert await ask(r.port, mine) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(r.port, others)
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://127.0.0.1:{r.port}/health")


async def test_clients_without_a_certificate_are_turned_away(tmp_path: Path) -> None:
    pair = await asyncio.to_thread(write, tmp_path, "r", US)
    files = ServerFiles(*pair, await asyncio.to_thread(write_ca, tmp_path, "ca", CLIENTS))
    contexts = await asyncio.to_thread(lambda: [trusting(US, ca) for ca in (CLIENTS, THEM, None)])
    async with engine(None) as url, router(url, tls=files) as r:
        assert await ask(r.port, contexts[0]) == 200
        for context in contexts[1:]:
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                await ask(r.port, context)


async def test_a_new_certificate_is_shown_to_new_connections_and_open_ones_go_on(tmp_path: Path) -> None:
    pair = await asyncio.to_thread(write, tmp_path, "r", US)
    tls = Tls("front", ServerFiles(*pair))
    context = await tls.start()
    before, after = await asyncio.to_thread(lambda: (trusting(US), trusting(THEM)))
    async with serving(context) as port, open_to(port, before) as (reader, writer):
        await asyncio.to_thread(write, tmp_path, "r", THEM)
        assert await looked(tls.files)
        async with open_to(port, after):
            pass
        with pytest.raises(ssl.SSLCertVerificationError):
            async with open_to(port, before):
                pass
        writer.write(b"still\n")
        assert await reader.readline() == b"still\n"


async def test_an_authority_that_is_taken_out_lets_nobody_in_any_more(tmp_path: Path) -> None:
    pair = await asyncio.to_thread(write, tmp_path, "r", US)
    ca = await asyncio.to_thread(write_ca, tmp_path, "ca", CLIENTS, THEM)
    tls = Tls("front", ServerFiles(*pair, ca))
    context = await tls.start()
    one, other = await asyncio.to_thread(lambda: (trusting(US, CLIENTS), trusting(US, THEM)))
    async with serving(context) as port:
        for each in (one, other):
            assert await echoed(port, each)
        await asyncio.to_thread(write_ca, tmp_path, "ca", THEM)
        assert await looked(tls.files)
        assert not await echoed(port, one)
        assert await echoed(port, other)


@pytest.mark.parametrize("broken", ["cert", "key", "pair", "gone", "locked"])
async def test_broken_files_keep_what_there_was_and_are_named(tmp_path: Path, broken: str) -> None:
    cert, key = await asyncio.to_thread(write, tmp_path, "r", US)
    tls = Tls("front", ServerFiles(cert, key))
    context = await tls.start()
    mine = await asyncio.to_thread(trusting, US)

    def spoil() -> None:
        if broken == "pair":
            Path(key).write_bytes(THEM.issue_cert("x").private_key_pem.bytes())
        elif broken == "gone":
            Path(cert).unlink()
        elif broken == "locked":
            Path(key).write_text(
                "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
            )
        else:
            Path(cert if broken == "cert" else key).write_text("no certificate")

    async with serving(context) as port:
        await asyncio.to_thread(spoil)
        with capture_logs() as logs:
            assert not await looked(tls.files)
            assert not await looked(tls.files)
        (said,) = [entry for entry in logs if entry["event"] == "files_kept"]
        assert said["log_level"] == "error"
        assert "--tls-" in said["problem"]
        assert "PRIVATE" not in said["problem"]
        assert await echoed(port, mine)
        # Mended, it is taken.
        await asyncio.to_thread(write, tmp_path, "r", US)
        assert await looked(tls.files)
        assert await echoed(port, mine)


async def test_files_are_taken_when_they_have_stayed_alike_for_two_looks(tmp_path: Path) -> None:
    file = tmp_path / "value"
    await asyncio.to_thread(file.write_text, "1")
    values = list[str]()
    reloaded = Reloaded("x", file.read_text, lambda value: [str(file)], on_change=values.append)
    assert await reloaded.start() == "1"
    assert not await reloaded.look()
    for text in ("22", "333"):
        await asyncio.to_thread(file.write_text, text)
        assert not await reloaded.look()
    assert await reloaded.look()
    assert not await reloaded.look()
    assert values == ["1", "333"]


@pytest.mark.parametrize("way", ["ca", "mutual"])
async def test_engines_by_https(tmp_path: Path, way: str) -> None:
    server = await asyncio.to_thread(shown_by, THEM)
    if way == "mutual":
        server.verify_mode = ssl.CERT_REQUIRED
        CLIENTS.configure_trust(server)
    ca = await asyncio.to_thread(write_ca, tmp_path, "ca", THEM)
    pair = await asyncio.to_thread(write, tmp_path, "me", CLIENTS, "router")
    mine = EngineFiles(ca, *pair) if way == "mutual" else EngineFiles(ca)
    async with engine(server) as url:
        async with router(url, engine_tls=mine) as r:
            assert await plain(r.port) == 200
        # Whom nobody vouches for is no engine; nor is the router without what the engine wants.
        wrong = EngineFiles(ca) if way == "mutual" else EngineFiles()
        async with router(url, engine_tls=wrong) as r:
            assert await plain(r.port) in (502, 503)


async def test_the_certificate_for_engines_is_exchanged_too(tmp_path: Path) -> None:
    server = await asyncio.to_thread(shown_by, US)
    ca = await asyncio.to_thread(write_ca, tmp_path, "ca", THEM)
    tls = Tls("engines", EngineFiles(ca))
    context = await tls.start()
    async with serving(server) as port:
        assert not await echoed(port, context)
        await asyncio.to_thread(write_ca, tmp_path, "ca", US)
        assert await looked(tls.files)
        assert await echoed(port, context)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (ServerFiles("absent.pem", "absent.key"), "--tls-key absent.key: no such file"),
        (EngineFiles("absent.pem"), "--engine-ca absent.pem: no such file"),
    ],
)
async def test_a_router_does_not_start_without_its_files(files: Any, said: str) -> None:
    name = "tls" if isinstance(files, ServerFiles) else "engine_tls"
    settings = RouterSettings(port=0, decode_urls=("http://127.0.0.1:9",), **{name: files})
    with pytest.raises(RouterStartError, match=said):
        await RouterServer(settings).start()


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("nothing")
    with pytest.raises(FileProblemError, match=r"--engine-ca .*: has no certificates in PEM"):
        EngineFiles(str(tmp_path / "ca")).context()
    with pytest.raises(SettingsError, match="one needs the other"):
        RouterSettings(decode_urls=("http://d",), engine_tls=EngineFiles(None, "cert"))


# Ends of a connection


@asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Echo lines."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def open_to(
    port: int, context: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()


async def echoed(port: int, context: ssl.SSLContext) -> bool:
    """Tell whether a connection comes about and carries something."""
    try:
        async with open_to(port, context) as (reader, writer):
            writer.write(b"there\n")
            return await reader.readline() == b"there\n"
    except (ssl.SSLError, ConnectionError):
        return False


async def plain(port: int) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://127.0.0.1:{port}{CHAT}", json=chat("hello", conversation=None)) as response,
    ):
        await response.read()
        return response.status
