"""Engines that are pods: listed by their labels, then watched."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import structlog

from kvplane.router.connections import Connector, read_answer
from kvplane.router.discovery import Found, OnFound, Roles, merged
from kvplane.router.reloading import Reloaded
from kvplane.router.resources import told
from kvplane.router.settings import KubernetesSettings, SettingsError, engine_url
from kvplane.router.tls import ChangingContext, authorities

log = structlog.get_logger("kvplane.router")

_PAGE = 500
_WATCH_S = 240
"""The API server ends a watch after so many seconds, and the next one goes on from there."""
_LONGEST_EVENT = 4 * 1024 * 1024
_LONGEST_LIST = 64 * 1024 * 1024
_MOST_PAGES = 200
"""More pods than a router can use."""
_ANSWER_TIMEOUT_S = 10.0


class KubernetesError(Exception):
    """The API server refused, or said what cannot be understood: one line."""


class _ExpiredError(KubernetesError):
    """The version to go on from is too old: list again."""


@dataclass(slots=True)
class _Watched:
    """Pods of one selector."""

    selector: str
    roles: Roles
    version: str = ""
    """From which to watch, "" before they were listed."""


class KubernetesSource:
    """Lists and watches pods until cancelled. What it cannot reach keeps the engines it had.

    An engine is a pod that is ready and not on its way out: one that is being deleted gets nothing new, while
    what runs on it goes on. `backoff_s` is the shortest wait after a failure; it doubles up to 30 s.
    """

    def __init__(self, settings: KubernetesSettings, *, on_found: OnFound, backoff_s: float = 1.0) -> None:
        self._settings = settings
        self._on_found = on_found
        self._backoff_s = backoff_s
        self._session: aiohttp.ClientSession | None = None
        self._trusted: Reloaded[ssl.SSLContext] | None = None
        self._opening = asyncio.Lock()
        self._namespace = settings.namespace
        self._watched = [
            _Watched(selector, roles)
            for selector, roles in (
                (settings.prefill_selector, Roles(True, False)),
                (settings.decode_selector, Roles(False, True)),
            )
            if selector
        ]
        self._pods: list[dict[str, str]] = [{} for _ in self._watched]
        """By selector: the URL of each pod by its uid."""
        self._warned = ""

    async def poll(self) -> None:
        """List all pods once, and tell what was found. Never raises."""
        for watched, pods in zip(self._watched, self._pods, strict=True):
            try:
                await self._list(watched, pods)
            except Exception as error:
                # What answers need not be an API server: see _follow.
                self._warn(watched, error)
        self._tell()

    async def run(self) -> None:
        """Watch until cancelled; closes its connections then."""
        try:
            async with asyncio.TaskGroup() as group:
                for watched, pods in zip(self._watched, self._pods, strict=True):
                    group.create_task(self._follow(watched, pods))
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close its connections. Idempotent."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _follow(self, watched: _Watched, pods: dict[str, str]) -> None:
        wait_s = self._backoff_s
        while True:
            try:
                if not watched.version:
                    await self._list(watched, pods)
                    self._tell()
                await self._watch(watched, pods)
                wait_s = self._backoff_s
            except _ExpiredError:
                watched.version = ""
            except Exception as error:
                # Also an answer of any other shape, such as a gateway's page: nobody else would look for
                # engines again.
                self._warn(watched, error)
                # Whatever was missed meanwhile, a list shows.
                watched.version = ""
                wait_s = min(30.0, wait_s * 2)
            # A server that ends each watch at once is not asked without pause.
            await asyncio.sleep(wait_s)

    async def _list(self, watched: _Watched, pods: dict[str, str]) -> None:
        """List the pods of a selector, page by page, and take them in place of what was known."""
        found: dict[str, str] = {}
        query = {"labelSelector": watched.selector, "limit": str(_PAGE)}
        for _ in range(_MOST_PAGES):
            async with asyncio.timeout(_ANSWER_TIMEOUT_S), await self._get(query) as response:
                answer = json.loads(await read_answer(response, _LONGEST_LIST))
            if not isinstance(answer, dict) or not isinstance(answer.get("items"), list):
                raise KubernetesError("the answer is no list of pods")
            for pod in answer["items"]:
                self._take(found, pod)
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                break
            query["continue"] = str(metadata["continue"])
        else:
            raise KubernetesError(f"the selector matches more than {_MOST_PAGES * _PAGE} pods")
        pods.clear()
        pods.update(found)
        watched.version = str(metadata.get("resourceVersion") or "")
        self._warned = ""
        log.info("kubernetes_pods_listed", selector=watched.selector, engines=len(pods))

    async def _watch(self, watched: _Watched, pods: dict[str, str]) -> None:
        """Follow changes until the API server ends the watch. Raises _ExpiredError."""
        query = {
            "labelSelector": watched.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": watched.version,
            "timeoutSeconds": str(_WATCH_S),
        }
        async with await self._get(query) as response:
            async for event in _events(response):
                kind, pod = event.get("type"), event.get("object")
                if not isinstance(pod, dict):
                    raise KubernetesError("an event of the watch is without its object")
                if kind == "ERROR":
                    if pod.get("code") == 410:
                        raise _ExpiredError
                    raise KubernetesError(f"the watch ended: {pod.get('message')}")
                watched.version = str((pod.get("metadata") or {}).get("resourceVersion") or watched.version)
                if kind == "DELETED":
                    pods.pop(_uid(pod), None)
                elif kind in ("ADDED", "MODIFIED"):
                    pods.pop(_uid(pod), None)
                    self._take(pods, pod)
                else:
                    continue
                self._tell()

    async def _get(self, query: Mapping[str, str]) -> aiohttp.ClientResponse:
        settings = self._settings
        session = await self._opened()
        if self._trusted is not None:
            await self._trusted.look()
        # The kubelet renews the token, so it is read each time.
        token = (await asyncio.to_thread(Path(settings.token_file).read_text)).strip()
        response = await session.get(
            f"{settings.api_url}/api/v1/namespaces/{self._namespace}/pods",
            params=query,
            headers={"Authorization": f"Bearer {token}"},
        )
        if response.status == 200:
            return response
        async with response:
            if response.status == 410:
                raise _ExpiredError
            if response.status in (401, 403):
                raise KubernetesError(
                    f"it answered {response.status}: the router's service account needs a role that may get,"
                    f" list and watch pods in namespace {self._namespace}"
                )
            raise KubernetesError(f"it answered {response.status}")

    async def _opened(self) -> aiohttp.ClientSession:
        async with self._opening:
            if self._session is None:
                settings = self._settings
                if not self._namespace:
                    file = Path(settings.namespace_file)
                    self._namespace = (await asyncio.to_thread(file.read_text)).strip()
                verify: ssl.SSLContext | bool = True
                if settings.api_url.startswith("https"):
                    verify = context = ChangingContext(ssl.PROTOCOL_TLS_CLIENT)
                    ca_file = settings.ca_file
                    trusted = Reloaded(
                        "authority of the API server",
                        lambda: authorities(ca_file, "--kubernetes-ca-file"),
                        lambda _: (ca_file,),
                        on_change=context.use,
                    )
                    await trusted.start()
                    self._trusted = trusted
                self._session = aiohttp.ClientSession(
                    connector=Connector(ssl=verify),
                    # A watch is silent between bookmarks, which come about once a minute.
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_WATCH_S + 30.0),
                )
            return self._session

    def _take(self, pods: dict[str, str], pod: Any) -> None:
        url = pod_url(pod, self._settings.port) if isinstance(pod, dict) else None
        if url is not None:
            pods[_uid(pod)] = url

    def _tell(self) -> None:
        found: list[Found] = [
            dict.fromkeys(pods.values(), watched.roles)
            for watched, pods in zip(self._watched, self._pods, strict=True)
        ]
        self._on_found("kubernetes", merged(found))

    def _warn(self, watched: _Watched, error: Exception) -> None:
        problem = told(error)
        if not problem or not isinstance(error, (KubernetesError, aiohttp.ClientError, OSError)):
            problem = f"{type(error).__name__}: {problem}".removesuffix(": ")
        if problem != self._warned:
            self._warned = problem
            log.warning(
                "kubernetes_not_answering",
                api=self._settings.api_url,
                selector=watched.selector,
                problem=problem,
                effect="engines stay as they were",
            )


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Return the events of a watch: JSON objects, one a line. Raises KubernetesError."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _LONGEST_EVENT:
            raise KubernetesError("an event of the watch is too large")
        for line in lines:
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except ValueError:
                raise KubernetesError("an event of the watch is not JSON") from None
            if not isinstance(event, dict):
                raise KubernetesError("an event of the watch is no object")
            yield event


def _uid(pod: Mapping[str, Any]) -> str:
    metadata = pod.get("metadata") or {}
    return str(metadata.get("uid") or metadata.get("name") or "")


def pod_url(pod: Mapping[str, Any], port: str) -> str | None:
    """Return the base URL of an engine that is a pod, None while it is not to be used.

    `port` is a number, or the name of a container's port.
    """
    status, metadata = pod.get("status") or {}, pod.get("metadata") or {}
    if metadata.get("deletionTimestamp") or status.get("phase") != "Running":
        return None
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    address = status.get("podIP")
    number = port if port.isdigit() else _port_named(pod, port)
    if not ready or not address or number is None:
        return None
    host = f"[{address}]" if ":" in address else address
    try:
        return engine_url(f"http://{host}:{number}")
    except SettingsError:
        return None


def _port_named(pod: Mapping[str, Any], name: str) -> str | None:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == name and port.get("containerPort"):
                return str(port["containerPort"])
    return None
