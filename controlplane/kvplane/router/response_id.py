"""Ids of responses, of the Responses API.

A response that goes on from a stored one (`previous_response_id`) can only be made where that is stored, and
the router keeps nothing: so the ids that it has engines give to responses say where each is and of which
conversation it is part. `resp_` + random number + tag of the engine + root, 32, 8 and 32 hexadecimal digits;
where there are tenants, 32 more prove whose it is.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from hashlib import blake2b

_ID = re.compile(r"resp_[0-9a-f]{32}([0-9a-f]{8})([0-9a-f]{32})(?:[0-9a-f]{32})?")


@dataclass(frozen=True, slots=True)
class ResponseId:
    """What an id of ours says."""

    engine_tag: str
    root: str


def read_response_id(value: object) -> ResponseId | None:
    """Return what a response's id says, None if it is none of ours."""
    found = _ID.fullmatch(value) if isinstance(value, str) else None
    return None if found is None else ResponseId(found[1], found[2])


def new_response_id(engine_url: str, root: str) -> str:
    """Return an id for a response that an engine is about to make."""
    own = uuid.uuid4().hex
    return f"resp_{own}{engine_tag(engine_url)}{root or own}"


def engine_tag(url: str) -> str:
    """Return by what an engine is named in ids."""
    return blake2b(url.encode(), digest_size=4).hexdigest()
