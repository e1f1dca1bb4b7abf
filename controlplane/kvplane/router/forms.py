"""Forms, as far as the router reads them: the names of their fields."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from kvplane.router.openai import BETWEEN_ENGINES, BadRequestError

_MODEL = re.compile(rb'name="model"(?:\r\n[^\r\n]{1,256}){0,4}\r\n\r\n([^\r\n]{1,256})\r\n')
_HEAD = b"content-disposition"
_MOST_PARTS = 1000
_WRITTEN_IN_PIECES = re.compile(rb"(?<!file)name\*")
"""A name that is encoded, or in several parameters."""


def check_urlencoded(raw: bytes) -> None:
    """Refuse a form in a URL's encoding that steers KV transfers: raises BadRequestError. Cost: linear."""
    said = unquote_to_bytes(raw)
    for name in sorted(BETWEEN_ENGINES):
        if name.encode() in said:
            raise BadRequestError(f"The form must not have the field {name}.", name)


def form_model(raw: bytes) -> str:
    """Return the model that a form names, "" if none.

    Raises BadRequestError for a form with a field that steers KV transfers: taking it out would need the
    form to be written anew. Cost: linear.
    """
    lower = raw.lower()
    if lower.count(_HEAD) > _MOST_PARTS:
        raise BadRequestError(f"The form has more than {_MOST_PARTS:,} fields.")
    at = -1
    while (at := lower.find(_HEAD, at + 1)) >= 0:
        head = unquote_to_bytes(lower[at : at + 8192].partition(b"\r\n")[0])
        for name in sorted(BETWEEN_ENGINES):
            if name.encode() in head:
                raise BadRequestError(f"The form must not have the field {name}.", name)
        if _WRITTEN_IN_PIECES.search(head):
            raise BadRequestError('The form must name its fields plainly, as in name="model".')
    found = _MODEL.search(raw)
    return found[1].decode(errors="replace") if found else ""
