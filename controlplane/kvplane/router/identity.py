"""Who asks, and which conversation a request belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_ID_BYTES = 256

BODY_FIELDS = ("conversation_id", "conversation", "prompt_cache_key", "session_id")
"""In the order in which they are asked; null counts as absent."""
OWN_FIELDS = frozenset({"conversation_id"})
"""Body fields that engines do not know; taken off before a request goes on."""
HEADERS = ("X-Conversation-ID", "X-Session-ID", "x-claude-code-session-id", "session-id", "session_id")
"""Asked after the body, in this order."""


class IdentityError(ValueError):
    """A conversation id is unusable; `field` names where it came from."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def usable_id(value: object) -> bool:
    """Tell whether a value can be an id: a non-empty string of at most MAX_ID_BYTES in UTF-8."""
    if not isinstance(value, str) or not value or len(value) > MAX_ID_BYTES:
        return False
    try:
        return len(value.encode()) <= MAX_ID_BYTES
    except UnicodeEncodeError:
        return False


def _checked(field: str, value: object) -> str:
    if isinstance(value, str) and usable_id(value):
        return value
    if not isinstance(value, str):
        problem = f"not {type(value).__name__}"
    elif not value:
        problem = "not an empty one"
    else:
        try:
            problem = f"this one has {len(value.encode())}"
        except UnicodeEncodeError:
            problem = "this one is not valid Unicode"
    raise IdentityError(
        field, f"{field} must be a non-empty string of at most {MAX_ID_BYTES} bytes in UTF-8; {problem}"
    )


def conversation_id(body: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """Return the conversation a request names, None if it names none.

    Raises IdentityError if the first source that is present holds anything but a usable id.
    """
    for field in BODY_FIELDS:
        value = body.get(field)
        if value is None:
            continue
        if field == "conversation" and isinstance(value, dict):
            return _checked("conversation.id", value.get("id"))
        return _checked(field, value)
    for header in HEADERS:
        value = headers.get(header)
        if value is not None:
            return _checked(f"header {header}", value)
    return None


def tenant_of(headers: Mapping[str, str], configured: str) -> str:
    """Return whose request this is. The one place to ask: never a field that a client can choose."""
    del headers  # There is one tenant until callers are authenticated.
    return configured
