"""What router and connector tell each other inside `kv_transfer_params`, under the member "kvplane".

Nothing that arrives here is trusted: whatever is not exactly as agreed counts as not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeGuard

from kvplane.client.model import ConversationKey, Fingerprint

MEMBER = "kvplane"
"""Name of the member of kv_transfer_params."""

SETTINGS = "kvplane_settings"
"""Name of the member of kv_transfer_params that says what settings a holder's KV was made with (a digest)."""

_MAX_ID_BYTES = 256
_SALT_DIGITS = 32
_MAX_ENDPOINT_BYTES = 2048
_MAX_CHUNK_TOKENS = 65536
_MAX_CHAIN_BYTES = 1 << 20
_LEASE_CLASSES = 1024


@dataclass(frozen=True, slots=True)
class Envelope:
    """Router to decode engine: whose turn this is.

    Attributes:
        key: the conversation.
        turn: its number on record.
        endpoint: the engine's HTTP base URL as the router knows it.
        turn_index: 1 for the conversation's first turn; None if not known.
        idle_s: seconds since the conversation's last turn ended; None if not known.
        lease_class: of that last turn; None if not known.
    """

    key: ConversationKey
    turn: int
    endpoint: str = ""
    turn_index: int | None = None
    idle_s: float | None = None
    lease_class: int | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """Router to prefill engine: what the blocks to pull are said to contain."""

    fingerprint: Fingerprint
    token_count: int


class Outcome(StrEnum):
    """Prefill engine to router: what came of the pull."""

    PULLED = "pulled"
    MISMATCH = "mismatch"
    LOCAL_HIT = "local_hit"
    BELOW_THRESHOLD = "below_threshold"
    NO_FINGERPRINT = "no_fingerprint"
    COLD = "cold"
    FAILED = "failed"


def read_envelope(params: Mapping[str, Any] | None) -> Envelope | None:
    """Return the envelope of a decode request, or None if there is none or it is malformed.

    Members that only help to learn (turn_index, idle_s, lease_class) are left out where they are malformed.
    """
    body = _body(params)
    if body is None:
        return None
    names = [body.get(name) for name in ("tenant_id", "model", "conversation_id")]
    adapter, turn, endpoint = body.get("adapter", ""), body.get("turn"), body.get("endpoint", "")
    if not all(is_id(name) for name in names) or not (adapter == "" or is_id(adapter)):
        return None
    if not _is_count(turn) or not isinstance(endpoint, str) or _size(endpoint) > _MAX_ENDPOINT_BYTES:
        return None
    tenant_id, model, conversation_id = map(str, names)
    turn_index, idle_s, lease_class = body.get("turn_index"), body.get("idle_s"), body.get("lease_class")
    return Envelope(
        ConversationKey(tenant_id, model, conversation_id, str(adapter)),
        turn,
        endpoint,
        turn_index=turn_index if _is_count(turn_index) else None,
        idle_s=float(idle_s) if _is_span(idle_s) else None,
        lease_class=lease_class if _is_class(lease_class) else None,
    )


def read_promise(params: Mapping[str, Any] | None) -> Promise | None:
    """Return the fingerprint of a prefill request, or None if there is none or it is malformed."""
    body = _body(params)
    if body is None:
        return None
    fingerprint, token_count = body.get("fingerprint"), body.get("token_count")
    if not isinstance(fingerprint, Mapping) or not _is_count(token_count):
        return None
    chunk_tokens, text = fingerprint.get("chunk_tokens"), fingerprint.get("chain")
    if not _is_count(chunk_tokens) or chunk_tokens > _MAX_CHUNK_TOKENS or not isinstance(text, str):
        return None
    if len(text) > 2 * _MAX_CHAIN_BYTES:
        return None
    try:
        chain = bytes.fromhex(text)
    except ValueError:
        return None
    return Promise(Fingerprint(chunk_tokens, chain), token_count)


def _body(params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    body = params.get(MEMBER) if isinstance(params, Mapping) else None
    return body if isinstance(body, Mapping) else None


def is_id(value: object) -> bool:
    """Whether a value is an id as the control plane takes them: a string of 1 to 256 bytes."""
    return isinstance(value, str) and 0 < _size(value) <= _MAX_ID_BYTES


def salted_id(conversation_id: str, salt: str) -> str:
    """Return a conversation's id among those of one cache salt: another for each salt, an id as well.

    The id, "#" and 32 hex digits of a hash over both; an id of more than 223 bytes is cut to make room.
    """
    raw = conversation_id.encode()
    both = len(raw).to_bytes(4, "big") + raw + salt.encode("utf-8", "surrogatepass")
    digest = blake2b(both, digest_size=_SALT_DIGITS // 2).hexdigest()
    return f"{raw[: _MAX_ID_BYTES - 1 - _SALT_DIGITS].decode(errors='ignore')}#{digest}"


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 2**63


def _is_span(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < 2**63 and math.isfinite(value)


def _is_class(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _LEASE_CLASSES


def _size(value: str) -> int:
    """Return the size in bytes; lone surrogates, which JSON lets through, count as too long."""
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return 1 << 62
