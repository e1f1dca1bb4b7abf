"""What guards the port for metrics: checked before it listens, and its certificate followed while it does."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from kvplane.cli.config import Config
from kvplane.cli.errors import StartError
from kvplane.cli.front import is_loopback
from kvplane.router.reloading import FileProblemError
from kvplane.router.tls import ServerFiles, Tls

log = structlog.get_logger(__name__)


def metrics_files(config: Config) -> ServerFiles | None:
    """Return the files of the port's certificate, None where it speaks plaintext. Raises StartError.

    Who has no certificate connects all the same: a kubelet that asks for health has none.
    """
    cert, key, ca = config.metrics_tls_cert, config.metrics_tls_key, config.metrics_client_ca
    if cert is None and key is None:
        if ca is not None:
            raise StartError(f"--metrics-client-ca {ca}: needs --metrics-tls-cert and --metrics-tls-key")
        return None
    if cert is None or key is None:
        raise StartError("--metrics-tls-cert, --metrics-tls-key: one needs the other")
    return ServerFiles(cert, key, ca, "--metrics-", lets_in_others=True)


def check_metrics_reach(config: Config) -> None:
    """Refuse to show metrics beyond loopback in clear, or to anyone, unless asked to; then warn.

    Raises StartError.
    """
    host, encrypted = config.metrics_host, config.metrics_tls_cert is not None
    authenticated = config.metrics_client_ca is not None
    if is_loopback(host) or (encrypted and authenticated):
        return
    if not config.allow_remote:
        missing = "--metrics-client-ca" if encrypted else "--metrics-tls-cert, -key and --metrics-client-ca"
        raise StartError(
            f"--metrics-host {host}: anyone who reaches it could read tenants' names and how much they use;"
            f" use 127.0.0.1, give {missing}, or add --allow-remote inside a trusted network"
        )
    log.warning("listening_beyond_loopback", host=host, encryption=encrypted, authentication=authenticated)


@asynccontextmanager
async def metrics_tls(config: Config) -> AsyncIterator[ssl.SSLContext | None]:
    """Check the options, and give the context to listen with, None for plaintext. Raises StartError.

    While it is open, its files are followed.
    """
    files = metrics_files(config)
    check_metrics_reach(config)
    if files is None:
        yield None
        return
    tls = Tls("certificate of the port for metrics", files)
    try:
        context = await tls.start()
    except FileProblemError as error:
        raise StartError(str(error)) from None
    following = asyncio.create_task(tls.files.run(), name="metrics certificate")
    try:
        yield context
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
