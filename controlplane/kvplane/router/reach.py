"""Where the router connects to: to engines, and nowhere that an engine's registration could lead it to."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_METADATA = tuple(
    map(ipaddress.ip_network, ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"))
)
"""Where clouds answer questions about credentials, besides link-local addresses."""
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "instance-data"})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_MOST_REMEMBERED = 10_000
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?")


class ReachError(ValueError):
    """A pattern cannot be used; the text says which and why."""


def _address(host: str) -> _Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _inner(address: _Address) -> _Address:
    """Return the IPv4 address that an IPv6 address stands for, if it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else _inner(address).is_loopback


class Reach:
    """Which engines may be talked to. Never raises but for patterns: ReachError.

    `patterns` are addresses, networks (10.0.0.0/8), names and suffixes (*.engines.internal) of engines that
    register themselves; none: all but link-local and other addresses that are no engine's. `named` are hosts
    that whoever runs the router has named: those are never refused. `plaintext`: whether an engine that
    registers may be beyond loopback without https.
    """

    def __init__(
        self, patterns: Sequence[str] = (), *, named: Collection[str] = (), plaintext: bool = True
    ) -> None:
        self._networks = list[_Network]()
        self._names = set[str]()
        self._suffixes = list[str]()
        self._named = frozenset(named)
        self._plaintext = plaintext
        self._refusals: dict[str, str | None] = {}
        """By URL: each engine of a fleet is asked about at every look at the registry."""
        for pattern in patterns:
            self._add(pattern.strip().lower())

    def _add(self, pattern: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(pattern))
        except ValueError as error:
            if "/" in pattern:
                raise ReachError(f"{pattern}: no network: {error}") from None
            last = pattern.rsplit(".", 1)[-1]
            if not _NAME.fullmatch(pattern) or _NUMBER.fullmatch(last):
                raise ReachError(
                    f"{pattern}: write an address, a network as 10.0.0.0/8, a name, or *.SUFFIX"
                ) from None
            if pattern.startswith("*."):
                self._suffixes.append(pattern[1:])
            else:
                self._names.add(pattern)

    @property
    def limited(self) -> bool:
        """Whether patterns say which engines there may be."""
        return bool(self._networks or self._names or self._suffixes)

    def refusal(self, url: str) -> str | None:
        """Return why an engine that registered with a base URL is not talked to, None if it may be."""
        if url not in self._refusals:
            if len(self._refusals) >= _MOST_REMEMBERED:
                self._refusals.clear()
            self._refusals[url] = self._refusal(url)
        return self._refusals[url]

    def _refusal(self, url: str) -> str | None:
        parts = urlsplit(url)
        host = (parts.hostname or "").rstrip(".")
        if host in self._named:
            return None
        if not self._plaintext and parts.scheme != "https" and not _is_loopback(host):
            return "is beyond loopback without https: use https, or start the router with --allow-remote"
        address = _address(host)
        if address is not None:
            return self.address_refusal(host, address)
        if _NUMBER.fullmatch(host.rsplit(".", 1)[-1]):
            return "is a number that is no address"
        if host in _METADATA_NAMES:
            return "is no engine's name"
        if self.limited and not self._networks and not self._permits(host):
            return "is not among --engine-hosts"
        return None  # Its addresses are looked at when it is called.

    def _permits(self, name: str) -> bool:
        return name in self._names or any(map(name.endswith, self._suffixes))

    def address_refusal(self, host: str, address: _Address) -> str | None:
        """Return why a host is not called at an address, None if it may be."""
        host = host.rstrip(".").lower()
        if host in self._named:
            return None
        inner = _inner(address)
        if inner.is_link_local or inner.is_multicast or inner.is_unspecified:
            return "is link-local, or no address of a host"
        if inner.is_reserved and not inner.is_loopback:
            return "is no address of a host"
        if any(inner in network for network in _METADATA):
            return "is where a cloud gives out credentials"
        if self.limited and not self._permits(host) and not any(inner in n for n in self._networks):
            return "is not among --engine-hosts"
        return None


class CheckedResolver(AbstractResolver):
    """Looks names up, and leaves out addresses that are not to be called; whatever was said before."""

    def __init__(self, reach: Reach, resolver: AbstractResolver | None = None) -> None:
        self._reach = reach
        self._resolver = resolver or DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return a name's addresses. Raises OSError, also where none may be called."""
        found = await self._resolver.resolve(host, port, family)
        kept = list[ResolveResult]()
        why = ""
        for entry in found:
            address = _address(entry["host"].split("%")[0])
            problem = None if address is None else self._reach.address_refusal(host, address)
            if problem is None:
                kept.append(entry)
            else:
                why = f"{entry['host']} {problem}"
        if found and not kept:
            raise OSError(errno.EACCES, f"{host} is not called: {why}")
        return kept

    async def close(self) -> None:
        """See AbstractResolver."""
        await self._resolver.close()
