"""What a client shows of itself, and whom it trusts: files, read again when they change."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

import grpc

from kvplane.client.files import FileError, Watched, check_authorities, check_pair, read, read_token
from kvplane.client.logs import get_logger

_log = get_logger("kvplane.client")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """How to reach a control plane. All empty: plaintext, and nothing shown. Raises ValueError.

    Attributes:
        tls: speak TLS; with one of the next four it is.
        ca: path of the authorities' certificates that its certificate must come from; "": the system's.
        cert: path of the own certificate, followed by those between it and its authority.
        key: path of its private key, without a password.
        server_name: the name to look for in its certificate, if not that of the address.
        token_file: path of a file with the token to send.
    """

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert) != bool(self.key):
            given, missing = ("cert", "key") if self.cert else ("key", "cert")
            raise ValueError(f"{missing}: missing beside {given}; a certificate and its key belong together")
        if self.ca or self.cert or self.server_name:
            object.__setattr__(self, "tls", True)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.tls and not self.token_file


def check_reach(address: str, settings: SecuritySettings) -> None:
    """Raise ValueError if a certificate could not be compared with an address."""
    if settings.tls and "," in address and not settings.server_name:
        raise ValueError(
            "server_name: missing; several addresses need the one name that is in all their certificates"
        )


class Credentials:
    """The files of some settings, as they are now. Reading blocks. Raises FileError when it is made."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._settings = settings
        paths = (settings.ca, settings.cert, settings.key, settings.token_file)
        self._watched = Watched([path for path in paths if path])
        self._pem: tuple[bytes | None, bytes | None, bytes | None] = (None, None, None)
        self.metadata: Metadata | None = None
        """What goes with each call; None: nothing."""
        self._load()

    @property
    def tls(self) -> bool:
        """Whether channels are encrypted."""
        return self._settings.tls

    @property
    def server_name(self) -> str:
        """The name to look for in the server's certificate, "" for that of the address."""
        return self._settings.server_name

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a new channel."""
        ca, key, cert = self._pem
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _load(self) -> bool:
        """Read all files; tells whether a new channel is needed."""
        settings = self._settings
        if settings.cert:
            check_pair(settings.cert, settings.key)
        if settings.ca:
            check_authorities(settings.ca)
        before = self._pem
        ca, key, cert = (read(path) if path else None for path in (settings.ca, settings.key, settings.cert))
        token = read_token(settings.token_file) if settings.token_file else ""
        self._pem = (ca, key, cert)
        self.metadata = (("authorization", f"Bearer {token}"),) if token else None
        return self._pem != before

    def look(self) -> bool:
        """Look at the files once, and take what has changed; tells whether a new channel is needed.

        What cannot be used is logged, and the old stays in use. It blocks.
        """
        if not self._watched.look():
            return False
        try:
            changed = self._load()
        except FileError as error:
            _log.error("credentials_not_reloaded", problem=str(error), effect="the old ones stay in use")
            return False
        _log.info("credentials_reloaded", channel="new" if changed else "same")
        return changed

    def warn_if_readable(self, address: str) -> None:
        """Log it if a token would go in clear to another machine."""
        if self.metadata is not None and not self.tls and not is_loopback(address):
            _log.warning(
                "token_sent_unencrypted",
                kvplane_address=address,
                remedy="name the authority of its certificate",
            )


def open_credentials(settings: SecuritySettings | None) -> Credentials | None:
    """Return credentials, None where there is nothing to show and nobody to check. Raises FileError."""
    return None if settings is None or settings.empty else Credentials(settings)


def setting_of(settings: SecuritySettings, error: FileError) -> str:
    """Return the name of the setting whose file an error, which begins with its path, is about."""
    for name in ("token_file", "ca", "key", "cert"):
        path = getattr(settings, name)
        if path and str(error).startswith((f"{path}:", f"{path},")):
            return name
    return "cert"


def is_loopback(address: str) -> bool:
    """Whether an address, as `checked_address` takes it, is this machine's own."""
    for part in address.removeprefix("ipv4:").removeprefix("ipv6:").split(","):
        host = part.strip().rpartition(":")[0].rpartition("/")[2].strip("[]")
        try:
            if not ipaddress.ip_address(host).is_loopback:
                return False
        except ValueError:
            if host != "localhost" and not address.startswith("unix:"):
                return False
    return True
