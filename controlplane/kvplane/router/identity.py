"""Who asks, and which conversation a request belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplane.router.history import Trace
from kvplane.router.response_id import read_response_id

if TYPE_CHECKING:
    from kvplane.router.tenancy.caller import Caller

MAX_ID_BYTES = 256
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")

BODY_FIELDS = ("conversation_id", "conversation", "prompt_cache_key", "previous_response_id", "session_id")
"""Sources in the body; null counts as absent."""
AUTOMATIC = "automatic"
"""The source that is the history itself: see `history`."""
_HEADER = "header:"
SOURCES = (
    *BODY_FIELDS,
    "header:X-Conversation-ID",
    "header:X-Session-ID",
    "header:x-claude-code-session-id",
    "header:session-id",
    "header:session_id",
    AUTOMATIC,
)
"""The sources in the order in which they are asked, unless others are set."""


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


def checked_sources(sources: Sequence[str]) -> tuple[str, ...]:
    """Return sources as they are to be asked. Raises ValueError that names the one that is none."""
    for source in sources:
        header = source.removeprefix(_HEADER) if source.startswith(_HEADER) else None
        if source not in (*BODY_FIELDS, AUTOMATIC) and not (header and _TOKEN.fullmatch(header)):
            known = ", ".join((*BODY_FIELDS, "header:NAME", AUTOMATIC))
            raise ValueError(f"{source}: no source of conversation ids; there are {known}")
        if sources.count(source) > 1:
            raise ValueError(f"{source}: named twice")
    return tuple(sources)


def conversation_id(
    body: Mapping[str, Any], headers: Mapping[str, str], sources: Sequence[str] = SOURCES
) -> tuple[str | None, str]:
    """Return the conversation a request names and the source that said it.

    The id is None if nobody names one; the source then is "automatic" if that may find out, else "".
    Raises IdentityError if the first source that is present holds anything but a usable id.
    """
    for source in sources:
        if source == AUTOMATIC:
            return None, AUTOMATIC
        if source.startswith(_HEADER):
            header = source[len(_HEADER) :]
            value = headers.get(header)
            if value is not None:
                return _checked(f"header {header}", value), source
            continue
        value = body.get(source)
        if value is None:
            continue
        if source == "conversation" and isinstance(value, dict):
            return _checked("conversation.id", value.get("id")), source
        if source == "previous_response_id":
            known = read_response_id(_checked(source, value))
            if known is None:
                continue  # Not an id of ours, and so of no conversation that could be told by it.
            return Trace.at(known.root, 0), source
        return _checked(source, value), source
    return None, ""


def tenant_of(caller: Caller | None, configured: str) -> str:
    """Return whose request this is. The one place to ask: never a field that a client can choose.

    `caller` is who was verified to have sent it, None where all requests are of the one `configured` tenant.
    """
    return configured if caller is None else caller.tenant_id
