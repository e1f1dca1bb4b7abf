"""What a router is started with, checked before anything runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from kvplane.client.address import checked_address
from kvplane.client.credentials import SecuritySettings as PlaneSecurity
from kvplane.router.admission import AdmissionLimits
from kvplane.router.health import HealthLimits
from kvplane.router.identity import SOURCES, checked_sources
from kvplane.router.policy import PathMode, Thresholds
from kvplane.router.reach import Reach, ReachError
from kvplane.router.tls import EngineFiles, ServerFiles

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\.?$){_LABEL}(\.{_LABEL})*\.?|[0-9a-f.]*:[0-9a-f:.]*")
"""A host name of DNS labels (with underscores, as container networks have them), or an address."""


_USUAL_PORTS = {"--router": 8000, "--prefill": 8100, "--prefill-dns": 8100}
"""For examples; decode engines are at 8200."""


class SettingsError(ValueError):
    """A setting is unusable; the text is one line that names the flag and the remedy."""

    def __init__(self, text: str) -> None:
        # A value that is shown may hold whatever a file or the environment can.
        super().__init__(text if text.isprintable() else ascii(text)[1:-1])


def _as_url(text: str, flag: str) -> str:
    """Return how what lacks its scheme, and maybe its port, is written: without one, 80 is not meant."""
    if not text:
        return "http://HOST:PORT"
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and (":" not in host or host.endswith("]")):
        return f"http://{text}"
    bare = text.rstrip(":/").strip("[]")
    host = f"[{bare}]" if ":" in bare else bare
    return f"http://{host}:{_USUAL_PORTS.get(flag, 8200)}, with the port it listens on"


@lru_cache(maxsize=4096)
def engine_url(value: str, flag: str = "--decode") -> str:
    """Return an engine's base URL in its one spelling: lower-case host, no default port, no slash at the end.

    Raises SettingsError naming `flag`.
    """
    text = value.strip()
    if "://" not in text:
        raise SettingsError(f"{flag} {value}: not a URL; write it as {_as_url(text, flag)}")
    try:
        parts = urlsplit(text)
        port, host = parts.port, parts.hostname
    except ValueError:
        raise SettingsError(
            f"{flag} {value}: host and port cannot be read; write http://HOST:PORT, "
            "an IPv6 address in brackets as in http://[fd00::7]:8200"
        ) from None
    if parts.scheme not in ("http", "https"):
        raise SettingsError(f"{flag} {value}: engines speak http or https, not {parts.scheme}")
    if not host:
        raise SettingsError(f"{flag} {value}: the host is missing; write http://HOST:PORT")
    if not _HOST.fullmatch(host):
        raise SettingsError(f"{flag} {value}: {host} is no host name or address")
    if parts.username is not None or parts.query or parts.fragment:
        raise SettingsError(f"{flag} {value}: only scheme, host and port belong here")
    if parts.path not in ("", "/"):
        raise SettingsError(f"{flag} {value}: leave out the path {parts.path}")
    shown = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{shown}" + ("" if port in (None, default) else f":{port}")


def _urls(values: tuple[str, ...], flag: str) -> tuple[str, ...]:
    urls = tuple(engine_url(value, flag) for value in values)
    for url in urls:
        if urls.count(url) > 1:
            raise SettingsError(f"{flag} {url}: named twice; name each engine once")
    return urls


def _names(values: tuple[str, ...], flag: str) -> tuple[str, ...]:
    urls = _urls(values, flag)
    for url in urls:
        if not url.startswith("http://"):
            raise SettingsError(
                f"{flag} {url}: an engine is called by its address, which no certificate names; use http"
            )
    return urls


_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """Which pods are engines, and where to ask for them. Raises SettingsError."""

    api_url: str
    """Base URL of the API server."""
    prefill_selector: str = ""
    """Label selector of the pods that are prefill engines, "" for none."""
    decode_selector: str = ""
    namespace: str = ""
    """Where they are; "" reads the router's own from `namespace_file`."""
    port: str = "8000"
    """On which they serve HTTP: a number, or the name of a container's port."""
    token_file: str = f"{_ACCOUNT}/token"
    ca_file: str = f"{_ACCOUNT}/ca.crt"
    namespace_file: str = f"{_ACCOUNT}/namespace"

    def __post_init__(self) -> None:
        object.__setattr__(self, "api_url", engine_url(self.api_url, "--kubernetes-api"))
        if self.port.isdigit() and not 0 < int(self.port) <= 65535:
            raise SettingsError(f"--kubernetes-port {self.port}: must be 1 to 65535, or a port's name")
        if not self.port:
            raise SettingsError("--kubernetes-port: must be a number, or a port's name")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of one router. Times are in seconds. Raises SettingsError when they make no sense."""

    prefill_urls: tuple[str, ...] = ()
    decode_urls: tuple[str, ...] = ()
    prefill_dns: tuple[str, ...] = ()
    """Base URLs whose hosts are names: each of their addresses is a prefill engine."""
    decode_dns: tuple[str, ...] = ()
    dns_interval_s: float = 5.0
    kubernetes: KubernetesSettings | None = None
    """Pods that are engines."""
    engine_api_key_file: str | None = None
    """File with the API keys of engines, one a line, for what the router itself asks them."""
    engine_hosts: tuple[str, ...] = ()
    """Where engines that register themselves may be: see Reach."""
    engine_plaintext: bool = True
    """Whether they may be beyond loopback without https."""
    engine_tls: EngineFiles = field(default_factory=EngineFiles)
    tls: ServerFiles | None = None
    """The router's own certificate; None: it serves plain HTTP."""
    plane_address: str | None = None
    """Where the control plane listens; None serves without reuse."""
    plane_security: PlaneSecurity = field(default_factory=PlaneSecurity)
    """How it is reached."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    path: PathMode = PathMode.AUTO
    allow_path_header: bool = True
    """Whether a request may force its path with the header x-kvplane-path."""
    tenant_id: str = "default"
    tenants_file: str | None = None
    """Who the tenants are; None: all requests are of `tenant_id`."""
    processes: int = 1
    """Of this router's on its port, each with its part of tenants' quotas."""
    identity_sources: tuple[str, ...] = SOURCES
    """Where conversation ids are looked for, in this order: body fields, "header:NAME", "automatic"."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    plane_timeout_s: float = 0.25
    turn_wait_s: float = 0.05
    """How long the control plane may wait for a turn of the same conversation that is still in flight."""
    tool_ttl_s: float = 300.0
    """For how long a conversation whose reply calls tools is to be kept, as far as engines can."""
    connect_timeout_s: float = 2.0
    prefill_timeout_s: float = 300.0
    first_byte_timeout_s: float = 300.0
    """From sending a request to a decode engine until the first byte of its answer's body."""
    idle_timeout_s: float = 600.0
    """Longest silence within a stream."""
    request_timeout_s: float = 0.0
    """Longest a request may take in all; 0 sets no limit. Headers of the client's may shorten it."""
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    health: HealthLimits = field(default_factory=HealthLimits)
    explained_turns: int = 2000
    """Requests whose decisions are kept to be looked at; 0 keeps none."""
    debug_remote: bool = False
    """Whether others than loopback may look at them."""
    drain_timeout_s: float = 30.0
    drain_grace_s: float = 0.0
    """How long it goes on accepting once it is told to stop, while /ready answers 503."""
    poll_interval_s: float = 1.0
    probe_interval_s: float = 5.0
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    """Longest from a request's headers to the end of its body."""
    body_budget_bytes: int = 512 * 1024 * 1024
    """All bodies of requests that are under way, but for small ones that came with their headers."""
    send_timeout_s: float = 60.0
    """Longest that a stream waits for a client that takes no more of it."""
    keepalive_timeout_s: float = 75.0
    """Longest that a connection waits for a request's headers: its first, or the next."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefill_urls", _urls(self.prefill_urls, "--prefill"))
        object.__setattr__(self, "decode_urls", _urls(self.decode_urls, "--decode"))
        object.__setattr__(self, "prefill_dns", _names(self.prefill_dns, "--prefill-dns"))
        object.__setattr__(self, "decode_dns", _names(self.decode_dns, "--decode-dns"))
        if not (self.decode_urls or self.discovers) and self.plane_address is None:
            raise SettingsError(
                "--decode is missing: name a decode engine, such as --decode http://127.0.0.1:8200, "
                "or with --plane HOST:PORT a control plane where engines register"
            )
        if self.plane_address is not None:
            try:
                checked_address(self.plane_address)
            except ValueError as error:
                raise SettingsError(f"--plane: {error}") from None
        try:
            object.__setattr__(self, "identity_sources", checked_sources(self.identity_sources))
        except ValueError as error:
            raise SettingsError(f"--identity {error}") from None
        try:
            self.reach()
        except ReachError as error:
            raise SettingsError(f"--engine-hosts {error}") from None
        if (self.engine_tls.cert is None) is not (self.engine_tls.key is None):
            raise SettingsError("--engine-cert, --engine-key: one needs the other")
        if not 0 <= self.port <= 65535:
            raise SettingsError(f"--port {self.port}: must be 0 to 65535")
        if self.tenants_file is not None and self.tenant_id != "default":
            raise SettingsError(
                f"--tenant {self.tenant_id}: leave it out, --tenants says whose requests are whose"
            )
        if not 0 < len(self.tenant_id.encode("utf-8", "replace")) <= 256:
            raise SettingsError("--tenant: must be 1 to 256 bytes")
        for name in (
            "plane_timeout_s",
            "tool_ttl_s",
            "connect_timeout_s",
            "prefill_timeout_s",
            "first_byte_timeout_s",
            "idle_timeout_s",
            "poll_interval_s",
            "probe_interval_s",
            "dns_interval_s",
            "max_body_bytes",
            "body_timeout_s",
            "body_budget_bytes",
            "send_timeout_s",
            "keepalive_timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name}: must be above 0")
        for name in (
            "turn_wait_s",
            "drain_timeout_s",
            "drain_grace_s",
            "request_timeout_s",
            "explained_turns",
        ):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}: must be 0 or more")

    @property
    def discovers(self) -> bool:
        """Whether decode engines may come from names or labels."""
        by_label = self.kubernetes is not None and self.kubernetes.decode_selector
        return bool(self.decode_dns or by_label)

    def reach(self) -> Reach:
        """Return which engines may be talked to."""
        urls = (*self.prefill_urls, *self.decode_urls)
        named = {urlsplit(url).hostname or "" for url in urls}
        return Reach(self.engine_hosts, named=named, plaintext=self.engine_plaintext)
