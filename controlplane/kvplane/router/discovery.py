"""Engines behind DNS names: each address is an engine, looked up again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import structlog
from yarl import URL

from kvplane.router.settings import SettingsError, engine_url

log = structlog.get_logger("kvplane.router")


@dataclass(frozen=True, slots=True)
class Roles:
    """What an engine is used for."""

    prefill: bool
    decode: bool

    def __or__(self, other: Roles) -> Roles:
        return Roles(self.prefill or other.prefill, self.decode or other.decode)


Found = Mapping[str, Roles]
"""Engines by their base URLs."""
OnFound = Callable[[str, Found], None]
"""Takes the name of a source and all that it has found; see EnginePool.found."""
Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""Returns a name's addresses. Raises OSError."""


def merged(found: Iterable[Found]) -> dict[str, Roles]:
    """Return the engines of all sources, with the roles of all of them."""
    engines: dict[str, Roles] = {}
    for source in found:
        for url, roles in source.items():
            engines[url] = engines[url] | roles if url in engines else roles
    return engines


async def system_resolve(host: str, port: int) -> set[str]:
    """Return a name's addresses as the system resolves it. Raises OSError."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(answer[4][0]) for answer in answers}


class DnsSource:
    """Looks names up every `interval_s` seconds. A name that cannot be resolved keeps the addresses it had.

    `prefill` and `decode` are base URLs with names for hosts, as `engine_url` returns them.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        *,
        interval_s: float,
        on_found: OnFound,
        resolve: Resolve = system_resolve,
    ) -> None:
        self._names = merged(
            [dict.fromkeys(prefill, Roles(True, False)), dict.fromkeys(decode, Roles(False, True))]
        )
        self._interval_s = interval_s
        self._on_found = on_found
        self._resolve = resolve
        self._last: dict[str, list[str]] = {}
        self._failing: set[str] = set()

    async def poll(self) -> None:
        """Look all names up once, and tell what was found. Never raises."""
        await asyncio.gather(*(self._look_up(name) for name in self._names))
        self._on_found(
            "dns",
            merged(dict.fromkeys(self._last.get(name, ()), roles) for name, roles in self._names.items()),
        )

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.poll()

    async def _look_up(self, name: str) -> None:
        url = URL(name)
        host, port = url.host or "", url.port or 80
        try:
            async with asyncio.timeout(max(1.0, self._interval_s)):
                addresses = sorted(await self._resolve(host, port))
        except (OSError, UnicodeError) as error:
            self._note_failure(name, str(error) or "no answer in time")
            return
        urls = [found for address in addresses if (found := _engine_at(url, address)) is not None]
        if not urls:
            unusable = ", ".join(addresses)
            self._note_failure(name, f"no address to call: {unusable}" if unusable else "no addresses")
            return
        if name in self._failing:
            self._failing.discard(name)
            log.info("engine_name_resolved", name=host)
        if urls != self._last.get(name):
            log.info("engine_addresses_changed", name=host, engines=len(urls))
        self._last[name] = urls

    def _note_failure(self, name: str, problem: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            kept = len(self._last.get(name, ()))
            log.warning("engine_name_not_resolved", name=URL(name).host, problem=problem, engines_kept=kept)


def _engine_at(name: URL, address: str) -> str | None:
    """Return the base URL of an engine at an address of a name, None if no engine can be called there.

    An address of one link only, such as fe80::1%eth0, is none for a URL.
    """
    try:
        return engine_url(str(name.with_host(address)))
    except (SettingsError, ValueError):
        return None
