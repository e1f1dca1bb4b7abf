"""The gate in front of all routes, where there are tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from kvplane.router import shapes
from kvplane.router.admission import TENANT, OverloadedError
from kvplane.router.metrics import RouterMetrics
from kvplane.router.reloading import FileProblemError, Reloaded
from kvplane.router.tenancy.access import NOBODY, Access
from kvplane.router.tenancy.caller import CALLER, Caller
from kvplane.router.tenancy.jwks import FileKeys, JwksError, KeySet, UrlKeys, authorities
from kvplane.router.tenancy.meters import Meters
from kvplane.router.tenancy.model import JwtSettings, Tenants
from kvplane.router.tenancy.reading import OPTION, read_tenants
from kvplane.router.tenancy.tokens import AccessError, Tokens

log = structlog.get_logger("kvplane.router")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN = frozenset({"/health", "/ready", "/version"})
"""What anyone may ask; operators are told more."""
_OPERATORS = "/metrics"
_PAGE = "/ui"
"""What only operators may ask: it is about all tenants."""
_EITHER = "/debug/"
"""What tenants may ask about their own requests, and operators about all."""


class Gate:
    """Lets requests in that are a tenant's, within its quota, and tells the rest of the router whose.

    `share` is how many processes the limits are for. Clocks read seconds: `monotonic` of no particular
    origin, `wall` since the epoch.
    """

    def __init__(
        self,
        file: str,
        *,
        share: int,
        metrics: RouterMetrics,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._monotonic = monotonic
        self._wall = wall
        self._access = Access(Meters(share, monotonic), wall)
        self._url_keys: UrlKeys | None = None
        self._url_task: asyncio.Task[None] | None = None
        self._jwt: JwtSettings | None = None
        self._reloaded: Reloaded[_Made] = Reloaded(
            OPTION, lambda: _made(read_tenants(file)), lambda made: made.tenants.paths(), on_change=self._use
        )

    async def start(self) -> None:
        """Read the file, and the issuer's keys if they are at a URL. Raises FileProblemError."""
        made = await self._reloaded.start()
        if self._url_keys is not None:
            await self._url_keys.refresh()
        log.info("tenants_read", tenants=len(made.tenants.tenants), tokens=made.tenants.jwt is not None)

    async def run(self) -> None:
        """Keep to the file until cancelled."""
        try:
            await self._reloaded.run()
        finally:
            await self.aclose()

    async def look(self) -> bool:
        """Look once whether the file has changed; see Reloaded.look."""
        return await self._reloaded.look()

    async def aclose(self) -> None:
        """End what runs in the background. Idempotent."""
        task, self._url_task = self._url_task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _use(self, made: _Made) -> None:
        settings = made.tenants.jwt
        tokens: Tokens | None = None
        if settings is not None:
            if made.keys is not None:
                tokens = Tokens(settings, FileKeys(made.keys), self._wall)
            else:
                tokens = Tokens(settings, self._at_url(settings, made), self._wall)
        if made.keys is not None or settings is None:
            self._end_url()
        self._jwt = settings
        self._access.use(made.tenants, tokens)

    def _at_url(self, settings: JwtSettings, made: _Made) -> UrlKeys:
        """Return the keys at a URL: those that there are, if only something else in the file has changed."""
        assert settings.jwks_url is not None
        if self._url_keys is not None and settings == self._jwt:
            return self._url_keys
        self._end_url()
        self._url_keys = keys = UrlKeys(
            settings.jwks_url,
            refetch_s=settings.refetch_s,
            refresh_s=settings.refresh_s,
            monotonic=self._monotonic,
            context=made.context,
            on_change=self._access.forget,
        )
        self._url_task = asyncio.create_task(keys.run(), name="jwks")
        return keys

    def _end_url(self) -> None:
        self._url_keys = None
        task, self._url_task = self._url_task, None
        if task is not None:
            task.cancel()

    @web.middleware
    async def let_in(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer a request, or say why not."""
        # A connection's requests may have one context.
        TENANT.set("")
        CALLER.set(NOBODY)
        try:
            path = _route(request)
            if path in OPEN:
                CALLER.set(await self._access.anyone(request.headers))
                return await handler(request)
            page = path == _PAGE or path.startswith(_PAGE + "/")
            caller = await self._access.caller(request.headers, basic=page)
            CALLER.set(caller)
            if caller.operator:
                if not page and path != _OPERATORS and not path.startswith(_EITHER):
                    raise AccessError("This is an operator's key: it belongs to no tenant.", 403)
                return await handler(request)
            if page or path == _OPERATORS:
                raise AccessError("Only an operator's key opens this.", 403)
            return await self._within_quota(caller, request, handler)
        except AccessError as error:
            self._metrics.refused.labels(str(error.status)).inc()
            return _refused(request, error)

    async def _within_quota(
        self, caller: Caller, request: web.Request, handler: _Handler
    ) -> web.StreamResponse:
        meter = caller.meter
        assert meter is not None
        try:
            meter.begin()
        except OverloadedError as error:
            self._metrics.refused.labels("429").inc()
            return _answer(request, str(error), 429, {"Retry-After": str(error.retry_after_s)})
        TENANT.set(caller.tenant_id)
        try:
            return await handler(request)
        finally:
            meter.end()


def _route(request: web.Request) -> str:
    """Return the path of the route that will answer: a client can write one path in many ways."""
    resource = request.match_info.route.resource
    return request.path if resource is None else resource.canonical


class _Made:
    """What is made of the file on a thread, since it takes a while."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self.keys: KeySet | None = None
        jwt = tenants.jwt
        self.context = authorities(jwt.jwks_ca) if jwt is not None else None
        if jwt is None:
            return
        try:
            import jwt as _  # noqa: F401  # an extra
        except ImportError:
            raise FileProblemError(
                f"{OPTION} {tenants.file}: [jwt] needs another package: pip install 'kvplane[jwt]'"
            ) from None
        if tenants.jwks is not None:
            try:
                self.keys = KeySet(tenants.jwks)
            except JwksError as error:
                raise FileProblemError(
                    f"{OPTION} {tenants.file}: [jwt] jwks_file {jwt.jwks_file} {error}"
                ) from None


def _made(tenants: Tenants) -> _Made:
    return _Made(tenants)


def _refused(request: web.Request, error: AccessError) -> web.Response:
    headers = dict[str, str]()
    if error.status == 401 and request.path.startswith(_PAGE):
        # Browsers ask for it then.
        headers["WWW-Authenticate"] = 'Basic realm="kvplane: an operator\'s key as password"'
    elif error.status == 401:
        shown = "Authorization" in request.headers or "x-api-key" in request.headers
        headers["WWW-Authenticate"] = 'Bearer realm="kvplane"' + (', error="invalid_token"' if shown else "")
    elif error.status == 403:
        headers["WWW-Authenticate"] = 'Bearer realm="kvplane", error="insufficient_scope"'
    else:
        headers["Retry-After"] = "1"
    return _answer(request, str(error), error.status, headers)


def _answer(request: web.Request, message: str, status: int, headers: dict[str, str]) -> web.Response:
    headers["x-request-id"] = shapes.request_id(request)
    body = shapes.path_error(request.path, message, status)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
