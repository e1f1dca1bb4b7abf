"""The status page `/ui`: read-only, for operators, without anything from elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from aiohttp import web

from kvplane.router import openai, status
from kvplane.router.explain import Explanations
from kvplane.router.metrics import RouterMetrics
from kvplane.router.pool import EnginePool
from kvplane.router.siblings import Siblings

_FOLDER = files("kvplane.router").joinpath("ui")
_FILES: Mapping[str, tuple[bytes, str]] = {
    "/ui": (_FOLDER.joinpath("index.html").read_bytes(), "text/html"),
    "/ui/page.js": (_FOLDER.joinpath("page.js").read_bytes(), "text/javascript"),
    "/ui/style.css": (_FOLDER.joinpath("style.css").read_bytes(), "text/css"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_RECENT = 50
"""Requests shown."""

try:
    _VERSION = version("kvplane")
except PackageNotFoundError:  # run from its sources
    _VERSION = "unknown"


class StatusPage:
    """Serves the page and its data. Who may read explanations may read it.

    `readiness` gives what `/ready` answers.
    """

    def __init__(
        self,
        *,
        pool: EnginePool,
        metrics: RouterMetrics,
        explanations: Explanations,
        readiness: Callable[[], dict[str, Any]],
        siblings: Siblings | None,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._explanations = explanations
        self._readiness = readiness
        self._siblings = siblings

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        for path in _FILES:
            router.add_get(path, self._file)
        router.add_get("/ui/data", self._data)

    async def _file(self, request: web.Request) -> web.Response:
        if (refusal := self._explanations.refusal(request)) is not None:
            return refusal
        body, kind = _FILES[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    async def _data(self, request: web.Request) -> web.Response:
        if (refusal := self._explanations.refusal(request)) is not None:
            return refusal
        siblings = self._siblings
        if siblings is None:
            paths = status.paths(self._metrics.registry.collect())
        else:
            paths = status.paths(await asyncio.to_thread(siblings.collect))
        ready = self._readiness()
        body = {
            "version": _VERSION,
            "pid": os.getpid(),
            "workers": 1 if siblings is None else siblings.processes,
            **{name: ready[name] for name in ("ready", "draining", "control_plane", "problems")},
            "paths": paths,
            "engines": status.engines(self._pool),
            "recent": status.recent(self._explanations.newest(), _RECENT),
        }
        return web.Response(body=openai.dump(body), content_type="application/json", headers=_HEADERS)
