"""Configuration: flag > KVPLANE_* environment variable > TOML file > default. Checked before use."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from kvplane.cli.errors import IN_SECONDS
from kvplane.cli.errors import ConfigError as ConfigError
from kvplane.router.identity import SOURCES
from kvplane.store.files import MAX_FILE_BYTES

ENV_PREFIX = "KVPLANE_"
_DAY_S = 86_400
_WEEK_S = 7 * _DAY_S
ENV_OF_OTHERS = frozenset(
    {
        "KVPLANE_ADDRESS",
        "KVPLANE_CONFIG",
        "KVPLANE_ENDPOINT",
        "KVPLANE_ETCD",
        "KVPLANE_HTTP_CA",
        "KVPLANE_ROUTER",
        "KVPLANE_VLLM_VENV",
    }
)
"""Variables of the connector, of commands that are no servers, and of the demo's rig."""


_SERVICE_LINK = re.compile(r"KVPLANE_(SERVICE_|PORT_\d+_)")
"""What Kubernetes puts into the environment next to a service called kvplane."""


class Config(BaseSettings):
    """All options of all commands. Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    store: str = Field(
        "memory://",
        description="Where the control plane keeps its state: memory://, or etcd://[USER@]HOST:PORT[,HOST:PORT...][/PREFIX]"
        "[?OPTIONS], options tls, ca, cert, key, server_name, password_file, timeout.",
    )
    grpc_host: str = Field("127.0.0.1", description="Address the control plane listens on.")
    grpc_port: int = Field(50051, ge=0, le=65535, description="Its port; 0 takes a free one.")
    grpc_tls_cert: str | None = Field(
        None,
        description="File with the control plane's certificate in PEM, followed by those of authorities"
        " between. Files of certificates are read again when they change.",
    )
    grpc_tls_key: str | None = Field(None, description="File with its private key.")
    grpc_client_ca: str | None = Field(
        None,
        description="File with the authorities of callers' certificates: who has none cannot connect.",
    )
    access: str | None = Field(
        None,
        description="Access file (TOML): who may call the control plane, in which role."
        " Without it everyone may do everything. Read again when it changes.",
    )
    host: str = Field("127.0.0.1", description="Address the router listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Its port; 0 takes a free one.")
    allow_remote: bool = Field(
        False,
        description="Listen beyond loopback without encryption or authentication, and talk to engines there"
        " without encryption.",
    )
    tls_cert: str | None = Field(
        None,
        description="File with the router's certificate in PEM; it serves https then. Read when it changes.",
    )
    tls_key: str | None = Field(None, description="File with its key, without a password.")
    client_ca: str | None = Field(
        None, description="File with authorities of clients' certificates: then clients need one."
    )
    engine_ca: str | None = Field(
        None, description="File with authorities of engines by https; by default those the system trusts."
    )
    engine_cert: str | None = Field(
        None, description="File with the certificate that the router shows to engines by https."
    )
    engine_key: str | None = Field(None, description="File with its key.")
    engine_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Where engines that register themselves may be: addresses, networks (10.0.0.0/8), names,"
        " *.SUFFIX. By default anywhere but link-local and clouds' metadata addresses.",
    )
    prefill: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Base URLs of prefill engines; in the environment separated by commas."
    )
    decode: Annotated[tuple[str, ...], NoDecode] = Field((), description="Base URLs of decode engines.")
    prefill_dns: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Base URLs with DNS names, such as http://NAME:PORT; each address is a prefill engine.",
    )
    decode_dns: Annotated[tuple[str, ...], NoDecode] = Field((), description="The same for decode engines.")
    dns_interval: float = Field(
        5.0, gt=0, le=_DAY_S, description="Seconds after which names are looked up again."
    )
    kubernetes_prefill: str | None = Field(
        None,
        description="Label selector of the pods that are prefill engines, such as app=vllm,role=prefill.",
    )
    kubernetes_decode: str | None = Field(None, description="The same for decode engines.")
    kubernetes_namespace: str | None = Field(
        None, description="Their namespace; by default the router's own."
    )
    kubernetes_port: str = Field(
        "8000", description="Their HTTP port: a number, or the name of a container's port."
    )
    kubernetes_api: str | None = Field(None, description="Base URL of the API server; in a pod it is known.")
    kubernetes_token_file: str | None = Field(
        None, description="File with the token for it; by default that of the pod's service account."
    )
    kubernetes_ca_file: str | None = Field(
        None, description="File with its certificate authority; by default that of the pod."
    )
    engine_api_key_file: str | None = Field(
        None,
        description="File with the API keys that engines were started with (--api-key), one a line, or URL"
        " KEY for one engine: the router itself asks them what they serve. Read anew when it asks.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Router processes that share the port; limits on requests are split between them.",
    )
    plane: str | None = Field(
        None,
        description="Control planes of a router that runs alone: HOST:PORT, IP:PORT,IP:PORT,..."
        " or dns:///NAME:PORT.",
    )
    plane_tls: bool = Field(False, description="Reach the control plane by TLS; with one of the next it is.")
    plane_ca: str | None = Field(
        None, description="File with the authorities of its certificate; by default the system's."
    )
    plane_cert: str | None = Field(None, description="File with the certificate to show it.")
    plane_key: str | None = Field(None, description="File with that certificate's private key.")
    plane_server_name: str | None = Field(
        None, description="Name in its certificate, if not that in --plane: for lists of addresses."
    )
    plane_token_file: str | None = Field(
        None, description="File with the token to show it. These files are read again when they change."
    )
    path: Literal["auto", "cold", "pull", "direct"] = Field(
        "auto", description="auto, cold, pull or direct; auto takes the cheapest way."
    )
    allow_path_header: bool = Field(
        True, description="Let a request force its path with the header x-kvplane-path."
    )
    identity: Annotated[tuple[str, ...], NoDecode] = Field(
        SOURCES,
        description="Where conversation ids come from, in this order: body fields (conversation_id,"
        " conversation, prompt_cache_key, previous_response_id, session_id), header:NAME, automatic.",
    )
    tenant: str = Field("default", description="Tenant that all requests of this router belong to.")
    tenants: str | None = Field(
        None,
        description="TOML file with the tenants: their API keys (hashed), tokens and quotas; each request"
        " needs one of them then. Read when it changes.",
    )
    direct_max_new_tokens: int = Field(
        2048,
        ge=0,
        description="Up to so many new tokens go straight to the decode engine that holds the rest.",
    )
    recompute_threshold: int = Field(
        64, ge=0, description="Fewer held tokens than this are not worth a pull; as kv_recompute_threshold."
    )
    turn_wait: float = Field(
        0.05, ge=0, le=5, description="Longest wait for a conversation's turn in flight, in seconds."
    )
    tool_ttl: float = Field(
        300.0,
        gt=0,
        le=_WEEK_S,
        description="Seconds for which a conversation whose reply calls tools is to be kept.",
    )
    request_timeout: float = Field(
        0.0,
        ge=0,
        le=_WEEK_S,
        description="Longest a request may take in all, in seconds; 0 sets no limit. A request's"
        " x-request-timeout (seconds) or its SDK's own timeout may shorten it.",
    )
    max_requests: int = Field(
        4096, ge=0, description="Requests under way in the router; one more is answered 429. 0: no limit."
    )
    max_engine_requests: int = Field(
        1024, ge=0, description="Requests of the router's on one engine; more wait. 0: no limit."
    )
    max_queued: int = Field(
        1024, ge=0, description="Requests that wait for an engine; one more is answered 429."
    )
    queue_timeout: float = Field(
        30.0, gt=0, le=_DAY_S, description="Seconds a request waits for an engine; then 503 with Retry-After."
    )
    eject_after: int = Field(
        5, ge=0, description="Failed requests in a row that take an engine out of rotation; 0: none do."
    )
    ejection_time: float = Field(
        5.0,
        gt=0,
        le=60,
        description="Seconds until an engine that was taken out is tried again; doubles, up to 60.",
    )
    slow_start: float = Field(
        10.0,
        ge=0,
        le=_DAY_S,
        description="Seconds over which an engine that is back gets its full share again.",
    )
    explained_turns: int = Field(
        2000, ge=0, description="Requests whose decisions the router keeps for kvplane explain."
    )
    debug_remote: bool = Field(
        False, description="Let others than loopback read them, at /debug/turns/REQUEST_ID."
    )
    location_ttl: float = Field(
        480.0, gt=0, le=_WEEK_S, description="Longest life of a location in seconds, whatever was announced."
    )
    min_remaining: float = Field(
        10.0, ge=0, le=_WEEK_S, description="A location with fewer seconds left is not handed out."
    )
    claim_timeout: float = Field(
        30.0, gt=0, le=_DAY_S, description="Seconds within which a reader must have begun."
    )
    engine_lease: float = Field(
        10.0, ge=2, le=_DAY_S, description="An engine unheard of for so many seconds is gone."
    )
    max_staleness: float = Field(
        2.0,
        ge=0.5,
        le=_DAY_S,
        description="Seconds without word of a shared store after which a replica gives no answers.",
    )
    max_conversations: int = Field(
        1_000_000, ge=1, description="Conversations on record; beyond it the oldest go."
    )
    otel_endpoint: str | None = Field(
        None,
        description="URL of a collector that takes OTLP over gRPC, such as http://127.0.0.1:4317: spans of"
        " each request go there. Needs the extra kvplane[otel].",
    )
    tenant_limits: str | None = Field(
        None,
        description="TOML file with what each tenant may retain and ask for: [default] and [tenants.NAME]"
        " with conversations, blocks, operations_per_second. Read again when it changes.",
    )
    drain_timeout: float = Field(
        30.0, ge=0, le=_DAY_S, description="Seconds that open streams may take to finish after SIGTERM."
    )
    drain_grace: float = Field(
        0.0,
        ge=0,
        le=_DAY_S,
        description="Seconds for which the router goes on accepting after SIGTERM while /ready answers 503,"
        " so that a load balancer can take it out.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port for GET /metrics of all that runs here; 0 takes a free one. Without it a control"
        " plane shows none, and a router only at its own port.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address that /metrics is served on.")
    metrics_tls_cert: str | None = Field(
        None,
        description="File with a certificate in PEM for that port, which serves https then; it may be the one"
        " of another port. Read again when it changes.",
    )
    metrics_tls_key: str | None = Field(None, description="File with its key, without a password.")
    metrics_client_ca: str | None = Field(
        None, description="File with authorities of scrapers' certificates: then scrapers need one."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto, console or json; auto is console on a terminal."
    )

    @field_validator(
        "prefill", "decode", "prefill_dns", "decode_dns", "identity", "engine_hosts", mode="before"
    )
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("grpc_host", "host", "metrics_host", mode="before")
    @classmethod
    def _without_brackets(cls, value: object) -> object:
        """An IPv6 address in brackets, as in URLs, is meant as what is in them."""
        if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
            return value[1:-1]
        return value


def load_config(
    flags: Mapping[str, Any], file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Config:
    """Return the effective configuration. Flags that are None or empty are not given. Raises ConfigError."""
    _check_environment(environment)
    tables = _check_file(file) if file is not None else {}
    given = {name: value for name, value in flags.items() if value not in (None, (), [])}

    class Loaded(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            toml = TomlConfigSettingsSource(settings_cls, file) if tables else None
            return (init_settings, env_settings, *((toml,) if toml else ()))

    try:
        config = Loaded(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0]) if problem["loc"] else "configuration"
        field = Config.model_fields.get(name)
        unit = IN_SECONDS if field is not None and field.annotation is float else ""
        raise ConfigError(f"{_spelled(name, given, tables, file)}: {problem['msg'].lower()}{unit}") from None
    except SettingsError as error:
        raise ConfigError(f"{error}".splitlines()[0]) from None
    _check_relations(config)
    return config


def environment_with(**more: str) -> dict[str, str]:
    """Return this process's environment and more, for a process that it starts."""
    return {**os.environ, **more}


def toml_line(name: str, value: object) -> str:
    """Return an option as a line of a configuration file; a comment where it has no value."""
    # What JSON can say of numbers, booleans, text and lists, is TOML too.
    return f"# {name} is not set" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}"


def _spelled(name: str, given: Mapping[str, Any], tables: Mapping[str, Any], file: Path | None) -> str:
    """Return an option's name as the user wrote it."""
    if name in given:
        return f"--{name.replace('_', '-')} {given[name]}"
    variable = f"{ENV_PREFIX}{name.upper()}"
    if variable in os.environ:
        return f"{variable}={os.environ[variable]}"
    return f"--config {file}: {name} = {tables[name]!r}" if name in tables else name


def kubernetes_api(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the base URL of the API server of the cluster this process runs in, None outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Where signs of life of this process go, and within how many seconds one is waited for."""

    address: str
    patience_s: float


def watchdog(environment: Mapping[str, str] = os.environ, pid: int | None = None) -> Watchdog | None:
    """Return who waits for signs of life of the process `pid`, this one unless given; None if nobody does."""
    address, patience = environment.get("NOTIFY_SOCKET", ""), environment.get("WATCHDOG_USEC", "")
    mine = environment.get("WATCHDOG_PID", "") in ("", str(pid or os.getpid()))
    if not address or not patience.isdecimal() or not int(patience) or not mine:
        return None
    if address.startswith("@"):  # a name that is no file's
        address = "\0" + address[1:]
    return Watchdog(address, int(patience) / 1_000_000)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(names))}"


def _check_environment(environment: Mapping[str, str]) -> None:
    known = [f"{ENV_PREFIX}{name.upper()}" for name in Config.model_fields]
    for name, value in environment.items():
        if _SERVICE_LINK.match(name) or not name.startswith(ENV_PREFIX):
            continue
        if value.startswith("tcp://"):
            raise ConfigError(
                f"environment variable {name}={value} comes from a Kubernetes service of the same name:"
                " set enableServiceLinks: false in the pod"
            )
        if name not in known and name not in ENV_OF_OTHERS:
            raise ConfigError(f"environment variable {name} is unknown{_nearest(name, known)}")


def _check_file(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"--config {file}: larger than {MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"--config {file}: {(error.strerror or 'cannot be read').lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {file}: not TOML: {error}") from None
    for name, value in tables.items():
        if name not in Config.model_fields and isinstance(value, dict):
            raise ConfigError(
                f"--config {file}: [{name}] is unknown: keys are flat, one file for all commands;"
                " leave the section's line out"
            )
        if name not in Config.model_fields:
            raise ConfigError(
                f"--config {file}: {name} is unknown{_nearest(name, list(Config.model_fields))}"
            )
    return tables


def _check_relations(config: Config) -> None:
    if config.min_remaining >= config.location_ttl:
        raise ConfigError(
            f"--min-remaining ({config.min_remaining:g} s) must be below --location-ttl"
            f" ({config.location_ttl:g} s): otherwise no location is ever handed out"
        )
    if config.claim_timeout >= config.location_ttl:
        raise ConfigError(
            f"--claim-timeout ({config.claim_timeout:g} s) must be below --location-ttl"
            f" ({config.location_ttl:g} s)"
        )
