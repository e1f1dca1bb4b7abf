"""What router and connector tell each other inside `kv_transfer_params`, under the member "kvplane".

Nothing that arrives here is trusted: whatever is not exactly as agreed counts as not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from kvplane.client.model import ConversationKey, Fingerprint

MEMBER = "kvplane"
"""Name of the member of kv_transfer_params."""

_MAX_ID_BYTES = 256
_MAX_ENDPOINT_BYTES = 2048
_MAX_CHUNK_TOKENS = 65536
_MAX_CHAIN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Envelope:
    """Router to decode engine: whose turn this is."""

    key: ConversationKey
    turn: int
    endpoint: str = ""


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
    """Return the envelope of a decode request, or None if there is none or it is malformed."""
    body = _body(params)
    if body is None:
        return None
    names = [body.get(name) for name in ("tenant_id", "model", "conversation_id")]
    adapter, turn, endpoint = body.get("adapter", ""), body.get("turn"), body.get("endpoint", "")
    if not all(_is_id(name) for name in names) or not (adapter == "" or _is_id(adapter)):
        return None
    if not _is_count(turn) or not isinstance(endpoint, str) or _size(endpoint) > _MAX_ENDPOINT_BYTES:
        return None
    tenant_id, model, conversation_id = map(str, names)
    return Envelope(ConversationKey(tenant_id, model, conversation_id, str(adapter)), turn, endpoint)


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


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < _size(value) <= _MAX_ID_BYTES


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 2**63


def _size(value: str) -> int:
    """Return the size in bytes; lone surrogates, which JSON lets through, count as too long."""
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return 1 << 62
