"""Who may come in, by what it shows. What has been verified once is remembered by its hash."""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

from multidict import CIMultiDictProxy

from kvplane.router.tenancy.caller import Caller, Marks
from kvplane.router.tenancy.meters import Meters
from kvplane.router.tenancy.model import Quota, Tenants
from kvplane.router.tenancy.tokens import AccessError, Tokens

_MOST_REMEMBERED = 10_000
NOBODY = Caller()
"""Who has shown nothing."""


class Access:
    """Tells who sent a request. `use` sets what the file says; `wall` reads seconds since the epoch."""

    def __init__(self, meters: Meters, wall: Callable[[], float]) -> None:
        self._meters = meters
        self._wall = wall
        self._keys: dict[bytes, Caller] = {}
        self._quotas: dict[str, Quota] = {}
        self._tenants: Tenants | None = None
        self._tokens: Tokens | None = None
        self._remembered: OrderedDict[bytes, tuple[Caller, float]] = OrderedDict()

    def use(self, tenants: Tenants, tokens: Tokens | None) -> None:
        """Take over what the file says now. What was verified before is verified anew."""
        self._tenants, self._tokens = tenants, tokens
        self._keys = dict.fromkeys(tenants.operators, Caller(operator=True))
        for tenant in tenants.tenants.values():
            self._keys.update(dict.fromkeys(tenant.keys, self._caller(tenant.tenant_id, tenant.quota, "")))
        self.forget()

    def forget(self) -> None:
        """Have tokens verified anew."""
        self._remembered.clear()

    def _caller(self, tenant_id: str, quota: Quota, subject: str) -> Caller:
        assert self._tenants is not None
        return Caller(
            tenant_id,
            subject,
            marks=Marks(self._tenants.secret, tenant_id),
            salts=self._tenants.cache_salt,
            meter=self._meters.of(tenant_id, quota),
        )

    async def caller(self, headers: CIMultiDictProxy[str], *, basic: bool = False) -> Caller:
        """Return who sent a request. Raises AccessError. Cost: a hash of the key or token, once verified.

        `basic`: the key may come as the password of basic authentication too, which browsers can do.
        """
        credential = _credential(headers, basic)
        digest = sha256(credential.encode("utf-8", "surrogateescape")).digest()
        known = self._keys.get(digest)
        if known is not None:
            return known
        if self._tokens is None or credential.count(".") != 2:
            raise AccessError("The API key is not known.", 401)
        remembered = self._remembered.get(digest)
        if remembered is not None:
            if self._wall() < remembered[1]:
                return remembered[0]
            del self._remembered[digest]
        return await self._by_token(self._tokens, credential, digest)

    async def _by_token(self, tokens: Tokens, credential: str, digest: bytes) -> Caller:
        verified = await tokens.verify(credential)
        tenants = self._tenants
        assert tenants is not None
        listed = tenants.tenants.get(verified.tenant_id)
        if listed is None and (tenants.jwt is None or not tenants.jwt.unlisted):
            raise AccessError("The token's tenant is not known here.", 403)
        if self._meters.full:
            self._meters.prune()
            self.forget()
        quota = tenants.default if listed is None else listed.quota
        caller = self._caller(verified.tenant_id, quota, verified.subject)
        if self._tokens is tokens:  # else the file has changed meanwhile
            self._remembered[digest] = caller, verified.until
            if len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        return caller

    async def anyone(self, headers: CIMultiDictProxy[str]) -> Caller:
        """Return who sent a request that anyone may send: an operator, or nobody in particular."""
        try:
            caller = await self.caller(headers)
        except AccessError:
            return NOBODY
        return caller if caller.operator else NOBODY


def _credential(headers: CIMultiDictProxy[str], basic: bool) -> str:
    """Return the key or token that a request shows. Raises AccessError if there is none, or several."""
    shown = set[str]()
    for value in headers.getall("Authorization", ()):
        scheme, _, rest = value.strip().partition(" ")
        if basic and scheme.lower() == "basic":
            rest = _password(rest)
        elif scheme.lower() != "bearer":
            raise AccessError("Send the API key as `Authorization: Bearer KEY`, or as x-api-key.", 401)
        shown.add(rest.strip())
    shown.update(value.strip() for value in headers.getall("x-api-key", ()))
    shown.discard("")
    if not shown:
        raise AccessError("An API key is needed: `Authorization: Bearer KEY`, or x-api-key.", 401)
    if len(shown) > 1:
        raise AccessError("Authorization and x-api-key have different keys: send one.", 401)
    return shown.pop()


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
