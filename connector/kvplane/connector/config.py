"""The connector's settings, from `kv_connector_extra_config` and the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvplane.client.address import checked_address
from kvplane.client.credentials import SecuritySettings, check_reach, open_credentials, setting_of
from kvplane.client.files import FileError

PREFIX = "kvplane_"
ADDRESS_VARIABLE = "KVPLANE_ADDRESS"
"""Environment variable that stands in for `kvplane_address`."""
ENDPOINT_VARIABLE = "KVPLANE_ENDPOINT"
"""The same for `kvplane_endpoint`, which in a pod is not known before the pod has its address."""

_ADAPTIVE = "adaptive"
_MAX_TTL_S, _MIN_TTL_S, _MAX_AGE_S = 480.0, 20.0, 3600.0
_LONGEST_S = 7 * 86400.0
VLLM_TTL = "decoder_kv_blocks_ttl"
"""vLLM's own limit on how long a finished request's blocks are kept, in seconds."""
VLLM_TTL_S = 480.0
"""Its default."""


class ConfigError(ValueError):
    """A setting is missing, unknown or out of range; the message is one line and names it."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The connector's settings, checked.

    Attributes:
        address: where the control plane listens, "host:port" or "host:port,host:port".
        endpoint: HTTP base URL of this engine, "" if only routers know it.
        chunk_tokens: tokens per fingerprint entry; smaller finds longer equal prefixes and costs more.
        retain_fraction: largest share of the KV blocks kept for later turns.
        free_block_floor: share of the KV blocks below which kept ones are given back.
        remote_host: address other engines reach this one's NIXL side channel at, "" for vLLM's own.
        ttl_s: how long a turn is kept for its next one, in seconds; None: learned, turn by turn.
        max_ttl_s: longest lease a turn is given when it ends.
        min_ttl_s: shortest learned lease.
        max_age_s: for how long renewals may keep a turn, from its end.
        metrics_port: of the engine's own /metrics; the rank within data parallelism is added. 0: none.
        metrics_host: address it listens at.
        metrics_tls_cert: file with its certificate; it speaks https then. "": in clear.
        metrics_tls_key: file with the key of that certificate.
        metrics_client_ca: file with authorities of scrapers' certificates; "": they need none.
        tenant_weights: by which tenants share what may be retained; of those not named 1.
        tenant_id: whose conversations these are where no router of ours says so.
        ask_timeout_s: seconds a prefill request waits to learn where its conversation is, where no router of
            ours says so; 0: it is not asked.
        tls: speak TLS with the control plane; with one of the next four it is.
        ca: file with the authorities its certificate comes from, "" for the system's.
        cert: file with this engine's certificate.
        key: file with its private key.
        server_name: the name in the control plane's certificate, if not that of `address`.
        token_file: file with this engine's token.
    """

    address: str
    endpoint: str = ""
    chunk_tokens: int = 64
    retain_fraction: float = 0.5
    free_block_floor: float = 0.1
    remote_host: str = ""
    ttl_s: float | None = None
    max_ttl_s: float = _MAX_TTL_S
    min_ttl_s: float = _MIN_TTL_S
    max_age_s: float = _MAX_AGE_S
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_tls_cert: str = ""
    metrics_tls_key: str = ""
    metrics_client_ca: str = ""
    tenant_id: str = "default"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    ask_timeout_s: float = 0.3
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""

    @property
    def metrics_tls(self) -> tuple[str, str, str] | None:
        """Certificate, key and authorities for the own /metrics; None: in clear."""
        files = (self.metrics_tls_cert, self.metrics_tls_key, self.metrics_client_ca)
        return files if self.metrics_tls_cert else None

    @property
    def security(self) -> SecuritySettings:
        """How the control plane is reached. The connector follows the files while it runs."""
        return SecuritySettings(self.tls, self.ca, self.cert, self.key, self.server_name, self.token_file)


_SECURITY = ("ca", "cert", "key", "server_name", "token_file")
_KEYS = tuple(f"{PREFIX}{name}" for name in ConnectorConfig.__slots__)


def read_config(
    extra: Mapping[str, Any] | None, environment: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """Return the settings in vLLM's extra config.

    Keys that do not begin with "kvplane_" belong to others and are left alone.

    Raises:
        ConfigError: a kvplane_ key is unknown or its value is not usable.
    """
    given = {key: value for key, value in (extra or {}).items() if key.startswith(PREFIX)}
    for key in given:
        if key not in _KEYS:
            names = [name.removeprefix(PREFIX) for name in _KEYS]
            near = difflib.get_close_matches(key.removeprefix(PREFIX), names, 1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known: {', '.join(_KEYS)}"
            raise ConfigError(f"kv_connector_extra_config: unknown key {key}; {hint}")
    variables = os.environ if environment is None else environment
    address = given.get("kvplane_address") or variables.get(ADDRESS_VARIABLE, "")
    if not isinstance(address, str):
        raise ConfigError(
            f"kvplane_address: {address!r} is not a string; several are one string, separated by commas"
        )
    if not address.strip():
        raise ConfigError(
            "kv_connector_extra_config: kvplane_address is missing; set it to the control plane's host:port"
            f" (or set {ADDRESS_VARIABLE})"
        )
    ttl_s, max_ttl_s, min_ttl_s, max_age_s = _leases(given, extra or {})
    config = ConnectorConfig(
        address=_address(address.strip()),
        endpoint=_endpoint(_text(given, "kvplane_endpoint") or variables.get(ENDPOINT_VARIABLE, "")),
        chunk_tokens=_chunk_tokens(given.get("kvplane_chunk_tokens", 64)),
        retain_fraction=_share(given, "kvplane_retain_fraction", 0.5),
        free_block_floor=_share(given, "kvplane_free_block_floor", 0.1),
        remote_host=_host("kvplane_remote_host", _text(given, "kvplane_remote_host")),
        ttl_s=ttl_s,
        max_ttl_s=max_ttl_s,
        min_ttl_s=min_ttl_s,
        max_age_s=max_age_s,
        metrics_port=_port(given.get("kvplane_metrics_port", 0)),
        metrics_host=_text(given, "kvplane_metrics_host").strip("[]") or "127.0.0.1",
        **_metrics_tls(given),
        tenant_id=_tenant_id(_text(given, "kvplane_tenant_id", "default")),
        tenant_weights=_weights(given.get("kvplane_tenant_weights", {})),
        ask_timeout_s=_number(given, "kvplane_ask_timeout_s", 0.3, 30),
        tls=_flag(given, "kvplane_tls"),
        **{name: _text(given, f"{PREFIX}{name}") for name in _SECURITY},
    )
    try:
        check_reach(config.address, config.security)
        open_credentials(config.security)
    except ValueError as error:
        raise ConfigError(f"{PREFIX}{error}") from None
    except FileError as error:
        raise ConfigError(f"{PREFIX}{setting_of(config.security, error)}: {error}") from None
    return config


def _metrics_tls(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the own /metrics that name files."""
    keys = ("kvplane_metrics_tls_cert", "kvplane_metrics_tls_key", "kvplane_metrics_client_ca")
    cert, key, ca = (_text(given, name) for name in keys)
    if bool(cert) != bool(key) or (ca and not cert):
        missing = keys[0] if not cert else keys[1]
        raise ConfigError(f"{missing}: missing; a certificate and its key belong together")
    return {"metrics_tls_cert": cert, "metrics_tls_key": key, "metrics_client_ca": ca}


def _flag(given: Mapping[str, Any], key: str) -> bool:
    value = given.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{key}: {value!r} is not true or false")
    return value


def _address(value: str) -> str:
    value = _unicode("kvplane_address", value)
    try:
        return checked_address(value)
    except ValueError as error:
        raise ConfigError(f"kvplane_address: {error}") from None


def _endpoint(value: str) -> str:
    if not value:
        return ""
    try:
        parts = urlsplit(value)
        valid = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and not (parts.path.strip("/") or parts.query or parts.fragment)
        )
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"kvplane_endpoint: {value!r} is not an HTTP base URL without a path, such as http://10.0.0.7:8200"
            " or, with an IPv6 address, http://[fd00::7]:8200"
        )
    return value.rstrip("/")


def _host(key: str, value: str) -> str:
    if "/" in value or any(character.isspace() for character in value):
        raise ConfigError(f"{key}: {value!r} is not a host name or address, such as 10.0.0.7")
    return value.strip("[]")


def _chunk_tokens(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 65536:
        raise ConfigError(f"kvplane_chunk_tokens: {value!r} is not an integer from 1 to 65536")
    return value


def _leases(given: Mapping[str, Any], extra: Mapping[str, Any]) -> tuple[float | None, float, float, float]:
    """Return ttl_s, max_ttl_s, min_ttl_s and max_age_s, which have to fit each other.

    vLLM's own limit for a decode engine's blocks, if it is set, is the longest lease unless ours is set too.
    """
    fixed = given.get("kvplane_ttl_s", _ADAPTIVE)
    ttl_s = None if fixed == _ADAPTIVE else _seconds("kvplane_ttl_s", fixed, f' or "{_ADAPTIVE}"')
    max_age_s = _seconds("kvplane_max_age_s", given.get("kvplane_max_age_s", _MAX_AGE_S))
    longest = min(_MAX_TTL_S, max_age_s)
    if VLLM_TTL in extra:
        longest = min(longest, _seconds(VLLM_TTL, extra[VLLM_TTL]))
    max_ttl_s = _seconds("kvplane_max_ttl_s", given.get("kvplane_max_ttl_s", longest))
    min_ttl_s = _seconds("kvplane_min_ttl_s", given.get("kvplane_min_ttl_s", min(_MIN_TTL_S, max_ttl_s)))
    if ttl_s is not None and ttl_s > max_ttl_s:
        raise ConfigError(f"kvplane_ttl_s: {ttl_s:g} is above kvplane_max_ttl_s ({max_ttl_s:g})")
    if min_ttl_s > max_ttl_s:
        raise ConfigError(f"kvplane_min_ttl_s: {min_ttl_s:g} is above kvplane_max_ttl_s ({max_ttl_s:g})")
    if max_ttl_s > max_age_s:
        raise ConfigError(f"kvplane_max_ttl_s: {max_ttl_s:g} is above kvplane_max_age_s ({max_age_s:g})")
    return ttl_s, max_ttl_s, min_ttl_s, max_age_s


def _seconds(key: str, value: Any, instead: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= _LONGEST_S:
        raise ConfigError(f"{key}: {value!r} is not a number of seconds from 1 to {_LONGEST_S:g}{instead}")
    return float(value)


def _port(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 65535:
        raise ConfigError(f"kvplane_metrics_port: {value!r} is not a port from 1 to 65535, or 0 for none")
    return value


def _share(given: Mapping[str, Any], key: str, default: float) -> float:
    return _number(given, key, default, 1)


def _number(given: Mapping[str, Any], key: str, default: float, most: int) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ConfigError(f"{key}: {value!r} is not a number from 0 to {most}")
    return float(value)


def _tenant_id(value: str, key: str = "kvplane_tenant_id") -> str:
    if not 0 < len(value.encode()) <= 256:
        raise ConfigError(f"{key}: not of 1 to 256 bytes in UTF-8")
    return value


def _weights(value: Any) -> dict[str, float]:
    key = "kvplane_tenant_weights"
    if not isinstance(value, dict):
        raise ConfigError(f'{key}: {value!r} is not an object such as {{"acme": 3}}')
    for tenant, weight in value.items():
        _tenant_id(_unicode(key, tenant), key)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.001 <= weight <= 1000:
            raise ConfigError(f"{key}: {tenant}: {weight!r} is not a number from 0.001 to 1000")
    return {tenant: float(weight) for tenant, weight in value.items()}


def _text(given: Mapping[str, Any], key: str, default: str = "") -> str:
    value = given.get(key, default)
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {value!r} is not a string")
    return _unicode(key, value.strip())


def _unicode(key: str, value: str) -> str:
    """Refuse lone surrogates: JSON lets them through, gRPC and HTTP take no such text."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{key}: {value!r} is not valid Unicode") from None
    return value
