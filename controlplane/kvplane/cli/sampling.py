"""What `kvplane top` shows, as it is at one moment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvplane.cli.connection import Target, explained
from kvplane.cli.engines import listed
from kvplane.cli.fetch import Reach, by_label, fetch_text, samples
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import ControlPlaneError
from kvplane.store.clock import SystemClock

if TYPE_CHECKING:
    import aiohttp


@dataclass(frozen=True, slots=True)
class RouterSample:
    """What a router has counted, by path. `buckets` are of the time to first token: (upper bound, count)."""

    url: str
    trouble: str = ""
    requests: Mapping[str, float] = field(default_factory=dict)
    reused_tokens: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. `at_s` is of a clock that only runs forward; `trouble` why something is missing."""

    at_s: float
    address: str
    statuses: tuple[m.PlaneStatus, ...]
    engines: tuple[m.Engine, ...]
    router: RouterSample | None = None
    trouble: str = ""

    @property
    def counts(self) -> m.PlaneCounts:
        """What all replicas that answered have counted together."""
        counts = [status.counts for status in self.statuses if status.counts is not None]
        misses: dict[str, int] = {}
        for one in counts:
            for reason, number in one.misses.items():
                misses[reason] = misses.get(reason, 0) + number
        return m.PlaneCounts(
            turns=sum(one.turns for one in counts),
            hits=sum(one.hits for one in counts),
            misses=misses,
            claims=sum(one.claims for one in counts),
            claims_missed=sum(one.claims_missed for one in counts),
            announcements=sum(one.announcements for one in counts),
        )


class Sampler:
    """Looks at a control plane, all replicas that were named, and at a router, if one was."""

    def __init__(self, target: Target, router: str, clock: SystemClock, how: Reach) -> None:
        self._target = target
        self._router = router
        self._clock = clock
        self._how = how
        self._clients: list[ControlPlaneClient] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._clients = [self._target.client(address) for address in await self._target.replicas()]
        if self._router:
            self._session = self._how.session(self._target.timeout_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            await client.aclose()
        if self._session is not None:
            await self._session.close()

    async def look(self) -> Sample:
        """Look once. Raises ControlPlaneError if no replica answers."""

        async def status(client: ControlPlaneClient) -> m.PlaneStatus | ControlPlaneError:
            try:
                return await client.get_status()
            except ControlPlaneError as error:
                return error

        answers = await asyncio.gather(*(status(client) for client in self._clients))
        errors = [answer for answer in answers if isinstance(answer, ControlPlaneError)]
        if len(errors) == len(answers):
            raise errors[0]
        engines = await listed(self._target, clients=self._clients)
        router = None if self._session is None else await self._look_at_router(self._session)
        return Sample(
            self._clock.monotonic(),
            self._target.address,
            tuple(answer for answer in answers if isinstance(answer, m.PlaneStatus)),
            tuple(engines),
            router,
            f"{len(errors)} of {len(answers)} replicas do not answer" if errors else "",
        )

    async def look_again(self, last: Sample) -> Sample:
        """Look; while nobody answers, return what was seen last with what is wrong."""
        try:
            return await self.look()
        except ControlPlaneError as error:
            return replace(last, at_s=self._clock.monotonic(), trouble=await explained(self._target, error))

    async def _look_at_router(self, session: aiohttp.ClientSession) -> RouterSample:
        answer = await fetch_text(session, f"{self._router}/metrics", self._how.headers)
        if answer.trouble or answer.status != 200:
            said = answer.trouble or f"it answers {answer.status} to GET /metrics"
            if answer.status in (401, 403):
                said += "; show it an operator's key (--api-key-file)"
            return RouterSample(self._router, said)
        if "kvplane_router_" not in answer.text:
            return RouterSample(self._router, "what answers there is no router of kvplane's")
        buckets: dict[str, list[tuple[float, float]]] = {}
        for labels, value in samples(answer.text, "kvplane_router_ttft_seconds_bucket"):
            bound = _bound(labels.get("le", ""))
            if bound is not None:
                buckets.setdefault(labels.get("path", ""), []).append((bound, value))
        return RouterSample(
            self._router,
            "",
            by_label(answer.text, "kvplane_router_requests_total", "path"),
            by_label(answer.text, "kvplane_router_reused_tokens_total", "path"),
            {path: tuple(sorted(found)) for path, found in buckets.items()},
        )


def _bound(text: str) -> float | None:
    """Return the upper bound of a histogram's bucket, None if it is none."""
    try:
        bound = float(text)
    except ValueError:
        return None
    return None if math.isnan(bound) else bound
