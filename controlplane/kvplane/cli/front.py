"""What a router's HTTP hops are protected by, checked before anything runs."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import structlog

from kvplane.cli.config import Config
from kvplane.router.settings import SettingsError, engine_url
from kvplane.router.tls import EngineFiles, ServerFiles

log = structlog.get_logger(__name__)


def is_loopback(host: str) -> bool:
    """Tell whether a host, as it is written in an option or a URL, is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def server_files(config: Config) -> ServerFiles | None:
    """Return the files of the router's certificate, None where it has none. Raises SettingsError."""
    if config.tls_cert is None and config.tls_key is None:
        if config.client_ca is not None:
            raise SettingsError(f"--client-ca {config.client_ca}: needs --tls-cert and --tls-key")
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise SettingsError("--tls-cert, --tls-key: one needs the other")
    return ServerFiles(config.tls_cert, config.tls_key, config.client_ca)


def engine_files(config: Config) -> EngineFiles:
    """Return the files for engines by https."""
    return EngineFiles(config.engine_ca, config.engine_cert, config.engine_key)


def check_hops(config: Config) -> None:
    """Refuse hops beyond loopback that nothing protects, unless asked to; then warn. Raises SettingsError."""
    _check_front(config)
    _check_engines(config)


def _check_front(config: Config) -> None:
    if is_loopback(config.host):
        return
    encrypted = server_files(config) is not None
    authenticated = config.client_ca is not None or config.tenants is not None
    if encrypted and authenticated:
        return
    if not config.allow_remote:
        missing = [
            *([] if encrypted else ["encryption (--tls-cert, --tls-key)"]),
            *([] if authenticated else ["authentication (--tenants, --client-ca)"]),
        ]
        raise SettingsError(
            f"--host {config.host}: beyond loopback without {' and '.join(missing)}; give that, use"
            " 127.0.0.1, or add --allow-remote inside a trusted network"
        )
    log.warning(
        "listening_beyond_loopback", host=config.host, encryption=encrypted, authentication=authenticated
    )


def _check_engines(config: Config) -> None:
    plain = [
        (flag, url)
        for flag, urls in (
            ("--prefill", config.prefill),
            ("--decode", config.decode),
            ("--prefill-dns", config.prefill_dns),
            ("--decode-dns", config.decode_dns),
        )
        for url in urls
        if not _is_protected(url, flag)
    ]
    plain += [
        (flag, selector)
        for flag, selector in (
            ("--kubernetes-prefill", config.kubernetes_prefill),
            ("--kubernetes-decode", config.kubernetes_decode),
        )
        if selector
    ]
    if not plain:
        return
    if not config.allow_remote:
        flag, url = plain[0]
        raise SettingsError(
            f"{flag} {url}: engines beyond loopback without https: use https, or add --allow-remote inside a"
            " trusted network"
        )
    log.warning("engines_without_encryption", flags=sorted({flag for flag, _ in plain}))


def _is_protected(url: str, flag: str) -> bool:
    parts = urlsplit(engine_url(url, flag))
    return parts.scheme == "https" or is_loopback(parts.hostname or "")
