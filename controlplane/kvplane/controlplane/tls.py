"""The server's certificate and the authority of its callers', exchanged without a restart."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import grpc
import structlog

from kvplane.store.files import FileError, Watched, check_authorities, check_pair, read

log = structlog.get_logger(__name__)

SESSION_LOOKS = 300
"""So many looks after one context for handshakes another one is made: who resumes a session of the one before
shows its certificate again, which may be over by then. gRPC cannot be told to give out no sessions."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    Attributes:
        cert: the server's certificate, followed by those between it and its authority.
        key: its private key, without a password.
        client_ca: authorities of callers' certificates; "": callers need none. With it, who has none cannot
            connect.
    """

    cert: str
    key: str
    client_ca: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """All that are given."""
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path)


class ServerTls:
    """Credentials for a server's port. Reads files when it is made. Raises FileError.

    gRPC asks for the certificate at each handshake, on a thread of its own; it is given what is there.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = Watched(files.paths)
        self._next: deque[grpc.ServerCertificateConfiguration] = deque(maxlen=1)
        self._current = self._load()
        self._looks = 0
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._current,
            self._fetch,  # type: ignore[arg-type]  # None says that nothing is new, which the stubs leave out
            require_client_authentication=bool(files.client_ca),
        )

    @property
    def asks_for_certificates(self) -> bool:
        """Whether who has no certificate cannot connect."""
        return bool(self._files.client_ca)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        check_pair(files.cert, files.key)
        if files.client_ca:
            check_authorities(files.client_ca)
        return grpc.ssl_server_certificate_configuration(
            [(read(files.key), read(files.cert))], read(files.client_ca) if files.client_ca else None
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            return self._next.pop()
        except IndexError:  # nothing new
            return None

    async def look(self) -> None:
        """Take new files from the next handshake on. What cannot be used is logged, and the old ones stay."""
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        self._looks += 1
        if not self._watched.look():
            if self._files.client_ca and self._looks >= SESSION_LOOKS:
                self._use(self._current)
            return
        try:
            self._use(self._load())
        except FileError as error:
            log.error("certificates_not_reloaded", problem=str(error), effect="the old ones stay in use")
            return
        log.info("certificates_reloaded", cert=self._files.cert)

    def _use(self, configuration: grpc.ServerCertificateConfiguration) -> None:
        self._current, self._looks = configuration, 0
        self._next.append(configuration)
