"""TLS of what speaks HTTP: what the router and the port for metrics show, and how engines are reached.

Certificates are exchanged while it runs: a new connection gets what is there then, and those that are open go
on. So files of which some do not fit the others change nothing, and are named in the log.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.router.reloading import FileProblemError, Reloaded, read_file

_ALPN = ("http/1.1",)
_REVOCATIONS = b"-----BEGIN X509 CRL-----"


class ChangingContext(ssl.SSLContext):
    """A context that has each connection made with the one that is in force.

    It is handed to whoever makes connections, once; `current` may be replaced at any time.
    """

    current: ssl.SSLContext

    def use(self, context: ssl.SSLContext) -> None:
        """Have connections made with another one from now on."""
        self.current = context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """See ssl.SSLContext: event loops make connections by this."""
        return self.current.wrap_bio(*args, **options)


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """PEM files of an own certificate. With `client_ca`, clients need a certificate of those.

    `options` is what the options that name them begin with, for errors. With `lets_in_others` clients may
    have no certificate; one that they have is looked at all the same.
    """

    cert: str
    key: str
    client_ca: str | None = None
    options: str = "--"
    lets_in_others: bool = False

    def paths(self) -> list[str]:
        """Return those that are named."""
        return [path for path in (self.cert, self.key, self.client_ca) if path is not None]

    def context(self) -> ssl.SSLContext:
        """Return a server's context. Raises FileProblemError. Blocks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        _load_pair(context, self.cert, self.key, (f"{self.options}tls-cert", f"{self.options}tls-key"))
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_OPTIONAL if self.lets_in_others else ssl.CERT_REQUIRED
            _load_authorities(context, self.client_ca, f"{self.options}client-ca")
            # A session that is resumed shows no certificate again, whatever has become of its authority.
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
        return context


@dataclass(frozen=True, slots=True)
class EngineFiles:
    """PEM files for engines by https: their authorities, and the certificate the router shows them."""

    ca: str | None = None
    """None: those the system trusts."""
    cert: str | None = None
    key: str | None = None

    def paths(self) -> list[str]:
        """Return those that are named."""
        return [path for path in (self.ca, self.cert, self.key) if path is not None]

    def context(self) -> ssl.SSLContext:
        """Return a client's context. Raises FileProblemError. Blocks."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_ALPN)
        if self.ca is not None:
            _load_authorities(context, self.ca, "--engine-ca")
        else:
            context.load_default_certs()
        if self.cert is not None and self.key is not None:
            _load_pair(context, self.cert, self.key, ("--engine-cert", "--engine-key"))
        return context


def _load_pair(context: ssl.SSLContext, cert: str, key: str, flags: Sequence[str]) -> None:
    raw = read_file(key, flags[1])
    read_file(cert, flags[0])
    if b"ENCRYPTED" in raw:
        raise FileProblemError(f"{flags[1]} {key}: has a password; write the key without one")
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise FileProblemError(f"{flags[1]} {key}: is not the key of {flags[0]} {cert}") from None
        raise FileProblemError(
            f"{flags[0]} {cert}, {flags[1]} {key}: cannot be read as a certificate and its key in PEM"
        ) from None
    except (OSError, ValueError) as error:
        raise FileProblemError(f"{flags[0]} {cert}, {flags[1]} {key}: {error}") from None


def _load_authorities(context: ssl.SSLContext, path: str, flag: str) -> None:
    """Trust the authorities of a file; with revocation lists in it, nobody whom they do not speak for."""
    raw = read_file(path, flag)
    try:
        context.load_verify_locations(cadata=raw.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise FileProblemError(f"{flag} {path}: has no certificates in PEM") from None
    if _REVOCATIONS in raw:
        try:
            context.load_verify_locations(path)  # `cadata` is read for certificates alone
        except OSError:
            raise FileProblemError(f"{flag} {path}: its revocation list cannot be read") from None
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def authorities(path: str, flag: str) -> ssl.SSLContext:
    """Return a client's context that trusts a file's authorities alone. Raises FileProblemError. Blocks."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_authorities(context, path, flag)
    return context


class Tls:
    """A context made of files, and what keeps it current.

    After `start`, `context` is for whoever listens or connects; `files.run` keeps it current.
    """

    def __init__(self, what: str, files: ServerFiles | EngineFiles) -> None:
        server = isinstance(files, ServerFiles)
        protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
        self.context = ChangingContext(protocol)
        self.files: Reloaded[ssl.SSLContext] = Reloaded(
            what, files.context, lambda context: files.paths(), on_change=self.context.use
        )

    async def start(self) -> ssl.SSLContext:
        """Read the files; returns the context. Raises FileProblemError."""
        await self.files.start()
        return self.context
