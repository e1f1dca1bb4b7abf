"""Looks at everything the doctor was shown: replicas, engines, routers. Changes nothing."""

from __future__ import annotations

import asyncio
import email.utils
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplane.cli.connection import Target
from kvplane.cli.doctor.facts import (
    EngineHttpFacts,
    Facts,
    Offset,
    PlaneFacts,
    RouterFacts,
    SideChannel,
)
from kvplane.cli.engines import listed
from kvplane.cli.fetch import Answer, Reach, fetch_json, fetch_text, first_labels, total
from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneError, NotAllowedError, UnknownCallerError
from kvplane.store.clock import SystemClock

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 3.0
_MOST_ENGINES = 200
"""Of those that are registered, how many are looked at themselves; enough to see what is wrong."""
_DATE_ERROR_S = 1.0
"""An HTTP date has whole seconds."""


class Gatherer:
    """Looks once. `step` is told before each part of it."""

    def __init__(
        self,
        target: Target,
        routers: Sequence[str],
        engines: Sequence[str],
        clock: SystemClock,
        step: Callable[[str], None],
        how: Reach,
    ) -> None:
        self._target = target
        self._routers = routers
        self._engines = engines
        self._clock = clock
        self._step = step
        self._how = how

    async def gather(self) -> Facts:
        """Return what there is to see; what does not answer is part of it."""
        self._step("asking control planes")
        addresses = await self._target.replicas()
        planes = await asyncio.gather(*(self._plane(address) for address in addresses))
        engines: tuple[m.Engine, ...] | None = None
        if any(plane.status is not None or plane.too_old for plane in planes):
            self._step("listing engines")
            try:
                engines = tuple(await listed(self._target))
            except ControlPlaneError:
                engines = None  # the replicas have said why
        async with self._how.session(self._target.timeout_s) as session:
            self._step("asking routers")
            routers = await asyncio.gather(*(self._router(session, url) for url in self._routers))
            self._step("asking engines")
            known = [e.spec.endpoint for e in (engines or ())[:_MOST_ENGINES] if e.spec.endpoint]
            urls = dict.fromkeys([*self._engines, *known])
            https = await asyncio.gather(*(self._engine(session, url) for url in urls))
        self._step("connecting to side channels")
        settings = [e.spec.settings for e in (engines or ())[:_MOST_ENGINES] if e.spec.settings is not None]
        channels = dict.fromkeys(
            (said.side_channel_host, said.side_channel_port)
            for said in settings
            if said.side_channel_host and said.side_channel_port
        )
        side_channels = await asyncio.gather(*(_connect(host, port) for host, port in channels))
        return Facts(tuple(planes), engines, tuple(routers), tuple(https), tuple(side_channels))

    def _offset(self, then_s: float, sent_s: float, *, error_s: float = 0.0) -> Offset:
        """Return how far ahead a clock is that read `then_s` between `sent_s` and now."""
        half = (self._now_s() - sent_s) / 2
        return Offset(then_s - (sent_s + half), half + error_s)

    def _now_s(self) -> float:
        return self._clock.machine_ms() / 1000

    async def _plane(self, address: str) -> PlaneFacts:
        import grpc

        async with self._target.client(address) as client:
            try:
                await client.get_status()  # connects: the next one measures
                sent_s = self._now_s()
                status = await client.get_status()
            except ControlPlaneError as error:
                cause = error.__cause__
                code = cause.code() if isinstance(cause, grpc.aio.AioRpcError) else None
                said = " ".join(str(error).split())[:300]
                refused = isinstance(error, UnknownCallerError | NotAllowedError)
                too_old = code is grpc.StatusCode.UNIMPLEMENTED
                return PlaneFacts(address, None, said, too_old=too_old, refused=refused)
        fleet = self._offset(status.fleet_time_s, sent_s)
        clock = self._offset(status.clock_time_s, sent_s)
        return PlaneFacts(address, status, fleet=fleet, clock=clock)

    async def _router(self, session: aiohttp.ClientSession, url: str) -> RouterFacts:
        sent_s = self._now_s()
        health = await fetch_json(session, f"{url}/health", self._how.headers)
        clock = self._date(health, sent_s)
        if health.trouble or not isinstance(health.body, dict) or "status" not in health.body:
            trouble = health.trouble or "what answers there is no router of kvplane's"
            return RouterFacts(url, trouble, untrusted=health.untrusted)
        ready, text = await asyncio.gather(
            fetch_json(session, f"{url}/ready", self._how.headers),
            fetch_text(session, f"{url}/metrics", self._how.headers),
        )
        requests = total(text.text, "kvplane_router_requests_total")
        body = ready.body if isinstance(ready.body, dict) else {}
        return RouterFacts(url, "", health.body, body, requests, clock)

    async def _engine(self, session: aiohttp.ClientSession, url: str) -> EngineHttpFacts:
        asked_for = url in self._engines
        sent_s = self._now_s()
        health = await fetch_text(session, f"{url}/health")
        clock = self._date(health, sent_s)
        if health.trouble or health.status != 200:
            trouble = health.trouble or f"it answers {health.status} to GET /health"
            return EngineHttpFacts(url, asked_for, trouble, clock=clock, untrusted=health.untrusted)
        version, metrics = await asyncio.gather(
            fetch_json(session, f"{url}/version"), fetch_text(session, f"{url}/metrics")
        )
        said = version.body.get("version", "") if isinstance(version.body, dict) else ""
        has_metrics = metrics.status == 200 and "vllm:" in metrics.text
        return EngineHttpFacts(
            url,
            asked_for,
            "",
            str(said)[:64],
            first_labels(metrics.text, "vllm:cache_config_info") if has_metrics else {},
            has_metrics,
            "kvplane_connector_" in metrics.text,
            clock,
        )

    def _date(self, answer: Answer, sent_s: float) -> Offset | None:
        """Return how far ahead the clock of a server is, by the date of its answer."""
        try:
            then = email.utils.parsedate_to_datetime(answer.date)
        except (TypeError, ValueError):
            return None
        # The date was cut to whole seconds: half of one is missing, on average.
        return self._offset(then.timestamp() + _DATE_ERROR_S / 2, sent_s, error_s=_DATE_ERROR_S / 2)


async def _connect(host: str, port: int) -> SideChannel:
    trouble = ""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
    except TimeoutError:
        trouble = f"no connection within {_CONNECT_S:g} s"
    except (OSError, UnicodeError) as error:
        trouble = str(error) or "no connection"
        if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
            trouble = os.strerror(error.errno).lower()
    else:
        writer.close()
    return SideChannel(host, port, trouble)
