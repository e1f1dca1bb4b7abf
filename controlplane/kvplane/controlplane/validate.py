"""Checks of what arrives. Each names the field and what it must be; limits are those of the protos."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from types import NoneType
from typing import Any
from urllib.parse import urlsplit

import orjson
from google.protobuf.duration_pb2 import Duration

from kvplane.controlplane import model as m
from kvplane.controlplane.errors import InvalidFieldError
from kvplane.v1 import common_pb2, engine_pb2

MAX_ID_BYTES = 256
MAX_PARAMS_BYTES = 1024 * 1024
MAX_CHAIN_BYTES = 1024 * 1024
MAX_RECORD_BYTES = 1_300_000
"""Params and fingerprint together: what one record of the store can hold (etcd: about 1.5 MB a request)."""
MAX_CHUNK_TOKENS = 65_536
MAX_BATCH = 1024
MAX_LEASE_CLASS = 1024
MAX_WAIT_S = 5.0
MAX_SPAN_S = 10 * 366 * 86_400
HASH_BYTES = 8
LOADS = ("running_requests", "waiting_requests", "free_blocks", "retained_blocks", "retained_conversations")
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\.?$){_LABEL}(\.{_LABEL})*\.?|[0-9a-f.]*:[0-9a-f:.]*")
"""A host name of DNS labels (with underscores, as container networks have them), or an address."""
_ZONE = re.compile(r"[0-9a-z_.-]{1,64}")
"""Of an IPv6 address: the interface."""
_MAX_PORT = 65_535
_MAX_PARALLEL = 65_536


def text(field: str, value: str, *, most: int = MAX_ID_BYTES, optional: bool = False) -> str:
    """Return the value if it is not empty (unless optional) and not too long."""
    if 0 < len(value) <= most // 4:  # no character takes more than four bytes
        return value
    if not value and not optional:
        raise InvalidFieldError(field, "must not be empty")
    if len(value.encode()) > most:
        raise InvalidFieldError(field, f"must be at most {most} bytes")
    return value


def is_id(value: str) -> bool:
    """Whether a value can be an id; nothing is on record under one that cannot."""
    return 0 < len(value.encode()) <= MAX_ID_BYTES


def claim_id(field: str, value: str) -> str:
    """Return a name that a caller may give a claim."""
    if value.startswith(m.QUARANTINE):
        raise InvalidFieldError(field, f'must not begin with "{m.QUARANTINE}"')
    return text(field, value)


def positive(field: str, value: int) -> int:
    """Return the value if it is above zero."""
    if value <= 0:
        raise InvalidFieldError(field, "must be greater than 0")
    return value


def epoch(field: str, value: int) -> int:
    """Return an engine epoch as RegisterEngine gave it."""
    if value <= 0:
        raise InvalidFieldError(field, "must be the epoch that RegisterEngine returned")
    return value


def batch(field: str, size: int, *, least: int = 0) -> None:
    """Check the number of elements."""
    if not least <= size <= MAX_BATCH:
        raise InvalidFieldError(field, f"must have {least} to {MAX_BATCH} elements")


def page_size(value: int) -> int:
    """Return a page size, the default for 0."""
    if not 0 <= value <= 1000:
        raise InvalidFieldError("page_size", "must be 0 to 1000")
    return value or 100


def span(field: str, value: Duration) -> float:
    """Return a duration above zero, in seconds."""
    seconds = value.seconds + value.nanos / 1e9
    if seconds <= 0:
        raise InvalidFieldError(field, "must be greater than 0")
    return seconds


def wait(value: Duration) -> float:
    """Return a wait, in seconds."""
    seconds = value.seconds + value.nanos / 1e9
    if not 0 <= seconds <= MAX_WAIT_S:
        raise InvalidFieldError("wait", f"must be 0 to {MAX_WAIT_S:g} s")
    return seconds


def key(wire: common_pb2.ConversationKey, field: str = "key") -> None:
    """Check a conversation key."""
    try:
        _scope(wire)
        text("conversation_id", wire.conversation_id)
    except InvalidFieldError as error:
        raise error.within(field) from None


def scope(wire: common_pb2.ConversationKey, field: str = "key") -> None:
    """Check all of a conversation key but the conversation's id."""
    try:
        _scope(wire)
    except InvalidFieldError as error:
        raise error.within(field) from None


def _scope(wire: common_pb2.ConversationKey) -> None:
    text("tenant_id", wire.tenant_id)
    text("model", wire.model)
    text("adapter", wire.adapter, optional=True)


def spec(wire: engine_pb2.EngineSpec) -> None:
    """Check an engine's spec."""
    text("spec.engine_id", wire.engine_id)
    if wire.role not in (
        engine_pb2.ENGINE_ROLE_PREFILL,
        engine_pb2.ENGINE_ROLE_DECODE,
        engine_pb2.ENGINE_ROLE_BOTH,
    ):
        raise InvalidFieldError("spec.role", "must be PREFILL, DECODE or BOTH")
    profile = wire.profile
    for name, most in (("model", 256), ("model_revision", 256), ("kv_dtype", 64), ("engine_version", 64)):
        text(f"spec.profile.{name}", getattr(profile, name), most=most, optional=True)
    if profile.transfer_mode not in ("", "pull"):
        raise InvalidFieldError(
            "spec.profile.transfer_mode", 'must be "pull": KV pushed by an engine cannot be read back'
        )
    for name in (
        "block_size",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(profile, name) < 0:
            raise InvalidFieldError(f"spec.profile.{name}", "must not be negative")
    text("spec.endpoint", wire.endpoint, most=2048, optional=True)
    endpoint("spec.endpoint", wire.endpoint)
    if wire.data_parallel_rank < 0 or wire.total_blocks < 0:
        raise InvalidFieldError("spec", "data_parallel_rank and total_blocks must not be negative")
    if len(wire.served_models) > 64:
        raise InvalidFieldError("spec.served_models", "must have at most 64 elements")
    for name in wire.served_models:
        text("spec.served_models", name)
    if wire.HasField("settings"):
        _settings(wire.settings)


def _settings(wire: engine_pb2.EngineSettings) -> None:
    field = "spec.settings"
    for name in ("kv_role", "kvplane_version", "kv_load_failure_policy", "refusal", "kv_digest"):
        text(f"{field}.{name}", getattr(wire, name), most=64, optional=True)
    text(f"{field}.side_channel_host", wire.side_channel_host, optional=True)
    if not 0 <= wire.side_channel_port <= _MAX_PORT:
        raise InvalidFieldError(f"{field}.side_channel_port", f"must be 0 to {_MAX_PORT}")
    for name in ("kv_blocks_ttl", "max_ttl"):
        value = getattr(wire, name)
        if value.seconds < 0 or value.nanos < 0 or value.seconds > MAX_SPAN_S:
            raise InvalidFieldError(f"{field}.{name}", "must be 0 to ten years")


def load(wire: engine_pb2.EngineLoad) -> engine_pb2.EngineLoad:
    """Return an engine's load if nothing of it is negative."""
    for name in LOADS:
        if getattr(wire, name) < 0:
            raise InvalidFieldError(f"load.{name}", "must not be negative")
    return wire


def endpoint(field: str, value: str) -> None:
    """Check an HTTP base URL; empty is allowed."""
    if value and not _is_base_url(value):
        raise InvalidFieldError(field, 'must be an HTTP base URL such as "http://10.0.0.7:8200"')


@lru_cache(maxsize=1024)  # engines say the same with every announcement
def _is_base_url(value: str) -> bool:
    try:
        parts = urlsplit(value)
        usable = parts.port != 0 and bool(_HOST.fullmatch(parts.hostname or ""))
    except ValueError:
        return False
    is_http = parts.scheme in ("http", "https")
    # What is left out here, and by urlsplit itself, would change what a path means that is put after it.
    plain = not any(c in "?#@" or c <= " " for c in value)
    return usable and is_http and not parts.path.strip("/") and plain


@lru_cache(maxsize=1024)
def _is_host(value: str) -> bool:
    """Tell whether a value is a host's name or address, and nothing that says more to who connects there."""
    host = value.lower()
    if ":" not in host:
        return _HOST.fullmatch(host) is not None
    address, percent, zone = host.removeprefix("[").removesuffix("]").partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _ZONE.fullmatch(zone) is not None


def announcement(wire: common_pb2.Announcement, engine_id: str, field: str = "announcement") -> None:
    """Check an announcement of an engine, its kv_transfer_params included."""
    try:
        _announcement(wire, engine_id)
    except InvalidFieldError as error:  # names are put together only where they are needed
        raise error.within(field) from None


def _announcement(wire: common_pb2.Announcement, engine_id: str) -> None:
    token_count, params, fingerprint = wire.token_count, wire.kv_transfer_params, wire.fingerprint
    key(wire.key)
    text("request_id", wire.request_id)
    positive("turn", wire.turn)
    positive("token_count", token_count)
    positive("block_count", wire.block_count)
    span("ttl", wire.ttl)
    text("endpoint", wire.endpoint, most=2048, optional=True)
    endpoint("endpoint", wire.endpoint)
    if not 0 <= wire.lease_class <= MAX_LEASE_CLASS:
        raise InvalidFieldError("lease_class", f"must be 0 to {MAX_LEASE_CLASS}")
    chain_bytes = _fingerprint(fingerprint, token_count, "fingerprint")
    _params(params, engine_id, "kv_transfer_params")
    if len(params) + chain_bytes > MAX_RECORD_BYTES:
        raise InvalidFieldError(
            "kv_transfer_params",
            f"and fingerprint.chain together must be at most {MAX_RECORD_BYTES} bytes;"
            " use larger KV blocks or a larger chunk_tokens",
        )


def prompt(wire: common_pb2.Fingerprint, field: str = "fingerprint") -> None:
    """Check a prompt's fingerprint; how many tokens its last entry stands for is nobody's business here."""
    _chain(wire, field)
    if not wire.chain or len(wire.chain) % HASH_BYTES:
        raise InvalidFieldError(f"{field}.chain", f"must have one or more entries of {HASH_BYTES} bytes")


def _fingerprint(wire: common_pb2.Fingerprint, token_count: int, field: str) -> int:
    """Check a fingerprint; returns the size of its chain."""
    _chain(wire, field)
    chain_bytes, entries = len(wire.chain), -(-token_count // wire.chunk_tokens)
    if chain_bytes != entries * HASH_BYTES:
        problem = f"must have {entries} entries of {HASH_BYTES} bytes for {token_count} tokens"
        raise InvalidFieldError(f"{field}.chain", problem)
    return chain_bytes


def _chain(wire: common_pb2.Fingerprint, field: str) -> None:
    if not 1 <= wire.chunk_tokens <= MAX_CHUNK_TOKENS:
        raise InvalidFieldError(f"{field}.chunk_tokens", f"must be 1 to {MAX_CHUNK_TOKENS}")
    if len(wire.chain) > MAX_CHAIN_BYTES:
        raise InvalidFieldError(f"{field}.chain", f"must be at most {MAX_CHAIN_BYTES} bytes")


def _params(raw: bytes, engine_id: str, field: str) -> None:
    if len(raw) > MAX_PARAMS_BYTES:
        raise InvalidFieldError(field, f"must be at most {MAX_PARAMS_BYTES} bytes")
    try:
        params = orjson.loads(raw)
    except ValueError:
        raise InvalidFieldError(field, "must be a JSON object") from None
    if not isinstance(params, dict):
        raise InvalidFieldError(field, "must be a JSON object")
    for name in ("remote_engine_id", "remote_request_id", "remote_host"):
        value = params.get(name)
        if not value or type(value) is not str:
            raise InvalidFieldError(
                f"{field}.{name}", "must be a text: the reader could not reach the blocks"
            )
    if not _is_host(params["remote_host"]):
        raise InvalidFieldError(f"{field}.remote_host", "must be a host's name or address")
    if not _is_int(params.get("remote_port"), _MAX_PORT):
        raise InvalidFieldError(f"{field}.remote_port", f"must be a number from 1 to {_MAX_PORT}")
    value = params.get("remote_block_ids")
    if not value or type(value) is not list:
        raise InvalidFieldError(f"{field}.remote_block_ids", "must be a list with the blocks")
    for name in ("tp_size", "dcp_size", "pp_size"):
        if name in params and not _is_int(params[name], _MAX_PARALLEL):
            raise InvalidFieldError(f"{field}.{name}", f"must be a number from 1 to {_MAX_PARALLEL}")
    if type(params.get("remote_blocks_expiry_time")) not in (NoneType, int, float):
        raise InvalidFieldError(f"{field}.remote_blocks_expiry_time", "must be a number")
    if params["remote_engine_id"] != engine_id:
        raise InvalidFieldError(f"{field}.remote_engine_id", "must be the announcing engine's own id")
    if params.get("transfer_mode", "pull") != "pull":
        raise InvalidFieldError(f"{field}.transfer_mode", 'must be "pull": pushed KV cannot be read back')


def _is_int(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most
