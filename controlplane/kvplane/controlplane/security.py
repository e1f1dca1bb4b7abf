"""What guards a server's port: its certificate, and who may call what. Both follow their files."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from kvplane.controlplane.access import AccessFileError
from kvplane.controlplane.callers import Access
from kvplane.controlplane.tls import ServerTls, TlsFiles
from kvplane.store.clock import Clock
from kvplane.store.files import FileError

LOOK_S = 1.0
"""How often files are looked at."""


class SecurityError(Exception):
    """A file cannot be used: one line that says which and why."""


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """Which files there are: the certificate's, None for plaintext, and the access file, "" for none."""

    tls: TlsFiles | None = None
    access_file: str = ""


class Security:
    """A server's, with the files read. Use `open_security`."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._tls = ServerTls(settings.tls) if settings.tls is not None else None
        self.access = Access(settings.access_file) if settings.access_file else None
        """Who may call what; None: everyone everything."""

    @property
    def tokens_only(self) -> bool:
        """Whether callers can be told by nothing but tokens: none has shown a certificate."""
        return self.access is not None and not (self._tls is not None and self._tls.asks_for_certificates)

    @property
    def follows_files(self) -> bool:
        """Whether there is anything for `follow` to do."""
        return self._tls is not None or self.access is not None

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen; returns the port. Raises RuntimeError if it cannot."""
        if self._tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self._tls.credentials)

    async def look(self) -> None:
        """Look at the files once, and take what has changed."""
        if self._tls is not None:
            await self._tls.look()
        if self.access is not None:
            await self.access.look()

    async def follow(self, clock: Clock) -> None:
        """Look at the files every second, until cancelled."""
        while True:
            await clock.sleep(LOOK_S)
            await self.look()


async def open_security(settings: SecuritySettings) -> Security:
    """Read the files. Raises SecurityError."""
    try:
        return await asyncio.to_thread(Security, settings)
    except (FileError, AccessFileError) as error:
        raise SecurityError(str(error)) from None
