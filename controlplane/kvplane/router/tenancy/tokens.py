"""JSON Web Tokens: whose they are, and until when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvplane.router.identity import usable_id
from kvplane.router.tenancy.jwks import FileKeys, UrlKeys, claim
from kvplane.router.tenancy.model import JwtSettings

_LONGEST = 16 * 1024
_SUBJECT_CHARACTERS = 256
_MOST_S = 1e15
"""Of a time in a token; what is more, or no number, is none."""


class AccessError(Exception):
    """A request is not let in. `status` is 401, 403 or 503; the text is for its sender, and tells no more."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Verified:
    """What a token says that has been verified. `until` is in seconds since the epoch, leeway included."""

    tenant_id: str
    subject: str
    until: float


class Tokens:
    """Verifies tokens. `wall` reads seconds since the epoch."""

    def __init__(self, settings: JwtSettings, keys: FileKeys | UrlKeys, wall: Callable[[], float]) -> None:
        import jwt  # an extra: whoever configures tokens has it

        self._jwt = jwt
        self._settings = settings
        self._keys = keys
        self._wall = wall

    async def verify(self, token: str) -> Verified:
        """Return whose a token is. Raises AccessError. Cost: a signature's verification, 50 to 200 µs."""
        jwt, settings = self._jwt, self._settings
        if len(token) > _LONGEST:
            raise _refused()
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError):
            raise _refused() from None
        algorithm, kid = header.get("alg"), header.get("kid")
        # Extensions that must be understood are not.
        if algorithm not in settings.algorithms or not isinstance(kid, str | None) or "crit" in header:
            raise _refused()
        key = await self._keys.find(kid, algorithm)
        if key is None:
            if self._keys.current is None:
                raise AccessError("Tokens cannot be verified at present; try again later.", 503)
            raise _refused()
        try:
            claims = jwt.decode(
                token,
                key=key.key,
                algorithms=[algorithm],
                issuer=settings.issuer,
                audience=settings.audience,
                options={
                    "require": ["exp", "iss", "aud"],
                    # By our own clock, below.
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except (jwt.PyJWTError, ValueError, TypeError):
            raise _refused() from None
        return self._judged(claims)

    def _judged(self, claims: dict[str, Any]) -> Verified:
        now, leeway_s = self._wall(), self._settings.leeway_s
        until, begins = _time(claims["exp"]), _time(claims.get("nbf", 0))
        if until is None or begins is None or now >= until + leeway_s or now < begins - leeway_s:
            raise _refused()
        tenant_id = claim(claims, self._settings.tenant_claim)
        if not isinstance(tenant_id, str) or not usable_id(tenant_id):
            raise AccessError("The token names no tenant.", 403)
        subject = claims.get("sub")
        return Verified(
            tenant_id,
            subject[:_SUBJECT_CHARACTERS] if isinstance(subject, str) else "",
            until + leeway_s,
        )


def _time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MOST_S:
        return None
    return float(value)


def _refused() -> AccessError:
    # Which of the reasons it is would help to forge one.
    return AccessError("The token is not valid.", 401)
