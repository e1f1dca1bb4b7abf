"""The port that shows nothing but metrics."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from kvplane.cli.config import Config
from kvplane.cli.errors import StartError
from kvplane.cli.metrics_port import MetricsPort, MetricsPortError
from kvplane.cli.metrics_tls import check_metrics_reach, metrics_tls
from kvplane.router.tls import ServerFiles, Tls
from tests.security.authority import Authority, Pair, replace


async def page() -> bytes:
    return b"a 1\n"


async def other() -> bytes:
    return b"b 2\n"


@pytest.fixture
async def served() -> AsyncIterator[MetricsPort]:
    async with MetricsPort([page, other]) as served:
        await served.start("127.0.0.1", 0)
        yield served


async def ask(served: MetricsPort, request: bytes) -> tuple[bytes, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head, body


async def test_all_pages_are_shown_as_one(served: MetricsPort) -> None:
    head, body = await ask(served, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4" in head
    assert b"Content-Length: 8" in head
    assert body == b"a 1\nb 2\n"


async def test_parameters_of_the_url_change_nothing(served: MetricsPort) -> None:
    _, body = await ask(served, b"GET /metrics?name=a HTTP/1.1\r\n\r\n")
    assert body == b"a 1\nb 2\n"


async def test_head_has_no_body(served: MetricsPort) -> None:
    head, body = await ask(served, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 8" in head
    assert body == b""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"404"),
    ],
)
async def test_there_is_nothing_else(served: MetricsPort, request_: bytes, status: bytes) -> None:
    head, _ = await ask(served, request_)
    assert head.split(b" ")[1] == status


async def test_probes_are_answered_without_metrics(served: MetricsPort) -> None:
    async def broken() -> bytes:
        raise AssertionError("asked for metrics")

    served.pages.append(broken)
    head, body = await ask(served, b"GET /health HTTP/1.1\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == b"ok\n"
    # A router is ready at its own port.
    assert b" 404 " in (await ask(served, b"GET /ready HTTP/1.1\r\n\r\n"))[0]
    serving = True
    served.serving = lambda: serving
    assert b" 200 " in (await ask(served, b"GET /ready HTTP/1.1\r\n\r\n"))[0]
    serving = False
    assert b" 503 " in (await ask(served, b"HEAD /ready HTTP/1.1\r\n\r\n"))[0]
    assert b" 200 " in (await ask(served, b"GET /health HTTP/1.1\r\n\r\n"))[0]


async def test_a_head_that_does_not_end_is_not_read_for_ever(served: MetricsPort) -> None:
    head, body = await ask(served, b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 5000)
    assert (head, body) == (b"", b"")


async def test_who_waits_for_long_keeps_no_probe_from_being_heard(served: MetricsPort) -> None:
    waiting = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(16)]
    head, _ = await ask(served, b"GET /health HTTP/1.1\r\n\r\n")
    assert b" 200 " in head
    # It cost the one that had waited longest.
    assert await waiting[0][0].read() == b""
    assert not waiting[1][0].at_eof()
    for _, writer in waiting:
        writer.close()


async def test_a_port_that_is_taken_is_said_to_be(served: MetricsPort) -> None:
    async with MetricsPort([page]) as second:
        with pytest.raises(MetricsPortError, match="is taken") as caught:
            await second.start("127.0.0.1", served.port)
    assert caught.value.taken


async def test_an_address_of_another_host_is_none_to_listen_on() -> None:
    async with MetricsPort([page]) as served:
        with pytest.raises(MetricsPortError) as caught:
            await served.start("192.0.2.1", 0)
    assert not caught.value.taken


# By https


def options(**given: Any) -> Config:
    return Config(**given)


async def scrape(port: int, context: ssl.SSLContext | None, path: str = "/metrics") -> int:
    """Return the status of a scrape; 0 if none came."""
    url = f"http{'s' if context else ''}://127.0.0.1:{port}{path}"
    try:
        async with aiohttp.ClientSession() as http, http.get(url, ssl=context or True) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, ConnectionError, ssl.SSLError):
        return 0


def scraper(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if pair is not None:
        context.load_cert_chain(pair.cert, pair.key)
    return context


async def test_scrapers_need_a_certificate_where_it_is_asked_for(tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    own, prometheus, other = await asyncio.to_thread(
        lambda: (authority.server(), authority.client("prometheus"), Authority(tmp_path, "b").client("b"))
    )
    bare, known, stranger = await asyncio.to_thread(
        lambda: [scraper(authority, pair) for pair in (None, prometheus, other)]
    )
    config = options(
        metrics_tls_cert=own.cert,
        metrics_tls_key=own.key,
        metrics_client_ca=authority.ca,
        metrics_host="0.0.0.0",
    )
    with capture_logs() as logs:
        async with metrics_tls(config) as tls, MetricsPort([page]) as served:
            await served.start("127.0.0.1", 0, tls, certificates=True)
            assert await scrape(served.port, known) == 200
            assert await scrape(served.port, bare) == 403
            assert await scrape(served.port, bare, "/health") == 200  # a kubelet has none
            assert await scrape(served.port, stranger) == 0
            assert await scrape(served.port, None) == 0
    assert not [entry for entry in logs if entry["event"] == "listening_beyond_loopback"]


async def test_the_certificate_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.router.reloading.LOOK_EVERY_S", 0.01)
    before, after = await asyncio.to_thread(lambda: [Authority(tmp_path, name) for name in ("1", "2")])
    own = await asyncio.to_thread(before.server)
    old, new = await asyncio.to_thread(lambda: (scraper(before), scraper(after)))
    async with (
        metrics_tls(options(metrics_tls_cert=own.cert, metrics_tls_key=own.key)) as tls,
        MetricsPort([page]) as served,
    ):
        await served.start("127.0.0.1", 0, tls)
        assert (await scrape(served.port, old), await scrape(served.port, new)) == (200, 0)
        await asyncio.to_thread(after.server)
        tries = [await scrape(served.port, new) for _ in range(100)]
        assert tries[-1] == 200
        assert await scrape(served.port, old) == 0


async def test_a_revoked_certificate_opens_nothing(tmp_path: Path) -> None:
    authority = await asyncio.to_thread(Authority, tmp_path)
    own, lost, good = await asyncio.to_thread(
        lambda: (authority.server(), authority.client("lost"), authority.client("good"))
    )
    contexts = await asyncio.to_thread(lambda: [scraper(authority, pair) for pair in (lost, good)])
    tls = Tls("metrics", ServerFiles(own.cert, own.key, authority.ca, "--metrics-"))
    async with MetricsPort([page]) as served:
        await served.start("127.0.0.1", 0, await tls.start())

        async def statuses() -> list[int]:
            for _ in range(2):
                await tls.files.look()
            return [await scrape(served.port, context) for context in contexts]

        assert await statuses() == [200, 200]
        await asyncio.to_thread(authority.revoke, lost)
        assert await statuses() == [0, 200]
        await asyncio.to_thread(authority.revoke, over=True)
        assert await statuses() == [0, 0]  # what a list said that is over, nobody knows now
        mark = b"-----BEGIN X509 CRL-----\n"
        await asyncio.to_thread(
            lambda: replace(authority.ca, Path(authority.ca).read_bytes().replace(mark, mark + b"AAAA"))
        )
        with capture_logs() as logs:
            assert await statuses() == [0, 0]
        assert "revocation list cannot be read" in logs[0]["problem"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"metrics_tls_cert": "c"}, "--metrics-tls-cert, --metrics-tls-key: one needs the other"),
        ({"metrics_tls_key": "k"}, "--metrics-tls-cert, --metrics-tls-key: one needs the other"),
        ({"metrics_client_ca": "a"}, "--metrics-client-ca a: needs --metrics-tls-cert"),
        ({"metrics_host": "10.0.0.1"}, "give --metrics-tls-cert, -key and --metrics-client-ca, or add"),
        (
            {"metrics_host": "10.0.0.1", "metrics_tls_cert": "c", "metrics_tls_key": "k"},
            "give --metrics-client-ca, or add --allow-remote",
        ),
        (
            {"metrics_tls_cert": "/absent", "metrics_tls_key": "/absent"},
            "--metrics-tls-key /absent: no such file",
        ),
    ],
)
async def test_what_does_not_guard_the_port_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(StartError, match=said):
        async with metrics_tls(options(**given)):
            pass


@pytest.mark.parametrize(("tls", "encrypted"), [({}, False), ({"metrics_tls_cert": "c"}, True)])
def test_listening_for_everyone_is_warned_of(tls: dict[str, str], encrypted: bool) -> None:
    config = options(metrics_host="0.0.0.0", allow_remote=True, **tls)
    with capture_logs() as logs:
        check_metrics_reach(config)
    assert [(entry["encryption"], entry["authentication"]) for entry in logs] == [(encrypted, False)]
