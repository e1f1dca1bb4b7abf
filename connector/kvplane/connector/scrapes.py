"""HTTP for an engine's own /metrics, in clear or by TLS. Needs prometheus_client."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from kvplane.client.files import FileError, Watched, check_authorities, check_pair, read
from kvplane.client.logs import get_logger

_log = get_logger("kvplane.connector")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the engine's certificate as a server, its key, and authorities of scrapers' or ""."""

    cert: str
    key: str
    client_ca: str = ""

    def context(self) -> ssl.SSLContext:
        """Return a server's context. Raises FileError."""
        check_pair(self.cert, self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.cert, self.key)
        if self.client_ca:
            check_authorities(self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
            except OSError:
                raise FileError(f"{self.client_ca}: its revocation list cannot be read") from None
            if b"-----BEGIN X509 CRL-----" in read(self.client_ca):
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            # A session that is resumed shows no certificate again, whatever has become of its authority.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context


class FollowedTls:
    """A context made of files, looked at when somebody connects. Raises FileError when it is made."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._watched = Watched([path for path in (files.cert, files.key, files.client_ca) if path])
        self._context = files.context()

    def current(self) -> ssl.SSLContext:
        """Return what is in force. New files count once two looks have found them alike; it blocks."""
        if self._watched.look():
            try:
                self._context = self._files.context()
            except FileError as error:
                _log.error("certificates_not_reloaded", problem=str(error), effect="the old ones stay in use")
            else:
                _log.info("certificates_reloaded", cert=self._files.cert)
        return self._context


class _Handler(WSGIRequestHandler):
    timeout = 5.0
    """Seconds a scraper may say nothing, its handshake included."""

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class ScrapeServer(ThreadingWSGIServer):
    """Serves a registry, each scrape on a thread of its own. Raises OSError where it cannot listen.

    `serve_forever` runs it. `tls` returns the context for a connection; None: in clear.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = found[0][0]
        self._tls = tls
        super().__init__((host, port), _Handler)
        self.set_app(make_wsgi_app(registry))

    def get_request(self) -> tuple[Any, Any]:
        """Return a connection; its handshake is made by the thread that reads from it."""
        connection, peer = super().get_request()
        if self._tls is not None:
            connection = self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever that was is no scraper, or has gone."""
