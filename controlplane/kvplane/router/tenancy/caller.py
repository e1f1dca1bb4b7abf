"""Who sent a request, and what is made of it so that it meets nothing of another tenant's."""

from __future__ import annotations

import hmac
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any

from kvplane.router.bodies import BodyError
from kvplane.router.openai import BadRequestError, Body
from kvplane.router.response_id import read_response_id
from kvplane.router.tenancy.meters import Meter

_RESPONSES = "/v1/responses"
_SIGNATURE = 32
_UNLIMITED_REPLY = 1024
"""Tokens that a reply without a limit of its own counts as."""
_CHARACTERS_PER_TOKEN = 4
_MOST = 1 << 32
_LONGEST_NUMBER = 64
SALTED = frozenset(
    {
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    }
)
"""Requests that generate nothing, but are computed with a prefix cache all the same."""


class Marks:
    """What a deployment's secret makes of names, apart for each tenant. Nobody can guess another's."""

    __slots__ = ("_key", "_salt")

    def __init__(self, secret: bytes, tenant_id: str) -> None:
        root = sha256(secret).digest()
        self._key = blake2b(tenant_id.encode(), key=root, digest_size=32, person=b"kvplane tenant").digest()
        self._salt = self._mark(b"salt", "")

    def _mark(self, kind: bytes, value: str) -> str:
        raw = value.encode("utf-8", "surrogatepass")
        return blake2b(raw, key=self._key, digest_size=16, person=b"kvplane " + kind).hexdigest()

    def salt(self, given: str | None) -> str:
        """Return the cache salt for a request that brought one, or none."""
        return self._salt if given is None else self._mark(b"salted", given)

    def session(self, given: str) -> str:
        """Return the name of a session for engines."""
        return self._mark(b"session", given)

    def signed(self, response_id: str) -> str:
        """Return a response's id with proof of whose it is."""
        return response_id + self._mark(b"resp", response_id)

    def owns(self, response_id: object) -> bool:
        """Tell whether an id is of a response of this tenant's."""
        if not isinstance(response_id, str) or read_response_id(response_id) is None:
            return False
        bare, proof = response_id[:-_SIGNATURE], response_id[-_SIGNATURE:]
        return hmac.compare_digest(self._mark(b"resp", bare), proof)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. Of a tenant, an operator, or nobody known: for what anyone may ask."""

    tenant_id: str = ""
    subject: str = ""
    """What tells users of one tenant apart, where credentials do."""
    operator: bool = False
    marks: Marks | None = field(default=None, repr=False)
    salts: bool = True
    """Whether the tenant's KV is kept apart in engines' prefix caches."""
    meter: Meter | None = field(default=None, repr=False)
    """What the tenant uses of its quota."""

    def check(self, body: Body) -> None:
        """Refuse what goes on with another's response, just as what goes on with none. Raises BodyError."""
        earlier = body.get("previous_response_id")
        if earlier is not None and not self.owns(earlier):
            raise not_found(earlier)

    def owns(self, response_id: object) -> bool:
        """Tell whether an id is of a response of this tenant's."""
        return self.marks is not None and self.marks.owns(response_id)

    def mark(self, body: Body, size: int, limits: Sequence[str]) -> None:
        """Make a request that generates the tenant's own, and count its `size` in bytes and its reply.

        `limits` are the fields that limit the reply. Raises BadRequestError for a salt that is none,
        OverloadedError where the budget is spent.
        """
        if self.meter is not None:
            self._spend(size // _CHARACTERS_PER_TOKEN + _reply_tokens(body, limits))
        # These name things in engines which are all tenants'.
        body.pop("request_id", None)
        body.pop("priority", None)
        self._mark_sessions(body)
        self._salt(body)

    def mark_passed(self, path: str, body: Any, size: int) -> bool:
        """Do the same for a request of another kind; tells whether the body was changed."""
        self._spend(size // _CHARACTERS_PER_TOKEN)
        if not isinstance(body, dict):
            return False
        changed = False
        for name in ("request_id", "priority"):
            changed = body.pop(name, None) is not None or changed
        changed = self._mark_sessions(body) or changed
        if path in SALTED and self.salts and self.marks is not None:
            self._salt(body)
            changed = True
        return changed

    def _spend(self, tokens: int) -> None:
        if self.meter is not None:
            self.meter.spend(tokens)

    def _mark_sessions(self, body: Body) -> bool:
        changed = False
        for holder in (body, body.get("vllm_xargs")):
            given = holder.get("session_id") if isinstance(holder, dict) else None
            if isinstance(given, str) and given and isinstance(holder, dict) and self.marks is not None:
                holder["session_id"] = self.marks.session(given)
                changed = True
        return changed

    def _salt(self, body: Body) -> None:
        if not self.salts or self.marks is None:
            return
        given = body.get("cache_salt")
        if given is not None and (not isinstance(given, str) or not given):
            raise BadRequestError("cache_salt must be a non-empty string if provided.", "cache_salt")
        body["cache_salt"] = self.marks.salt(given)

    def sign(self, path: str, leg: Body) -> None:
        """Sign the id that an answer is to have, in the body of its leg."""
        if path == _RESPONSES and self.marks is not None:
            leg["request_id"] = self.marks.signed(str(leg["request_id"]))


def not_found(response_id: object) -> BodyError:
    """Return what is said of a response that is not there, or not the caller's."""
    return BodyError(f"Response with id '{response_id}' not found.", 404)


def _reply_tokens(body: Body, limits: Sequence[str]) -> int:
    """Return how many tokens may be generated: each choice for each prompt, by the limit that allows most."""
    tokens = max(_count(body.get(name)) for name in limits) or _UNLIMITED_REPLY
    choices = max(1, _count(body.get("n")), _count(body.get("best_of")))
    prompts = body.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        choices *= len(prompts)
    return tokens * choices


def _count(value: object) -> int:
    """Return a count as engines read it, also from 3.0 and "3"; 0 for what is none."""
    if isinstance(value, str) and len(value) < _LONGEST_NUMBER:
        try:
            value = float(value)
        except ValueError:
            return 0
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else 0
    return max(0, min(value, _MOST)) if isinstance(value, int) else 0


CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)
"""Who sent the request that is being served; None where there are no tenants."""


def caller_of() -> Caller | None:
    """Return who sent the request that is being served; None where there are no tenants."""
    return CALLER.get()


def credentials(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers that tell users apart: the client's own, or what was verified of them."""
    caller = CALLER.get()
    return headers if caller is None else {"Authorization": caller.subject} if caller.subject else {}
