"""JSON Web Tokens: which are taken, by which keys, until when."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from multidict import CIMultiDict, CIMultiDictProxy
from structlog.testing import capture_logs

from kvplane.router.tenancy.access import Access
from kvplane.router.tenancy.caller import Caller
from kvplane.router.tenancy.jwks import FileKeys, JwksError, KeySet, UrlKeys
from kvplane.router.tenancy.meters import Meters
from kvplane.router.tenancy.model import JwtSettings, Quota, Tenant, Tenants
from kvplane.router.tenancy.tokens import AccessError, Tokens
from tests.router.rig import chat, rig
from tests.router.tenants import write

NOW = 1_900_000_000.0
CLAIMS: dict[str, Any] = {
    "iss": "https://issuer",
    "aud": "kvplane",
    "exp": NOW + 60,
    "tenant": "alice",
    "sub": "u1",
}


@cache
def private(kind: str) -> Any:
    return {
        "rsa": lambda: rsa.generate_private_key(65537, 2048),
        "weak": lambda: rsa.generate_private_key(65537, 1024),
        "other": lambda: rsa.generate_private_key(65537, 2048),
        "ec": lambda: ec.generate_private_key(ec.SECP256R1()),
        "ed": ed25519.Ed25519PrivateKey.generate,
    }[kind]()


def jwk(kind: str, kid: str | None = None, **more: Any) -> dict[str, Any]:
    public = private(kind).public_key()
    algorithm: Any = {"ec": jwt.algorithms.ECAlgorithm, "ed": jwt.algorithms.OKPAlgorithm}.get(
        kind, jwt.algorithms.RSAAlgorithm
    )
    entry: dict[str, Any] = algorithm.to_jwk(public, as_dict=True)
    return entry | ({} if kid is None else {"kid": kid}) | more


def key_set(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"keys": entries}).encode()


def settings(**more: Any) -> JwtSettings:
    values = {"issuer": "https://issuer", "audience": ("kvplane",), "algorithms": ("RS256", "ES256", "EdDSA")}
    return JwtSettings(**values | more)


def token(kind: str = "rsa", algorithm: str = "RS256", kid: str | None = "k", **claims: Any) -> str:
    said = {name: value for name, value in (CLAIMS | claims).items() if value is not None}
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(said, private(kind), algorithm, headers)


def raw_token(header: dict[str, Any], claims: dict[str, Any], sign: Callable[[bytes], bytes]) -> str:
    def part(raw: bytes) -> bytes:
        return base64.urlsafe_b64encode(raw).rstrip(b"=")

    signed = part(json.dumps(header).encode()) + b"." + part(json.dumps(claims).encode())
    return (signed + b"." + part(sign(signed))).decode()


def tokens(now: float = NOW, *entries: dict[str, Any], **more: Any) -> Tokens:
    keys = KeySet(key_set(*(entries or (jwk("rsa", "k"), jwk("ec", "e"), jwk("ed", "d")))))
    return Tokens(settings(**more), FileKeys(keys), lambda: now)


@pytest.mark.parametrize(
    ("kind", "algorithm", "kid"), [("rsa", "RS256", "k"), ("ec", "ES256", "e"), ("ed", "EdDSA", "d")]
)
async def test_a_good_token_is_of_its_tenant(kind: str, algorithm: str, kid: str) -> None:
    verified = await tokens().verify(token(kind, algorithm, kid))
    assert (verified.tenant_id, verified.subject, verified.until) == ("alice", "u1", NOW + 90)


@pytest.mark.parametrize(
    ("offset", "claims", "taken"),
    [
        (59, {}, True),
        (89.9, {}, True),
        (90, {}, False),
        (0, {"nbf": NOW + 30}, True),
        (0, {"nbf": NOW + 30.1}, False),
        (0, {"exp": None}, False),
        (0, {"exp": "soon"}, False),
        (0, {"exp": True}, False),
        (0, {"exp": 1e400}, False),
        (0, {"exp": 10**400}, False),
        (0, {"nbf": 10**400}, False),
        (0, {"exp": float("nan")}, False),
        (0, {"nbf": "now"}, False),
        (0, {"iat": NOW + 1e6}, True),
        (0, {"iss": "https://other"}, False),
        (0, {"iss": None}, False),
        (0, {"aud": "other"}, False),
        (0, {"aud": None}, False),
        (0, {"aud": ["other", "kvplane"]}, True),
    ],
)
async def test_when_and_for_whom_a_token_is_good(offset: float, claims: dict[str, Any], taken: bool) -> None:
    verifier = tokens(NOW + offset)
    if taken:
        assert await verifier.verify(token(**claims))
        return
    with pytest.raises(AccessError) as caught:
        await verifier.verify(token(**claims))
    assert (caught.value.status, str(caught.value)) == (401, "The token is not valid.")


def forged() -> dict[str, str]:
    """Return tokens that nobody should be let in by."""
    public = (
        private("rsa")
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    good = token()
    head, body, signature = good.split(".")
    modulus = jwk("rsa")["n"].encode()

    def hs(key: bytes) -> Callable[[bytes], bytes]:
        return lambda signed: hmac.new(key, signed, hashlib.sha256).digest()

    return {
        "none": raw_token({"alg": "none", "kid": "k"}, CLAIMS, lambda signed: b""),
        "None": raw_token({"alg": "None", "kid": "k"}, CLAIMS, lambda signed: b""),
        "no alg": raw_token({"kid": "k"}, CLAIMS, lambda signed: b""),
        "public key as secret": raw_token({"alg": "HS256", "kid": "k"}, CLAIMS, hs(public)),
        "modulus as secret": raw_token({"alg": "HS256", "kid": "k"}, CLAIMS, hs(modulus)),
        "own key within": jwt.encode(CLAIMS, private("other"), "RS256", {"jwk": jwk("other"), "kid": "k"}),
        "key elsewhere": jwt.encode(
            CLAIMS, private("other"), "RS256", {"jku": "http://127.0.0.1:1", "kid": "k"}
        ),
        "another's key": token("other"),
        "unknown kid": token(kid="zz"),
        "no kid of several": token(kid=None),
        "kid of another kind": token("rsa", kid="e"),
        "algorithm not allowed": token("rsa", "RS512"),
        "critical": jwt.encode(CLAIMS, private("rsa"), "RS256", {"kid": "k", "crit": ["x"], "x": 1}),
        "no signature": f"{head}.{body}.",
        "other claims": f"{head}.{token(tenant='bob').split('.')[1]}.{signature}",
        "long": good + "x" * 20_000,
        "dots": "..",
        "nothing": "a.b.c",
        "not text": "\udc80.\udc80.\udc80",
    }


@pytest.mark.parametrize("name", forged())
async def test_forged_tokens_are_refused_alike(name: str) -> None:
    with pytest.raises(AccessError) as caught:
        await tokens().verify(forged()[name])
    assert (caught.value.status, str(caught.value)) == (401, "The token is not valid.")


@pytest.mark.parametrize(
    ("path", "claims", "tenant"),
    [
        ("tenant", {}, "alice"),
        ("https://x/org.id", {"https://x/org.id": "t"}, "t"),
        ("org.id", {"org": {"id": "t"}}, "t"),
        ("org.id", {"org": "t"}, None),
        ("tenant", {"tenant": None}, None),
        ("tenant", {"tenant": ""}, None),
        ("tenant", {"tenant": ["alice"]}, None),
        ("tenant", {"tenant": "x" * 257}, None),
    ],
)
async def test_the_tenant_is_a_claim(path: str, claims: dict[str, Any], tenant: str | None) -> None:
    verifier = tokens(tenant_claim=path)
    if tenant is not None:
        assert (await verifier.verify(token(**claims))).tenant_id == tenant
        return
    with pytest.raises(AccessError) as caught:
        await verifier.verify(token(**claims))
    assert caught.value.status == 403


def test_only_keys_that_verify_are_taken() -> None:
    shared = {"kty": "oct", "kid": "s", "k": "c2VjcmV0"}
    entries = [
        jwk("rsa", "a", use="enc"),
        jwk("rsa", "b", use="sig"),
        jwk("rsa", "c", alg="RS512"),
        jwk("weak", "w"),
        jwk("ec", "e"),
        shared,
        {"kty": "RSA", "kid": "broken"},
        {"kid": 5},
    ]
    keys = KeySet(key_set(*entries, "text"))  # type: ignore[arg-type]  # what others write is not always right
    assert keys.ids == {"b", "c", "e"}
    assert keys.find("c", "RS256") is None
    assert keys.find("e", "ES256") is not None
    assert keys.find("e", "ES384") is None
    for raw in (b"", b"[]", b'{"keys": {}}', b'{"keys": []}', key_set(shared), key_set(jwk("weak", "w"))):
        with pytest.raises(JwksError):
            KeySet(raw)


async def test_a_token_without_kid_has_the_only_key() -> None:
    assert await tokens(NOW, jwk("rsa")).verify(token(kid=None))
    assert await tokens(NOW, jwk("rsa", "k")).verify(token(kid=None))


# Keys at a URL


class Issuer:
    """Serves a key set."""

    def __init__(self) -> None:
        self.answer: web.Response | bytes = key_set(jwk("rsa", "k"))
        self.asked = 0
        self.url = ""

    async def get(self, request: web.Request) -> web.Response:
        self.asked += 1
        if isinstance(self.answer, bytes):
            return web.Response(body=self.answer)
        return web.Response(status=self.answer.status, headers=self.answer.headers)


@asynccontextmanager
async def issuer() -> AsyncIterator[Issuer]:
    served = Issuer()
    app = web.Application()
    app.router.add_get("/{path:.*}", served.get)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/jwks"
    try:
        yield served
    finally:
        await runner.cleanup()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def url_keys(served: Issuer, clock: Clock, changes: list[int]) -> UrlKeys:
    return UrlKeys(
        served.url,
        refetch_s=60,
        refresh_s=3600,
        monotonic=clock,
        on_change=lambda: changes.append(served.asked),
    )


async def test_keys_at_a_url_are_kept_and_asked_for_anew_when_one_is_unknown() -> None:
    clock, changes = Clock(), list[int]()
    async with issuer() as served:
        keys = url_keys(served, clock, changes)
        # All at once ask once.
        found = await asyncio.gather(*(keys.find("k", "RS256") for _ in range(20)))
        assert all(found)
        assert served.asked == 1
        # Invented ids do not make it ask, until a while has passed.
        for index in range(50):
            assert await keys.find(f"x{index}", "RS256") is None
        assert served.asked == 1
        served.answer = key_set(jwk("rsa", "k"), jwk("ec", "new"))
        clock.now = 59.9
        assert await keys.find("new", "ES256") is None
        clock.now = 60
        assert await keys.find("new", "ES256") is not None
        assert (served.asked, changes) == (2, [1, 2])
        await keys.refresh()
        assert changes == [1, 2], "the same keys are no change"


@pytest.mark.parametrize("trouble", ["500", "redirect", "garbage", "empty", "huge", "down"])
async def test_keys_stay_while_the_url_does_not_answer(trouble: str) -> None:
    clock, changes = Clock(), list[int]()
    async with issuer() as served:
        keys = url_keys(served, clock, changes)
        await keys.refresh()
        answers: dict[str, web.Response | bytes] = {
            "500": web.Response(status=500),
            "redirect": web.Response(status=302, headers={"Location": served.url + "/other"}),
            "garbage": b"<html>",
            "empty": key_set(),
            "huge": b" " * (2 << 20),
        }
        if trouble != "down":
            served.answer = answers[trouble]
            with capture_logs() as logs:
                for _ in range(3):
                    await keys.refresh()
            assert [entry["event"] for entry in logs] == ["jwks_not_read"]
            assert logs[0]["keys_kept"] is True
            assert served.asked == 4, "redirects are not followed"
    if trouble == "down":
        await keys.refresh()
    assert await keys.find("k", "RS256") is not None
    assert changes == [1]


async def test_before_there_are_any_keys_nobody_is_told_that_a_token_is_wrong() -> None:
    async with issuer() as served:
        served.answer = web.Response(status=500)
        clock = Clock()
        verifier = Tokens(settings(), url_keys(served, clock, []), lambda: NOW)
        for _ in range(3):
            with pytest.raises(AccessError) as caught:
                await verifier.verify(token())
            assert caught.value.status == 503
        assert served.asked == 1
        served.answer, clock.now = key_set(jwk("rsa", "k")), 60
        assert await verifier.verify(token())


# Whose requests


def tenants_of(**more: Any) -> Tenants:
    quota = Quota()
    values: dict[str, Any] = {
        "file": "f",
        "tenants": {"alice": Tenant("alice", (), quota)},
        "default": quota,
        "secret_file": "s",
        "secret": b"x" * 32,
        "jwt": settings(),
    }
    return Tenants(**values | more)


class Counting:
    """Verifies like the keys it has, and counts."""

    def __init__(self, inner: FileKeys) -> None:
        self.current, self.asked, self._inner = inner.current, 0, inner

    async def find(self, kid: str | None, algorithm: str) -> Any:
        self.asked += 1
        return await self._inner.find(kid, algorithm)


def shown(credential: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({"Authorization": f"Bearer {credential}"}))


async def test_a_token_is_verified_once_while_it_lives_and_while_the_file_stays() -> None:
    wall, keys = Clock(), Counting(FileKeys(KeySet(key_set(jwk("rsa", "k")))))
    wall.now = NOW
    verifier = Tokens(settings(), keys, wall)  # type: ignore[arg-type]  # it counts
    access = Access(Meters(1, Clock()), wall)
    access.use(tenants_of(), verifier)
    good = token()
    callers: list[Caller] = [await access.caller(shown(good)) for _ in range(5)]
    assert (keys.asked, {caller.tenant_id for caller in callers}) == (1, {"alice"})
    access.use(tenants_of(), verifier)
    await access.caller(shown(good))
    assert keys.asked == 2
    wall.now = NOW + 90
    with pytest.raises(AccessError):
        await access.caller(shown(good))
    # What was refused is not remembered: there is no end of it.
    assert not access._remembered


async def test_tenants_that_are_not_listed_are_let_in_if_that_is_wanted() -> None:
    access = Access(Meters(1, Clock()), lambda: NOW)
    access.use(tenants_of(), tokens())
    with pytest.raises(AccessError) as caught:
        await access.caller(shown(token(tenant="carol")))
    assert caught.value.status == 403
    access.use(tenants_of(jwt=settings(unlisted=True)), tokens())
    assert (await access.caller(shown(token(tenant="carol")))).tenant_id == "carol"


async def test_memory_of_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.router.tenancy.access._MOST_REMEMBERED", 3)
    access = Access(Meters(1, Clock()), lambda: NOW)
    access.use(tenants_of(), tokens())
    for index in range(6):
        await access.caller(shown(token(jti=str(index))))
    assert len(access._remembered) == 3


@pytest.mark.parametrize("way", ["file", "url"])
async def test_requests_by_token(tmp_path: Path, way: str) -> None:
    """End to end, with the clock of this machine: the token ends in the year 2030."""
    async with issuer() as served:
        await asyncio.to_thread((tmp_path / "jwks").write_bytes, key_set(jwk("rsa", "k")))
        where = 'jwks_file = "jwks"' if way == "file" else f'jwks_url = "{served.url}"'
        more = f'[jwt]\nissuer = "https://issuer"\naudience = "kvplane"\n{where}\n'
        file = await asyncio.to_thread(write, tmp_path, more)
        async with rig(tenants_file=file) as r:
            for who in ("u1", "u2"):
                headers = {"Authorization": f"Bearer {token(sub=who)}"}
                reply = await r.post(chat("hello", conversation=None), headers=headers)
                assert (reply.status, reply.reason) == (200, "unknown_conversation")
            assert {key.tenant_id for key in r.plane.locations} == {"alice"}
            assert len(r.plane.locations) == 2, "users of a tenant are told apart"
            reply = await r.post(chat("x"), headers={"Authorization": f"Bearer {token('other')}"})
            assert (reply.status, reply.body["error"]["message"]) == (401, "The token is not valid.")
            assert 'error="invalid_token"' in reply.headers["www-authenticate"]
            reply = await r.post(chat("x"), headers={"Authorization": f"Bearer {token(tenant='carol')}"})
            assert reply.status == 403
