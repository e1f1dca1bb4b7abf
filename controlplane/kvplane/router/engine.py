"""An engine as the router knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from kvplane.router.health import Health


@dataclass(slots=True, eq=False)
class Engine:
    """An engine by its base URL, with what is known of it at present."""

    url: str
    prefill: bool
    decode: bool
    static: bool
    """Named by a flag, DNS or Kubernetes, and not only by the control plane's registry."""
    up: bool = True
    """False after a failed connection or probe, until a probe succeeds."""
    outstanding: int = 0
    """Requests of this router's that it works on."""
    waiting: int = 0
    """Requests it last reported as waiting."""
    ahead_tokens: int = 0
    """Prompt tokens of this router's that it has still to compute, estimated."""
    draining: bool = False
    engine_ids: tuple[str, ...] = ()
    """As registered; several where data-parallel ranks share the URL."""
    learned_id: str = ""
    """From its answers, and from locations on it, for engines that register without an endpoint."""
    verifies: bool | None = None
    """Whether its connector checks fingerprints; None before an answer has shown it."""
    models: frozenset[str] = frozenset()
    """Served models; empty while unknown."""
    models_refused: int = 0
    """The status, 401 or 403, with which it refuses to say what it serves; 0 if it does not."""
    chosen_at: int = 0
    """Which choice it was last; larger is later."""
    waits: set[asyncio.Timeout] = field(default_factory=set)
    """Of requests that have no byte of an answer from it yet."""
    streams: set[aiohttp.ClientResponse] = field(default_factory=set)
    """Answers that it has begun and not ended."""
    down_since: float = 0.0
    """When it went down, by the pool's clock; of no meaning while it is up."""
    health: Health = field(default_factory=Health)
    """What its answers to requests say."""
    api_key: str = field(default="", repr=False)
    """What clients' requests go to it with in place of their own credentials; "" for none."""
    timeouts: int = 0
    probing: bool = False
    probe_at: float = 0.0
    models_at: float = 0.0
    _urls: dict[str, URL] = field(default_factory=dict)

    def at(self, path: str) -> URL:
        """Return the URL of a path on it. Each is kept, so none that a client has written belongs here."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = URL(self.url + path)
        return url

    def accept_keys(self, keys: Sequence[str]) -> None:
        """Take over the keys that are meant for it: the one it took last, if that is still among them."""
        if self.api_key not in keys:
            self.api_key = keys[0] if keys else ""

    def headers(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Return a request's headers with the key that is meant for it."""
        return {**headers, "Authorization": f"Bearer {self.api_key}"} if self.api_key else headers

    def serves_like(self, other: Engine) -> bool:
        """Tell whether both serve a model in common, as far as is known."""
        return not self.models or not other.models or bool(self.models & other.models)

    def cut_streams(self) -> None:
        """End what it has begun to answer, as if it had closed its connections."""
        for response in tuple(self.streams):
            response.close()

    def leave_waits(self, now: float) -> None:
        """Have the requests that wait for it wait no longer; `now` is the event loop's time."""
        for patience in tuple(self.waits):
            if not patience.expired():
                patience.reschedule(now)
