"""Public keys of an issuer of tokens, from a JSON Web Key Set in a file or at a URL."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog

from kvplane.router.reloading import FileProblemError
from kvplane.router.resources import told

if TYPE_CHECKING:
    from jwt import PyJWK

log = structlog.get_logger("kvplane.router")

_MOST_BYTES = 1 << 20
_MOST_KEYS = 256
_TIMEOUT_S = 5.0
_LEAST_RSA_BITS = 2048
_CURVES = {"P-256": ("ES256",), "P-384": ("ES384",), "P-521": ("ES512",), "Ed25519": ("EdDSA",)}
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


class JwksError(ValueError):
    """A key set cannot be used; the text says why."""


class KeySet:
    """The keys that verify signatures, by their ids. Raises JwksError where there are none.

    Symmetric keys, those for encryption, short ones and what cannot be read are left out. Cost of making one:
    a millisecond a key.
    """

    def __init__(self, raw: bytes) -> None:
        import jwt  # an extra: whoever configures tokens has it

        try:
            entries = json.loads(raw)["keys"]
            if not isinstance(entries, list):
                raise TypeError
        except (ValueError, LookupError, TypeError, RecursionError):
            raise JwksError('is no key set: JSON with a list "keys"') from None
        self.raw = raw
        self._keys: dict[tuple[str | None, str], PyJWK] = {}
        self.ids = set[str | None]()
        """Of all keys that are of use; None for one without."""
        for entry in entries[:_MOST_KEYS]:
            for algorithm in _algorithms(entry):
                try:
                    key = jwt.PyJWK(entry, algorithm=algorithm)
                except (jwt.PyJWTError, ValueError, TypeError, LookupError):
                    continue
                if getattr(key.key, "key_size", _LEAST_RSA_BITS) < _LEAST_RSA_BITS and algorithm in _RSA:
                    continue
                kid = entry.get("kid")
                self.ids.add(kid)
                self._keys.setdefault((kid, algorithm), key)
        if not self._keys:
            raise JwksError("has no public key that verifies signatures")

    def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """Return the key of a token; one that names none has the only one there is."""
        if kid is None and len(self.ids) == 1:
            (kid,) = self.ids
        return self._keys.get((kid, algorithm))


def _algorithms(entry: object) -> tuple[str, ...]:
    """Return the algorithms that a key is for."""
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return ()
    if not isinstance(entry.get("kid"), str | None):
        return ()
    possible: tuple[str, ...] = ()
    if entry.get("kty") == "RSA":
        possible = _RSA
    elif entry.get("kty") in ("EC", "OKP"):
        possible = _CURVES.get(str(entry.get("crv")), ())
    said = entry.get("alg")
    return tuple(name for name in possible if said in (None, name))


class UrlKeys:
    """The keys at a URL: asked for again now and then, and for a key that is not known.

    No more often than every `refetch_s` seconds: anyone can invent a key's id. What was last read stays while
    the URL does not answer. `on_change` is called when there are others.
    """

    def __init__(
        self,
        url: str,
        *,
        refetch_s: float,
        refresh_s: float,
        monotonic: Callable[[], float],
        context: ssl.SSLContext | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._url = url
        self._refetch_s = refetch_s
        self._refresh_s = refresh_s
        self._monotonic = monotonic
        self._context = context
        self._on_change = on_change
        self._asking = asyncio.Lock()
        self._asked_at: float | None = None
        self._failing = False
        self.current: KeySet | None = None
        """None before the URL has ever answered."""

    async def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """Return a token's key, None if there is none. Asks the URL at most once. Never raises."""
        found = self.current.find(kid, algorithm) if self.current is not None else None
        if found is not None:
            return found
        async with self._asking:
            # Perhaps it came while another asked.
            found = self.current.find(kid, algorithm) if self.current is not None else None
            if found is not None or not self._may_ask():
                return found
            await self._ask()
        return self.current.find(kid, algorithm) if self.current is not None else None

    def _may_ask(self) -> bool:
        return self._asked_at is None or self._monotonic() - self._asked_at >= self._refetch_s

    async def refresh(self) -> None:
        """Ask the URL now. Never raises."""
        async with self._asking:
            await self._ask()

    async def run(self) -> None:
        """Refresh now and then until cancelled; as often as it may while the URL has never answered."""
        while True:
            await asyncio.sleep(self._refresh_s if self.current is not None else self._refetch_s)
            await self.refresh()

    async def _ask(self) -> None:
        self._asked_at = self._monotonic()
        try:
            raw = await self._fetched()
            if self.current is not None and raw == self.current.raw:
                new = self.current
            else:
                new = await asyncio.to_thread(KeySet, raw)
        except (TimeoutError, aiohttp.ClientError, OSError, JwksError, ValueError) as error:
            if not self._failing:
                kept = self.current is not None
                problem = f"{type(error).__name__}: {told(error)}"
                log.error("jwks_not_read", url=self._url, problem=problem, keys_kept=kept)
            self._failing = True
            return
        if self._failing:
            log.info("jwks_read_again", url=self._url)
        self._failing = False
        if new is not self.current:
            self.current = new
            self._on_change()

    async def _fetched(self) -> bytes:
        connector = aiohttp.TCPConnector(ssl=self._context if self._context is not None else True)
        async with (
            asyncio.timeout(_TIMEOUT_S),
            aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session,
            session.get(self._url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise JwksError(f"answered {response.status}")
            raw = bytearray()
            async for chunk in response.content.iter_any():
                raw += chunk
                if len(raw) > _MOST_BYTES:
                    raise JwksError(f"is larger than {_MOST_BYTES} bytes")
            return bytes(raw)


class FileKeys:
    """The keys that are in a file."""

    def __init__(self, keys: KeySet) -> None:
        self.current: KeySet | None = keys

    async def find(self, kid: str | None, algorithm: str) -> PyJWK | None:
        """Return a token's key, None if there is none."""
        return self.current.find(kid, algorithm) if self.current is not None else None


def authorities(path: str | None) -> ssl.SSLContext | None:
    """Return a context that trusts the authorities in a file. Raises FileProblemError. Blocks."""
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "has no certificates in PEM"
        raise FileProblemError(f"[jwt] jwks_ca {path}: {reason.lower()}") from None


def claim(claims: Mapping[str, Any], name: str) -> object:
    """Return a claim by its name, or by names with dots between, each in the one before; None if absent."""
    if name in claims:
        return claims[name]
    value: object = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
