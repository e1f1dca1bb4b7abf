"""Page tokens: opaque to callers, positions to us."""

from __future__ import annotations

import base64
import binascii

from kvplane.controlplane.errors import InvalidFieldError
from kvplane.store.base import MAX_KEY_BYTES

_MOST = 4 * (MAX_KEY_BYTES // 3 + 1)
"""Characters of the longest position there is."""


def encode_token(raw: bytes) -> str:
    """Return a page token that stands for a position."""
    return base64.urlsafe_b64encode(raw).decode()


def decode_token(token: str) -> bytes:
    """Return the position that a page token stands for."""
    try:
        if len(token) <= _MOST:
            return base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        pass
    raise InvalidFieldError("page_token", "must be a next_page_token of an earlier answer")
