"""What a router's hops need to be protected by, and TLS in front of several processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from structlog.testing import capture_logs

from kvplane.cli.config import load_config
from kvplane.cli.front import check_hops
from kvplane.router.settings import SettingsError
from tests.cli.test_workers import CHAT, decode_engine, fleet
from tests.router.test_tls import trusting, write

NEAR = {"decode": ["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "0.0.0.0", "tls_cert": "c", "tls_key": "k", "client_ca": "a"},
        {"host": "0.0.0.0", "tls_cert": "c", "tls_key": "k", "tenants": "t"},
        {"decode": ["https://10.0.0.2:8200"]},
        {"host": "0.0.0.0", "decode": ["http://10.0.0.2:8200"], "allow_remote": True},
    ],
)
def test_hops_that_are_protected_or_asked_for(options: dict[str, Any]) -> None:
    with capture_logs() as logs:
        check_hops(load_config(NEAR | options))
    assert bool(logs) is ("allow_remote" in options)
    assert all(entry["log_level"] == "warning" for entry in logs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0: beyond loopback without encryption .* and authentication"),
        (
            {"host": "10.0.0.1", "tls_cert": "c", "tls_key": "k"},
            r"--host 10.0.0.1: beyond loopback without authentication \(--tenants, --client-ca\)",
        ),
        ({"decode": ["http://10.0.0.2:8200"]}, "--decode http://10.0.0.2:8200: .* without https"),
        ({"prefill": ["http://p:8100"]}, "--prefill http://p:8100: .* --allow-remote"),
        ({"prefill_dns": ["http://p:8100"]}, "--prefill-dns http://p:8100"),
        ({"kubernetes_decode": "app=d"}, "--kubernetes-decode app=d"),
        ({"tls_cert": "c", "host": "0.0.0.0"}, "--tls-cert, --tls-key: one needs the other"),
        ({"client_ca": "a", "host": "0.0.0.0"}, "--client-ca a: needs --tls-cert"),
    ],
)
def test_hops_that_nothing_protects_are_refused_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        check_hops(load_config(NEAR | options))
    assert "\n" not in str(caught.value)


async def test_several_processes_serve_https(tmp_path: Path) -> None:
    ca = trustme.CA()
    cert, key = await asyncio.to_thread(write, tmp_path, "r", ca)
    context = await asyncio.to_thread(trusting, ca)
    flags = "--tls-cert", cert, "--tls-key", key
    async with decode_engine() as engine, fleet("--decode", engine.url, *flags) as router:
        for _ in range(8):
            async with (
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as http,
                http.post(f"https://127.0.0.1:{router.port}/v1/chat/completions", json=CHAT) as response,
            ):
                assert response.status == 200
                await response.read()
    assert router.process.returncode == 0
