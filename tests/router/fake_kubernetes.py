"""A Kubernetes API server as far as listing and watching pods goes."""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any, Self

from aiohttp import web

from tests.router.rig import Body


def pod(name: str, ip: str, labels: dict[str, str], **more: Any) -> Body:
    """Return a pod that is ready, unless `more` says otherwise: ready, deleting, phase, ports."""
    ready = "True" if more.get("ready", True) else "False"
    metadata: Body = {"name": name, "uid": f"uid-{name}", "labels": labels}
    if more.get("deleting"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "metadata": metadata,
        "spec": {"containers": [{"name": "engine", "ports": more.get("ports", [])}]},
        "status": {
            "phase": more.get("phase", "Running"),
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


class FakeApi:
    """`async with` starts it; `url` is where it answers. `put` and `delete` change pods and tell watches."""

    def __init__(self, token: str = "secret", page: int = 0) -> None:
        self.token = token
        self.page = page
        self.status = 0
        """Answered to everything, if not 0."""
        self.page_of: bytes | None = None
        """Answered to lists with 200, if not None."""
        self.expired = False
        """Watches are told that their version is too old."""
        self.refused = 0
        self.lists = 0
        self.watches = 0
        self.version = 100
        self.pods: dict[str, Body] = {}
        self.log: list[tuple[int, Body]] = []
        """All events, with the version each one made."""
        self.port = 0
        self._watchers: list[tuple[dict[str, str], asyncio.Queue[Body | None]]] = []
        self._runner: web.AppRunner | None = None
        self._scheme = "http"

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._get)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls)
        await site.start()
        self._scheme = "https" if tls else "http"
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def put(self, new: Body) -> None:
        name = new["metadata"]["name"]
        kind = "MODIFIED" if name in self.pods else "ADDED"
        self.pods[name] = new
        self._tell(kind, new)

    def delete(self, name: str) -> None:
        self._tell("DELETED", self.pods.pop(name))

    def end_watches(self) -> None:
        for _, queue in self._watchers:
            queue.put_nowait(None)

    def say(self, event: Body) -> None:
        for _, queue in self._watchers:
            queue.put_nowait(event)

    def _tell(self, kind: str, changed: Body) -> None:
        self.version += 1
        changed["metadata"]["resourceVersion"] = str(self.version)
        event = {"type": kind, "object": changed}
        self.log.append((self.version, event))
        for selector, queue in self._watchers:
            if _matches(changed, selector):
                queue.put_nowait(event)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.status:
            self.refused += 1
            return web.json_response({"kind": "Status"}, status=self.status)
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status"}, status=401)
        if request.match_info["namespace"] != "ns":
            return web.json_response({"kind": "Status"}, status=403)
        selector = dict(part.split("=") for part in request.query["labelSelector"].split(","))
        if request.query.get("watch") == "1":
            return await self._watch(request, selector)
        self.lists += 1
        if self.page_of is not None:
            return web.Response(body=self.page_of, content_type="application/json")
        items = [pod for pod in self.pods.values() if _matches(pod, selector)]
        metadata = {"resourceVersion": str(self.version)}
        if self.page:
            start = int(request.query.get("continue", "0"))
            if start + self.page < len(items):
                metadata["continue"] = str(start + self.page)
            items = items[start : start + self.page]
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, selector: dict[str, str]) -> web.StreamResponse:
        self.watches += 1
        out = web.StreamResponse(headers={"Content-Type": "application/json"})
        await out.prepare(request)
        if self.expired:
            self.expired = False
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await out.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return out
        entry = (selector, asyncio.Queue[Body | None]())
        since = int(request.query["resourceVersion"])
        for version, event in self.log:
            if version > since and _matches(event["object"], selector):
                entry[1].put_nowait(event)
        self._watchers.append(entry)
        try:
            while (said := await entry[1].get()) is not None:
                data = json.dumps(said).encode() + b"\n"
                # Events come in pieces, too.
                await out.write(data[:20])
                await out.write(data[20:])
        finally:
            self._watchers.remove(entry)
        return out


def _matches(candidate: Body, selector: dict[str, str]) -> bool:
    labels = candidate["metadata"]["labels"]
    return all(labels.get(name) == value for name, value in selector.items())
