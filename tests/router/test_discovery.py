"""Engines by DNS name and by Kubernetes label come, go, and outlive the failure of whoever names them."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from structlog.testing import capture_logs

from kvplane.cli import run
from kvplane.cli.config import kubernetes_api, load_config
from kvplane.client.model import EngineRole
from kvplane.router import discovery
from kvplane.router.discovery import DnsSource, Found, Roles
from kvplane.router.kubernetes import KubernetesSource, pod_url
from kvplane.router.settings import KubernetesSettings, RouterSettings, SettingsError
from tests.fakes.core import EngineConfig
from tests.router.fake_kubernetes import FakeApi, pod
from tests.router.rig import rig, until

PREFILL, DECODE = Roles(True, False), Roles(False, True)
P, D = {"app": "vllm", "role": "prefill"}, {"app": "vllm", "role": "decode"}


# DNS


class Names:
    """A resolver whose answers a test changes; an exception is raised."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.found: dict[str, Roles] = {}

    async def __call__(self, host: str, port: int) -> list[str]:
        answer = self.answers[host]
        if isinstance(answer, Exception):
            raise answer
        return list(answer)

    def source(self, *, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> DnsSource:
        def found(source: str, engines: Found) -> None:
            assert source == "dns"
            self.found = dict(engines)

        return DnsSource(prefill, decode, interval_s=0.01, on_found=found, resolve=self)


async def test_each_address_of_a_name_is_an_engine() -> None:
    names = Names(p=["10.0.0.1"], d=["10.0.0.2", "fd00::7"])
    source = names.source(prefill=("http://p:8000",), decode=("http://d:8200",))
    await source.poll()
    assert names.found == {
        "http://10.0.0.1:8000": PREFILL,
        "http://10.0.0.2:8200": DECODE,
        "http://[fd00::7]:8200": DECODE,
    }


async def test_an_address_of_both_names_does_both() -> None:
    names = Names(p=["10.0.0.1"], d=["10.0.0.1"])
    await names.source(prefill=("http://p:80",), decode=("http://d:80",)).poll()
    assert names.found == {"http://10.0.0.1": Roles(True, True)}


@pytest.mark.parametrize(
    "failure", [socket.gaierror("no such name"), TimeoutError(), [], UnicodeError(), ["fe80::1%eth0"]]
)
async def test_a_name_that_cannot_be_resolved_keeps_its_engines(failure: Any) -> None:
    names = Names(d=["10.0.0.2"], p=["10.0.0.1"])
    source = names.source(prefill=("http://p:80",), decode=("http://d:80",))
    await source.poll()
    names.answers["d"] = failure
    names.answers["p"] = ["10.0.0.9"]
    await source.poll()
    assert set(names.found) == {"http://10.0.0.2", "http://10.0.0.9"}
    names.answers["d"] = ["10.0.0.3"]
    await source.poll()
    assert set(names.found) == {"http://10.0.0.3", "http://10.0.0.9"}


async def test_an_address_of_one_link_is_passed_over() -> None:
    names = Names(d=["10.0.0.2", "fe80::1%eth0"])
    await names.source(decode=("http://d:8200",)).poll()
    assert set(names.found) == {"http://10.0.0.2:8200"}


async def test_the_system_resolves_names() -> None:
    assert await discovery.system_resolve("127.0.0.1", 80) == {"127.0.0.1"}


async def test_a_router_follows_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(engines=["127.0.0.1"])
    decode = [EngineConfig(EngineRole.DECODE), EngineConfig(EngineRole.DECODE, host="127.0.0.2")]
    monkeypatch.setattr(DnsSource.__init__, "__kwdefaults__", {"resolve": names})
    async with rig(decode=decode, static=False) as plain:
        # Both on one port, as pods behind a name are.
        first, second = plain.decode
        await second.stop()
        await second.start(first.port)
        async with rig(
            decode=0,
            decode_dns=(f"http://engines:{first.port}",),
            dns_interval_s=0.02,
            decode_urls=(),
            with_plane=False,
        ) as r:

            def urls() -> set[str]:
                return {e.url for e in r.router.pool.engines if e.decode}

            assert urls() == {first.url}
            await r.say("hello")
            names.answers["engines"] = ["127.0.0.2"]
            await until(lambda: urls() == {second.url})
            await r.say("again")
            assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_a_source_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(engines=["127.0.0.1"])
    monkeypatch.setattr(DnsSource.__init__, "__kwdefaults__", {"resolve": names})
    async with rig(static=False) as plain:
        dns = (f"http://engines:{plain.d.port}",)
        with capture_logs() as logs:
            async with rig(
                decode=0, decode_dns=dns, dns_interval_s=0.02, with_plane=False, static=False
            ) as r:
                names.answers["engines"] = RuntimeError("a fault of ours")
                await until(lambda: any(entry["log_level"] == "error" for entry in logs))
                async with r.http.get(r.url + "/health") as response:
                    told = await response.json()
                assert told["status"] == "degraded"
                assert told["problems"][0].startswith("DnsSource ended (RuntimeError: a fault of ours)")
                async with r.http.get(r.url + "/ready") as response:
                    assert told["problems"][0] in (await response.json())["problems"]
                await r.say("hello")
    # Those that the router itself ends are no news.
    assert [entry["problem"] for entry in logs if entry["log_level"] == "error"] == told["problems"][:1]


# Kubernetes


@asynccontextmanager
async def source(
    api: FakeApi, tmp_path: Path, **more: Any
) -> AsyncIterator[tuple[KubernetesSource, dict[str, Roles]]]:
    """Run a source against an API server; `found` is kept current."""
    engines: dict[str, Roles] = {}

    def found(name: str, now: Found) -> None:
        assert name == "kubernetes"
        engines.clear()
        engines.update(now)

    await asyncio.to_thread((tmp_path / "token").write_text, f"{api.token}\n")
    await asyncio.to_thread((tmp_path / "namespace").write_text, "ns\n")
    settings = KubernetesSettings(
        **{
            "api_url": api.url,
            "prefill_selector": "app=vllm,role=prefill",
            "decode_selector": "app=vllm,role=decode",
            "token_file": str(tmp_path / "token"),
            "namespace_file": str(tmp_path / "namespace"),
            **more,
        }
    )
    kubernetes = KubernetesSource(settings, on_found=found, backoff_s=0.01)
    await kubernetes.poll()
    task = asyncio.create_task(kubernetes.run())
    try:
        yield kubernetes, engines
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await kubernetes.aclose()


async def test_pods_are_found_by_their_labels(tmp_path: Path) -> None:
    async with FakeApi() as api:
        api.put(pod("p0", "10.0.0.1", P))
        api.put(pod("d0", "10.0.0.2", D))
        api.put(pod("other", "10.0.0.3", {"app": "web"}))
        api.put(pod("starting", "10.0.0.4", D, ready=False))
        api.put(pod("six", "fd00::7", D))
        async with source(api, tmp_path) as (_, found):
            assert found == {
                "http://10.0.0.1:8000": PREFILL,
                "http://10.0.0.2:8000": DECODE,
                "http://[fd00::7]:8000": DECODE,
            }


async def test_the_watch_tells_who_comes_and_goes(tmp_path: Path) -> None:
    async with FakeApi() as api:
        api.put(pod("d0", "10.0.0.1", D))
        async with source(api, tmp_path) as (_, found):
            await until(lambda: api.watches == 2)
            api.put(pod("d1", "10.0.0.2", D, ready=False))
            api.put(pod("d1", "10.0.0.2", D))
            await until(lambda: set(found) == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"})
            api.put(pod("d0", "10.0.0.1", D, deleting=True))
            await until(lambda: set(found) == {"http://10.0.0.2:8000"})
            api.delete("d1")
            await until(lambda: not found)
            assert api.lists == 2


async def test_a_watch_that_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    async with FakeApi() as api, source(api, tmp_path) as (_, found):
        await until(lambda: api.watches == 2)
        api.put(pod("d0", "10.0.0.1", D))
        await until(lambda: found)
        api.end_watches()
        api.put(pod("d1", "10.0.0.2", D))
        await until(lambda: len(found) == 2)
        assert api.lists == 2  # one each, at the beginning


async def test_a_version_that_is_too_old_is_listed_again(tmp_path: Path) -> None:
    async with FakeApi() as api:
        api.expired = True
        async with source(api, tmp_path) as (_, found):
            await until(lambda: api.lists == 3)
            api.put(pod("d0", "10.0.0.1", D))
            await until(lambda: found)


@pytest.mark.parametrize("status", [401, 403, 410, 500])
async def test_an_api_server_that_does_not_answer_takes_no_engine_away(tmp_path: Path, status: int) -> None:
    async with FakeApi() as api:
        api.put(pod("d0", "10.0.0.1", D))
        async with source(api, tmp_path) as (kubernetes, found):
            await until(lambda: api.watches == 2)
            api.status = status
            api.end_watches()
            refused = api.refused
            await until(lambda: api.refused >= refused + 2)
            await kubernetes.poll()
            assert set(found) == {"http://10.0.0.1:8000"}
            # Pods that come and go meanwhile are seen when it is back.
            api.delete("d0")
            api.put(pod("d1", "10.0.0.2", D))
            api.status = 0
            await until(lambda: set(found) == {"http://10.0.0.2:8000"})


async def test_an_api_server_that_restarts_is_found_again(tmp_path: Path) -> None:
    async with FakeApi() as api:
        api.put(pod("d0", "10.0.0.1", D))
        async with source(api, tmp_path) as (_, found):
            await until(lambda: api.watches == 2)
            await api.stop()
            api.put(pod("d1", "10.0.0.2", D))
            assert len(found) == 1
            await api.start()
            await until(lambda: len(found) == 2)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ERROR", "object": {"code": 500, "message": "broken"}},
        {"type": "ADDED"},
        {"type": "ADDED", "object": 3},
        [],
    ],
)
async def test_events_that_make_no_sense_are_survived(tmp_path: Path, event: Any) -> None:
    async with FakeApi() as api, source(api, tmp_path) as (_, found):
        await until(lambda: api.watches == 2)
        api.say(event)
        await until(lambda: api.lists >= 4)
        api.put(pod("d0", "10.0.0.1", D))
        await until(lambda: found)


ODD_LISTS = [
    b"<html>Bad gateway</html>",
    b"\xff",
    b"[" * 100_000,
    b'{"items": [], "metadata": [1]}',
    b'{"items": [{"metadata": 3}]}',
    b'{"items": [{"status": {"phase": "Running", "conditions": [3]}}]}',
]


@pytest.mark.parametrize("answer", ODD_LISTS, ids=range(len(ODD_LISTS)))
async def test_a_list_that_makes_no_sense_takes_no_engine_away(tmp_path: Path, answer: bytes) -> None:
    async with FakeApi() as api:
        api.put(pod("d0", "10.0.0.1", D))
        async with source(api, tmp_path) as (kubernetes, found):
            await until(lambda: api.watches == 2)
            api.page_of = answer
            api.say({"type": "ERROR", "object": {"code": 410}})
            lists = api.lists
            await until(lambda: api.lists >= lists + 4)
            await kubernetes.poll()
            assert set(found) == {"http://10.0.0.1:8000"}
            api.page_of = None
            api.put(pod("d1", "10.0.0.2", D))
            await until(lambda: len(found) == 2)


async def test_a_token_that_cannot_be_read_is_read_again(tmp_path: Path) -> None:
    async with FakeApi() as api, source(api, tmp_path) as (kubernetes, found):
        await until(lambda: api.watches == 2)
        await asyncio.to_thread((tmp_path / "token").write_bytes, b"\xff")
        await kubernetes.poll()
        api.end_watches()
        await until(lambda: kubernetes._warned.startswith("UnicodeDecodeError"))
        await asyncio.to_thread((tmp_path / "token").write_text, api.token)
        api.put(pod("d0", "10.0.0.1", D))
        await until(lambda: found)


async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    async with FakeApi(page=2) as api:
        for index in range(5):
            api.put(pod(f"d{index}", f"10.0.0.{index}", D))
        async with source(api, tmp_path) as (_, found):
            assert len(found) == 5


async def test_a_renewed_token_is_used(tmp_path: Path) -> None:
    async with FakeApi() as api, source(api, tmp_path) as (_, found):
        await until(lambda: api.watches == 2)
        api.token = "renewed"
        api.end_watches()
        await asyncio.to_thread((tmp_path / "token").write_text, "renewed")
        api.put(pod("d0", "10.0.0.1", D))
        await until(lambda: found)


def certificates(folder: Path) -> ssl.SSLContext:
    """Write an authority's certificate and a stranger's; returns the context of a server of the first."""
    authority, stranger = trustme.CA(), trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    stranger.cert_pem.write_to_path(str(folder / "stranger.crt"))
    return tls


async def test_the_api_servers_certificate_is_checked(tmp_path: Path) -> None:
    tls = await asyncio.to_thread(certificates, tmp_path)
    api = FakeApi()
    await api.start(tls)
    try:
        api.put(pod("d0", "10.0.0.1", D))
        async with source(api, tmp_path, ca_file=str(tmp_path / "ca.crt")) as (_, found):
            assert found
        stranger = tmp_path / "stranger.crt"
        async with source(api, tmp_path, ca_file=str(stranger)) as (kubernetes, found):
            assert not found
            await asyncio.to_thread(shutil.copy, tmp_path / "ca.crt", stranger)
            for _ in range(3):  # two looks have to find it alike
                await kubernetes.poll()
            assert found
    finally:
        await api.stop()


async def test_a_router_serves_from_pods_and_drops_none_that_runs(tmp_path: Path) -> None:
    async with (
        FakeApi() as api,
        rig(static=False, with_plane=False, decode_urls=("http://127.0.0.1:9",)) as e,
    ):
        await asyncio.to_thread((tmp_path / "token").write_text, api.token)
        api.put(pod("d0", "127.0.0.1", D, ports=[{"name": "http", "containerPort": e.d.port}]))
        settings = KubernetesSettings(
            api_url=api.url,
            decode_selector="role=decode",
            namespace="ns",
            port="http",
            token_file=str(tmp_path / "token"),
        )
        async with rig(static=False, with_plane=False, prefill=0, decode=0, kubernetes=settings) as r:
            assert [engine.url for engine in r.router.pool.engines] == [e.d.url]
            await r.say("hello")
            e.d.gate.clear()
            task = asyncio.create_task(r.say("a long answer", "c2"))
            await until(lambda: len(e.d.requests) == 2)
            api.put(pod("d0", "127.0.0.1", D, deleting=True))
            await until(lambda: not r.router.pool.engines)
            assert (await r.post({"messages": []})).status == 503
            e.d.gate.set()
            assert (await task).status == 200


@pytest.mark.parametrize(
    ("more", "port", "url"),
    [
        ({}, "8000", "http://1.2.3.4:8000"),
        ({}, "80", "http://1.2.3.4"),
        ({"ports": [{"name": "http", "containerPort": 9000}]}, "http", "http://1.2.3.4:9000"),
        ({}, "http", None),
        ({"phase": "Pending"}, "80", None),
        ({"ready": False}, "80", None),
        ({"deleting": True}, "80", None),
        ({"ports": [{"name": "http", "containerPort": "x"}]}, "http", None),
    ],
)
def test_which_pods_are_engines(more: dict[str, Any], port: str, url: str | None) -> None:
    assert pod_url(pod("x", "1.2.3.4", {}, **more), port) == url
    assert pod_url({}, port) is None


# Settings


def test_flags_name_pods_and_outside_of_a_cluster_the_api_server_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert run._kubernetes(load_config({})) is None
    flags = {"kubernetes_decode": "role=decode", "kubernetes_port": "http"}
    with pytest.raises(run.StartError, match="--kubernetes-api"):
        run._kubernetes(load_config(flags))
    found = run._kubernetes(load_config({**flags, "kubernetes_api": "https://api:6443/"}))
    assert found is not None
    assert (found.api_url, found.decode_selector, found.port) == ("https://api:6443", "role=decode", "http")
    assert found.token_file.endswith("/serviceaccount/token")


def test_the_api_server_of_a_pod_is_known() -> None:
    assert kubernetes_api({}) is None
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert kubernetes_api(inside) == "https://10.0.0.1:6443"
    assert kubernetes_api({"KUBERNETES_SERVICE_HOST": "fd00::1"}) == "https://[fd00::1]:443"


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"--decode-dns https://engines: .*certificate"):
        RouterSettings(decode_dns=("https://engines",))
    with pytest.raises(SettingsError, match="--kubernetes-port 70000"):
        KubernetesSettings(api_url="http://api", port="70000")
    with pytest.raises(SettingsError, match="--kubernetes-api api: not a URL"):
        KubernetesSettings(api_url="api")
    with pytest.raises(SettingsError, match="--decode is missing"):
        RouterSettings(kubernetes=KubernetesSettings(api_url="http://api", prefill_selector="a=b"))
    RouterSettings(kubernetes=KubernetesSettings(api_url="http://api", decode_selector="a=b"))
