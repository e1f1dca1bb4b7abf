"""Options that guard the control plane's port, and those by which it is reached: checked, put together."""

from __future__ import annotations

import asyncio

import structlog

from kvplane.cli.config import Config, ConfigError
from kvplane.cli.front import is_loopback
from kvplane.client.credentials import SecuritySettings as ClientSecurity
from kvplane.client.credentials import check_reach, open_credentials, setting_of
from kvplane.client.files import FileError
from kvplane.controlplane.security import SecurityError, open_security
from kvplane.controlplane.security import SecuritySettings as ServerSecurity
from kvplane.controlplane.tls import TlsFiles

log = structlog.get_logger(__name__)

_ANY_HOST = ("0.0.0.0", "::", "[::]")  # noqa: S104 - what may be listened on, and is in no certificate


def server_security(config: Config) -> ServerSecurity:
    """Return what guards the control plane's port. Raises ConfigError."""
    cert, key, ca = config.grpc_tls_cert, config.grpc_tls_key, config.grpc_client_ca
    if bool(cert) != bool(key):
        given, missing = ("cert", "key") if cert else ("key", "cert")
        raise ConfigError(f"--grpc-tls-{missing} is missing: it belongs to --grpc-tls-{given}")
    if ca and not cert:
        raise ConfigError(
            "--grpc-client-ca: needs --grpc-tls-cert and --grpc-tls-key: callers show theirs by TLS"
        )
    tls = TlsFiles(cert, key, ca or "") if cert and key else None
    return ServerSecurity(tls, config.access or "")


def check_grpc_reach(config: Config) -> None:
    """Refuse to listen beyond loopback in clear, or without knowing who calls, unless asked to.

    Raises ConfigError.
    """
    host = config.grpc_host
    encrypted, authenticated = bool(config.grpc_tls_cert), bool(config.access or config.grpc_client_ca)
    if is_loopback(host) or (encrypted and authenticated):
        return
    if not config.allow_remote:
        if encrypted:
            problem, remedy = "claim KV locations", "--access or --grpc-client-ca"
        else:
            problem, remedy = "read and claim KV locations", "--grpc-tls-cert, --grpc-tls-key and --access"
        raise ConfigError(
            f"--grpc-host {host}: anyone who reaches it could {problem}; use 127.0.0.1, or give it {remedy},"
            " or add --allow-remote inside a trusted network"
        )
    log.warning("listening_beyond_loopback", host=host, encryption=encrypted, authentication=authenticated)


def client_security(config: Config, address: str | None) -> ClientSecurity:
    """Return how the control plane at an address is reached. Raises ConfigError."""
    try:
        security = ClientSecurity(
            config.plane_tls,
            config.plane_ca or "",
            config.plane_cert or "",
            config.plane_key or "",
            config.plane_server_name or "",
            config.plane_token_file or "",
        )
        if address is not None:
            check_reach(address, security)
    except ValueError as error:
        name, _, problem = str(error).partition(":")
        raise ConfigError(f"--plane-{name.replace('_', '-')}:{problem.replace('_', '-')}") from None
    return security


async def check_files(config: Config, *, serves: bool = False, asks: bool = False) -> None:
    """Read the files that guard a control plane's port, and those by which a router asks one.

    Before anything starts, so that what is wrong with them is all that is said. Raises ConfigError, which
    names the option.
    """
    if serves:
        try:
            await open_security(server_security(config))
        except SecurityError as error:
            raise ConfigError(_with_option(config, str(error))) from None
    if asks:
        security = client_security(config, None)
        try:
            await asyncio.to_thread(open_credentials, security)
        except FileError as error:
            option = setting_of(security, error).replace("_", "-")
            raise ConfigError(f"--plane-{option} {error}") from None


def _with_option(config: Config, problem: str) -> str:
    """Return what is wrong with a file of the control plane's, with its option before its path."""
    for name in ("access", "grpc_client_ca", "grpc_tls_key", "grpc_tls_cert"):
        path = getattr(config, name)
        if path and problem.startswith((f"{path}:", f"{path},")):
            return f"--{name.replace('_', '-')} {problem}"
    return problem


def check_up(config: Config) -> None:
    """Refuse a router and a control plane in one that would not take each other. Raises ConfigError."""
    needs_token = bool(config.access) and not (config.plane_cert or config.plane_token_file)
    for is_missing, option, why in (
        (
            bool(config.grpc_tls_cert) and not (config.plane_ca or config.plane_tls),
            "plane-ca",
            "with --grpc-tls-cert the router, too, needs the authority of that certificate",
        ),
        (
            bool(config.grpc_client_ca) and not config.plane_cert,
            "plane-cert",
            "with --grpc-client-ca the router, too, needs a certificate, with --plane-key",
        ),
        (
            bool(config.grpc_tls_cert) and config.grpc_host in _ANY_HOST and not config.plane_server_name,
            "plane-server-name",
            f"with --grpc-host {config.grpc_host} the router, too, needs a name that is in --grpc-tls-cert",
        ),
        (
            needs_token,
            "plane-token-file",
            "with --access the router, too, needs a token, or a certificate (--plane-cert)",
        ),
    ):
        if is_missing:
            raise ConfigError(f"--{option} is missing: {why}")
