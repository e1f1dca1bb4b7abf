"""What an etcd store has to know."""

from __future__ import annotations

from dataclasses import dataclass, field

DEFAULT_PREFIX = b"/kvplane/"
DEFAULT_TIMEOUT_S = 2.0
MAX_PREFIX_BYTES = 128
"""So that the largest transaction, whose every key grows by the prefix, stays below etcd's request limit."""


@dataclass(frozen=True, slots=True)
class EtcdTlsPaths:
    """Where the contents come from; "" for what is not given, or not from a file."""

    ca: str = ""
    cert: str = ""
    key: str = ""


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """Contents of PEM files. Without `ca` the system's authorities count.

    `cert` and `key` belong together: what the client shows of itself. `server_name` is the name to look for
    in the servers' certificates, if not that of the endpoint. With `paths` the files are read again where
    connections are made anew.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str = ""
    paths: EtcdTlsPaths = field(default=EtcdTlsPaths(), compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Endpoints are host:port, IPv6 hosts in brackets. All keys of the store lie below `prefix`.

    `timeout_s` is the deadline of every call, retries of reads included. With `password_file` it is read
    again when etcd asks for the password, in place of `password`. Raises ValueError.
    """

    endpoints: tuple[str, ...]
    prefix: bytes = DEFAULT_PREFIX
    timeout_s: float = DEFAULT_TIMEOUT_S
    tls: EtcdTls | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ValueError("at least one endpoint is needed")
        if not 0 < len(self.prefix) <= MAX_PREFIX_BYTES:
            raise ValueError(f"a prefix has 1 to {MAX_PREFIX_BYTES} bytes, not {len(self.prefix)}")
        if not self.timeout_s > 0:
            raise ValueError(f"a timeout is more than 0 seconds, not {self.timeout_s}")
