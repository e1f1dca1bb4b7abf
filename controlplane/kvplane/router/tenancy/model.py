"""What the tenants' file says."""

from __future__ import annotations

from dataclasses import dataclass, field

ASYMMETRIC = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)
"""Algorithms by which a token can be verified without being able to make one."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use; None sets no limit."""

    requests_per_s: float | None = None
    burst: int | None = None
    """Requests that may come at once; None: a second's worth, at least one."""
    concurrent: int | None = None
    """Requests under way at a time."""
    tokens_per_minute: int | None = None
    """Estimated: of prompts, and of replies as they are limited."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant: its keys' SHA-256, and its quota."""

    tenant_id: str
    keys: tuple[bytes, ...]
    quota: Quota


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtSettings:
    """Which tokens are taken. Times are in seconds."""

    issuer: str
    audience: tuple[str, ...]
    tenant_claim: str = "tenant"
    """A claim's name, or several with dots between, each within the one before."""
    jwks_file: str | None = None
    jwks_url: str | None = None
    jwks_ca: str | None = None
    """File with the authorities of the URL's certificate; None: those the system trusts."""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    leeway_s: float = 30.0
    refetch_s: float = 60.0
    """A key that is not known makes the URL be asked again, no more often than this."""
    refresh_s: float = 3600.0
    unlisted: bool = False
    """Whether tokens may be of tenants that the file does not name, with the default quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """All that the file says, and what is in the files it names."""

    file: str
    tenants: dict[str, Tenant]
    default: Quota
    secret_file: str
    secret: bytes = field(repr=False)
    operators: tuple[bytes, ...] = ()
    """SHA-256 of operators' keys."""
    cache_salt: bool = True
    jwt: JwtSettings | None = None
    jwks: bytes | None = field(default=None, repr=False)
    """What is in its `jwks_file`."""

    def paths(self) -> list[str]:
        """Return the files that it is made of."""
        more = [self.jwt.jwks_file] if self.jwt is not None and self.jwt.jwks_file is not None else []
        return [self.file, self.secret_file, *more]
