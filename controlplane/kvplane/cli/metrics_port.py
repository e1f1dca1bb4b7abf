"""GET /metrics on a port of its own, for what has no HTTP server or should not show it to its clients.

Beside them two answers for probes that cannot ask a control plane's gRPC port, which may want TLS and a
certificate: `/health` says that the process's event loop goes round, `/ready` that its control plane serves.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

Page = Callable[[], Awaitable[bytes]]
"""Returns metrics in Prometheus' text format; those of several pages must have different names."""

Serving = Callable[[], bool]
"""Tells whether calls can be answered now. Returns at once."""

_HEAD_BYTES = 8 * 1024
_HEAD_S = 5.0
"""How long a scraper may take to say what it wants, and to take what it gets."""
_MOST = 16
"""Connections at a time; with one more the oldest is closed, so that nobody keeps probes from being heard."""


class MetricsPortError(Exception):
    """The port cannot be had; says why in a few words."""

    def __init__(self, message: str, *, taken: bool) -> None:
        super().__init__(message)
        self.taken = taken


class MetricsPort:
    """Serves pages as one. `async with` ends it.

    One scrape is made at a time, so many at once cost no more than one after another.
    """

    def __init__(self, pages: Sequence[Page] = ()) -> None:
        self.pages = list(pages)
        """What `/metrics` shows; may be added to while it listens."""
        self.serving: Serving | None = None
        """What `/ready` asks; None: there is no such page here."""
        self._certificates = False
        self._making = asyncio.Lock()
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], None] = {}
        self.port = 0
        """Where it listens, once started."""

    async def start(
        self, host: str, port: int, tls: ssl.SSLContext | None = None, *, certificates: bool = False
    ) -> int:
        """Listen, on any free port for 0, by https with `tls`; returns the port. Raises MetricsPortError.

        With `certificates` metrics are only for who has shown one that `tls` trusts.
        """
        self._certificates = certificates
        patience = {"ssl_handshake_timeout": _HEAD_S, "ssl_shutdown_timeout": _HEAD_S} if tls else {}
        try:
            self._server = await asyncio.start_server(
                self._connected, host.strip("[]"), port, limit=_HEAD_BYTES, ssl=tls, **patience
            )
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise MetricsPortError(
                f"port {port} on {host} is taken" if taken else f"cannot listen on {host}: {error}",
                taken=taken,
            ) from None
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._open) >= _MOST:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            self._open[task] = None
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
                known = not self._certificates or bool(writer.get_extra_info("peercert"))
                answer = await self._answer(head, known)
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # whoever that was has gone, or is no scraper
        finally:
            self._open.pop(task, None)
            writer.close()

    async def _answer(self, head: bytes, known: bool) -> bytes:
        method, _, rest = head.partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if target not in (b"/metrics", b"/health", *((b"/ready",) if self.serving else ())):
            return _response("404 Not Found", b"metrics are at /metrics\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n")
        sent = method == b"GET"
        if target == b"/metrics" and not known:
            return _response(
                "403 Forbidden", b"metrics are for certificates of --metrics-client-ca\n", send=sent
            )
        if target == b"/metrics":
            async with self._making:
                body = b"".join([await page() for page in self.pages])
            return _response("200 OK", body, CONTENT_TYPE_PLAIN_0_0_4, send=sent)
        if target == b"/ready" and self.serving is not None and not self.serving():
            return _response("503 Service Unavailable", b"not serving\n", send=sent)
        return _response("200 OK", b"ok\n", send=sent)

    async def aclose(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            for task in tuple(self._open):
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8", send: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + (body if send else b"")
