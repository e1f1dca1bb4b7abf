"""Whether the router lives, and whether it can serve: `/health` and `/ready`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from aiohttp import web

from kvplane.router.mistakes import no_decode
from kvplane.router.plane import Plane
from kvplane.router.pool import EnginePool
from kvplane.router.silence import Silence
from kvplane.router.tenancy.caller import caller_of

log = structlog.get_logger("kvplane.router")

_NO_PLANE = "there is no control plane, so nothing is reused: start the router with --plane HOST:PORT"
_LOST_PLANE = "the control plane does not answer: nothing is reused"
_NAME_ENGINES = "--prefill and --decode, or kvplane_endpoint on the engines"


class Readiness:
    """Tells how the router does. `ended` are background tasks that no longer run, a line each.

    Where there are tenants, only operators are told more than whether it serves.
    """

    def __init__(
        self,
        *,
        pool: EnginePool,
        silence: Silence,
        plane: Callable[[], Plane | None],
        draining: Callable[[], bool],
        ended: Sequence[str],
    ) -> None:
        self._pool = pool
        self._silence = silence
        self._plane_now = plane
        self._draining = draining
        self._ended = ended

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/health", self._health)
        router.add_get("/ready", self._ready)

    def begin(self, *, looked_for: bool) -> None:
        """Warn of what is wrong when it begins to serve: engines in wrong roles, or that nobody has named.

        `looked_for`: there are names or labels where engines may yet come from.
        """
        self._pool.misplaced()
        if not looked_for and not any(engine.decode for engine in self._pool.engines):
            log.warning("engines_not_named", remedy=_NAME_ENGINES)

    def _useless(self) -> list[str]:
        """Return why nothing is reused, or not on some engines, or nothing is served at all."""
        plane, problems = self._plane_now(), list(self._ended)
        if why := no_decode(self._pool.engines):
            problems.append(why)
        if plane is None:
            problems.append(_NO_PLANE)
        elif not plane.available:
            problems.append(_LOST_PLANE)
        if plane is not None and plane.available and self._silence.problem is not None:
            problems.append(self._silence.problem)
        return problems + self._pool.misplaced()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Say that the router lives. It is degraded where what it is for does not happen."""
        problems = self._useless()
        if problems and not _is_stranger():
            status = "draining" if self._draining() else "degraded"
            return web.json_response({"status": status, "problems": problems})
        return web.json_response({"status": "draining" if self._draining() else "ok"})

    async def _ready(self, request: web.Request) -> web.StreamResponse:
        detail = self.told()
        if _is_stranger():
            # Where engines are, and how they do, is no tenant's affair.
            detail = {name: detail[name] for name in ("ready", "draining")}
        return web.json_response(detail, status=200 if detail["ready"] else 503)

    def told(self) -> dict[str, Any]:
        """Return what `/ready` answers."""
        plane_now = self._plane_now()
        prefill = [e for e in self._pool.engines if e.prefill]
        decode = [e for e in self._pool.engines if e.decode]
        plane = "none" if plane_now is None else "up" if plane_now.available else "unavailable"
        problems = [f"{e.url} does not answer" for e in self._pool.engines if not e.up]
        problems += [
            f"{e.url} fails requests and is left alone for a while"
            for e in self._pool.engines
            if e.up and self._pool.ejected(e)
        ]
        if not any(e.up for e in prefill):
            problems.append("no prefill engine answers: decode engines compute prompts themselves")
        problems += [*self._useless(), *self._pool.refused_keys()]
        problems += [f"{line}: not called" for line in self._pool.refused]
        if mismatch := self._pool.mismatch():
            problems.append(mismatch)
        return {
            "ready": any(e.up and not e.draining for e in decode) and not self._draining(),
            "draining": self._draining(),
            "prefill": {e.url: "up" if e.up else "down" for e in prefill},
            "decode": {e.url: "up" if e.up else "down" for e in decode},
            "control_plane": plane,
            "problems": problems,
        }


def _is_stranger() -> bool:
    caller = caller_of()
    return caller is not None and not caller.operator
