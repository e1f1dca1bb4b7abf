"""What operators write: files, environment, flags, URLs, a connector's settings; what Kubernetes answers."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from kvplane.cli.config import Config, ConfigError, load_config
from kvplane.cli.tenant_limits import LimitsFile
from kvplane.connector.config import ConfigError as ConnectorConfigError
from kvplane.connector.config import read_config
from kvplane.controlplane.access import AccessFileError, load_access
from kvplane.router.identity import checked_sources
from kvplane.router.kubernetes import KubernetesError, KubernetesSource, pod_url
from kvplane.router.settings import KubernetesSettings, RouterSettings, SettingsError, engine_url
from kvplane.store.errors import StoreUrlError
from kvplane.store.url import open_store
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.network import Said, connected
from tests.fuzz.virtual import LoopClock
from tests.fuzz.world import odd_json, spoiled_json

_OPTIONS = tuple(Config.model_fields)
_TOML = b"""
store = "memory://"
port = 8000
prefill = ["http://10.0.0.1:8100"]
decode = ["http://10.0.0.2:8200", "http://[fd00::2]:8200"]
location_ttl = 480.0
min_remaining = 10
allow_remote = true
identity = ["conversation_id", "header:X-Conversation-ID", "automatic"]
path = "auto"
"""
_ACCESS = b"""
[[identity]]
name = "router"
role = "router"
token_sha256 = ["0123456789012345678901234567890123456789012345678901234567890123"]
tenants = ["t*"]
[[identity]]
name = "engine"
role = "engine"
certificates = ["spiffe://example/engine"]
engine_ids = ["d*"]
addresses = ["10.0.0.0/24", "peer", "*.example"]
"""
_LIMITS = b"""
[default]
conversations = 100
blocks = "unlimited"
[tenants.t1]
operations_per_second = 2.5
[tenants."a b"]
blocks = 7
"""
_URLS = (
    "memory://", "memory://?max_records=10", "etcd://h:2379/prefix", "etcd3://u@h1:2379,h2:2379/p?tls=1",
    "etcd://[::1]:2379?timeout=2&ca=/nowhere", "http://10.0.0.1:8100", "https://[fd00::1]:1", "dns:///n:1",
    "10.0.0.1:50051,10.0.0.2:50051", "localhost:50051", "unix:/run/x", "http://a_b.c:80/",
)  # fmt: skip
_EXTRA: dict[str, Any] = {
    "kvplane_address": "10.0.0.9:50051",
    "kvplane_endpoint": "http://10.0.0.2:8200",
    "kvplane_chunk_tokens": 64,
    "kvplane_ttl_s": "adaptive",
    "kvplane_max_ttl_s": 480,
    "kvplane_retain_fraction": 0.5,
    "kvplane_metrics_port": 9100,
    "kvplane_metrics_tls_cert": "/nowhere",
    "kvplane_metrics_tls_key": "/nowhere",
    "kvplane_tenant_id": "t",
    "decoder_kv_blocks_ttl": 480,
}
POD: dict[str, Any] = {
    "metadata": {"uid": "u1", "name": "p", "resourceVersion": "7"},
    "spec": {"containers": [{"ports": [{"name": "http", "containerPort": 8000}]}]},
    "status": {"phase": "Running", "podIP": "10.0.0.5", "conditions": [{"type": "Ready", "status": "True"}]},
}


class Configs(Target):
    """Each as a command would read it: it is taken, or refused by a line that says what is wrong."""

    name = "config"
    share = 0.5

    async def start(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-fuzz-"))
        self._file = Path(folder, "file")

    async def stop(self) -> None:
        self._stack.close()

    async def once(self, chance: Chance) -> str:
        kind = chance.below(20)
        read: Callable[[Chance], object]
        if kind == 0:
            read = self._config
        elif kind < 4:
            read = self._access
        elif kind < 6:
            read = self._limits
        elif kind < 10:
            read = self._connector
        elif kind < 13:
            read = self._router
        else:
            read = self._url
        try:
            read(chance)
        except (ConfigError, ConnectorConfigError, AccessFileError, SettingsError, StoreUrlError) as error:
            if "\n" in str(error) or not str(error):
                raise Wrong(f"{type(error).__name__} is no line") from error
            return "refused"
        return "taken"

    def _written(self, raw: bytes, chance: Chance) -> Path:
        if chance.odds(0.7):
            raw = chance.spoiled(raw)
        if chance.odds(0.05):
            raw += chance.pick((b"x = " + b"[" * 3000, b"x = " + b"{a=" * 2000, b"\xff", b"a" * 200_000))
        self.input = raw
        self._file.write_bytes(raw)
        return self._file

    def _config(self, chance: Chance) -> object:
        flags = {chance.pick(_OPTIONS): _option(chance) for _ in range(chance.below(3))}
        more = {}
        for _ in range(chance.below(3)):
            name = chance.pick(_OPTIONS).upper() if chance.odds(0.8) else chance.text()[:50].replace("=", "")
            more[f"KVPLANE_{name}".replace("\0", "")] = str(_option(chance)).replace("\0", "")
        file = self._written(_TOML, chance) if chance.odds(0.6) else None
        self.input = (flags, more, self.input)
        with mock.patch.dict(os.environ, {k: v for k, v in more.items() if _encodes(k + v)}):
            return load_config(flags, file, os.environ)

    def _access(self, chance: Chance) -> object:
        access = load_access(str(self._written(_ACCESS, chance)))
        return access.find([chance.text()], chance.text())

    def _limits(self, chance: Chance) -> object:
        return LimitsFile(str(self._written(_LIMITS, chance)))

    def _connector(self, chance: Chance) -> object:
        extra = spoiled_json(_EXTRA, chance, tuple(_EXTRA))
        self.input = extra
        return read_config(extra if isinstance(extra, dict) else None, {"KVPLANE_ADDRESS": chance.text()})

    def _router(self, chance: Chance) -> object:
        given: dict[str, Any] = {"decode_urls": ("http://10.0.0.2:8200",)}
        for _ in range(chance.pick((1, 2))):
            name = chance.pick(
                ("prefill_urls", "decode_urls", "plane_address", "tenant_id", "port", "sources")
            )
            url = _url(chance)
            given[name] = {
                "prefill_urls": (url, "http://h:1"),
                "decode_urls": (url,),
                "plane_address": url,
                "tenant_id": chance.text(),
                "port": chance.pick((0, 1, 65535, 65536, -1)),
            }.get(name)
        sources = given.pop("sources", None)
        self.input = given
        if sources is not None:
            given["identity_sources"] = checked_sources([chance.text()])
        return RouterSettings(**given)

    def _url(self, chance: Chance) -> object:
        self.input = url = _url(chance)
        if chance.odds(0.5):
            return engine_url(url)
        return open_store(url, LoopClock())


def _encodes(text: str) -> bool:
    return "\0" not in text and "=" not in text.partition("KVPLANE_")[0]


def _url(chance: Chance) -> str:
    url = chance.pick(_URLS)
    if chance.odds(0.6):
        url = chance.spoiled(url.encode()).decode("utf-8", "replace")
    return url + chance.text()[:300] if chance.odds(0.3) else url


def _option(chance: Chance) -> Any:
    return chance.pick(
        (chance.text()[:2000], 0, 1, -1, 1e400, 3.5, True, "true", "memory://", "cold", _url(chance))
    )


class Kubernetes(Target):
    """Answers of an API server to a router that looks for its engines."""

    name = "kubernetes"
    share = 0.5
    life = 500

    async def start(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-fuzz-"))
        self._token = Path(folder, "token")
        self._token.write_text("token")
        self._stack.enter_context(connected(self._answered))
        self._said: list[Said] = []

    async def stop(self) -> None:
        self._stack.close()

    def _answered(self, host: str, head: bytes, body: bytes) -> Said | None:
        return Said([]) if head == b"CONNECT" else self._said.pop(0) if self._said else Said([], closes=True)

    async def once(self, chance: Chance) -> str:
        pods = [spoiled_json(POD, chance, ("deletionTimestamp",)) for _ in range(chance.pick((0, 1, 2)))]
        for pod in pods:
            if isinstance(pod, dict):
                self.input = pod
                with suppress(AttributeError, TypeError, KeyError, ValueError):  # see KubernetesSource.poll
                    pod_url(pod, chance.pick(("8000", "http", "x", "0")))
        listed: Any = {"metadata": {"resourceVersion": "7"}, "items": pods}
        if chance.odds(0.3 + chance.wild):
            listed = spoiled_json(listed, chance, ("continue",))
        raw = json.dumps(listed).encode("utf-8", "surrogatepass")
        kinds = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR", "X")
        changes: list[Any] = [{"type": chance.pick(kinds), "object": pod} for pod in pods]
        if chance.odds(chance.wild):
            changes.append(odd_json(chance))
        watched = b"".join(json.dumps(change).encode("utf-8", "surrogatepass") + b"\n" for change in changes)
        if chance.odds(chance.wild):
            raw, watched = chance.spoiled(raw), chance.spoiled(watched)
        self._said = [_answer(raw, chance), _answer(watched, chance)]
        self.input = (raw, watched, self._said[:])
        found = list[object]()
        settings = KubernetesSettings(
            api_url="http://10.0.0.1:80",
            decode_selector="app=vllm",
            namespace="n",
            port=chance.pick(("8000", "http")),
            token_file=str(self._token),
        )
        source = KubernetesSource(settings, on_found=lambda name, engines: found.append(dict(engines)))
        await source.poll()
        try:
            async for _ in _steps(source):
                pass
        except KubernetesError:
            pass
        finally:
            await source.aclose()
        if not found:
            raise Wrong("nothing was told")
        return f"{len(found)} told"


async def _steps(source: KubernetesSource) -> Any:
    """Follow the pods until what was prepared is over."""
    task = asyncio.ensure_future(source.run())
    await asyncio.sleep(20)
    if task.done():
        raise Wrong(f"the watch ended: {task.exception()!r}")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    yield None


def _answer(body: bytes, chance: Chance) -> Said:
    status = 200 if chance.odds(0.9) else chance.pick((401, 403, 404, 410, 500, 204))
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    pieces = chance.pieces(head.encode() + body)[:100]
    return Said([(0, piece) for piece in pieces], closes=chance.odds(0.2))
