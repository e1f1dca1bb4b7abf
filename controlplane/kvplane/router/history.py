"""Which conversation a request goes on with, told by its messages alone.

A turn is named by a hash over what its client itself has said so far: its messages but the model's replies.
The next turn's history without what follows the last reply is just that, so it finds the turn before under a
name that any router can compute, whatever the client did to the replies (reasoning dropped, white space).
Each turn has a name of its own. So two branches find the turn they came from, and neither takes the place of
the other's newest turn.

Names are the same for all who say the same. Keys of other tenants and models are apart anyway; what else
tells users apart goes in too: credentials, `user`, `safety_identifier`, `metadata.user_id`, `cache_salt`.
For what is still alike, such as one prompt sent twice, there are several places per name (`Trace.at`).
A wrong guess costs reuse and nothing else: what is pulled is compared token by token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from kvplane.router.api import Said

PLACES = 4
"""Turns of one name that can be kept at a time."""
_WHO = ("user", "safety_identifier", "cache_salt")
_CREDENTIALS = ("Authorization", "x-api-key")
_NO_CONTENT = ("cache_control", "id", "status", "annotations", "logprobs")
"""Members of a part that say nothing of what is in the prompt; clients move cache_control with every turn."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Names of a request's turn and of the turn before."""

    own: str
    before: str | None
    """None at the beginning of a conversation."""

    @staticmethod
    def at(name: str, place: int) -> str:
        """Return the conversation id under which a turn is kept at one of the places of its name."""
        return f"auto/{name}" if place == 0 else f"auto/{name}.{place}"


def trace(said: Sequence[Said] | None, body: Mapping[str, Any], headers: Mapping[str, str]) -> Trace | None:
    """Return the names, None where nothing was said. Cost: linear in the characters of the messages."""
    digest = blake2b(digest_size=16, person=b"kvplane history")
    for name in _WHO:
        _add(digest, body.get(name))
    metadata = body.get("metadata")
    _add(digest, metadata.get("user_id") if isinstance(metadata, dict) else None)
    for name in _CREDENTIALS:
        _add(digest, headers.get(name))
    own: str | None = None
    before: str | None = None
    spoken = False
    for item in said or ():
        if item.by_model:
            if spoken and own is None:
                own = digest.hexdigest()
            before = own
            continue
        _add(digest, item.role)
        _add(digest, item.content)
        own = None
        # What a system prompt says is no user's, and no turn.
        spoken = spoken or item.role not in ("system", "developer")
    if not spoken:
        return None
    return Trace(own or digest.hexdigest(), before)


def _add(digest: blake2b, value: object) -> None:
    raw = _canonical(value)
    digest.update(len(raw).to_bytes(8, "big"))
    digest.update(raw)


def _canonical(content: object) -> bytes:
    """Return content as bytes: the same for text whether it comes as a string or in parts."""
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if isinstance(content, list):
        return b"\0".join(map(_part, content))
    return _dump(content)


def _part(part: object) -> bytes:
    if not isinstance(part, dict):
        return _canonical(part)
    text = part.get("text")
    if isinstance(text, str):
        return text.encode("utf-8", "surrogatepass")
    rest = {name: value for name, value in part.items() if name not in _NO_CONTENT}
    inner = rest.pop("content", None)
    return _dump(rest) + b"\1" + _canonical(inner)


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
