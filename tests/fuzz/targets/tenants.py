"""Who comes in: files of tenants, key sets, tokens; and all of the router's routes where it asks for keys."""

from __future__ import annotations

import base64
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from kvplane.router.reloading import FileProblemError
from kvplane.router.tenancy.jwks import FileKeys, JwksError, KeySet
from kvplane.router.tenancy.model import JwtSettings
from kvplane.router.tenancy.reading import read_tenants
from kvplane.router.tenancy.tokens import AccessError, Tokens
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.talk import Answer
from tests.fuzz.targets.router import Clients
from tests.fuzz.world import spoiled_json
from tests.router.tenants import KEYS, write

_NOW = 1_790_000_000
_JWT = """
[jwt]
issuer = "https://issuer.example"
audience = ["kvplane"]
jwks_file = "jwks.json"
"""


class Access(Target):
    """Each by itself: a file is read or refused in a line, a token is verified or refused."""

    name = "tenants"
    share = 1.0

    async def start(self) -> None:
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-fuzz-")))
        self._key = ec.generate_private_key(ec.SECP256R1())
        public = json.loads(ECAlgorithm.to_jwk(self._key.public_key()))
        self._jwks = {"keys": [{**public, "kid": "k1", "alg": "ES256", "use": "sig"}]}
        keys = FileKeys(KeySet(json.dumps(self._jwks).encode()))
        self._tokens = Tokens(
            JwtSettings(issuer="i", audience=("kvplane",), jwks_file="x"), keys, lambda: _NOW
        )

    async def stop(self) -> None:
        self._stack.close()

    async def once(self, chance: Chance) -> str:
        kind = chance.below(10)
        try:
            if kind == 0:
                self._file(chance)
            elif kind == 1:
                raw = json.dumps(spoiled_json(self._jwks, chance)).encode("utf-8", "surrogatepass")
                self.input = raw = chance.spoiled(raw) if chance.odds(0.5) else raw
                KeySet(raw)
            else:
                return await self._token(chance)
        except (FileProblemError, JwksError) as error:
            if "\n" in str(error):
                raise Wrong(f"{type(error).__name__} is no line") from error
            return "refused"
        return "taken"

    def _file(self, chance: Chance) -> None:
        (self._folder / "jwks.json").write_text(json.dumps(self._jwks))
        file = write(self._folder, _JWT if chance.odds(0.5) else "", alice="requests_per_second = 2.5")
        raw = Path(file).read_bytes()
        if chance.odds(0.9):
            raw = chance.spoiled(raw)
        self.input = raw
        Path(file).write_bytes(raw)
        read_tenants(file)

    async def _token(self, chance: Chance) -> str:
        header: Any = {"alg": "ES256", "kid": "k1", "typ": "JWT"}
        claims: Any = {"iss": "i", "aud": "kvplane", "exp": _NOW + 60, "tenant": "t1", "sub": "s"}
        forged = chance.odds(0.7)
        if chance.odds(0.5):
            claims = spoiled_json(claims, chance, ("nbf", "iat", "tenant"))
        if chance.odds(0.4):
            header = spoiled_json(header, chance, ("alg", "crit", "jwk", "jku", "b64", "zip"))
        parts = [_part(header), _part(claims)]
        signed = ".".join(parts).encode()
        signature = b"x" * 64
        if not forged:
            signature = ECAlgorithm(ECAlgorithm.SHA256).sign(signed, self._key)
        token = ".".join([*parts, base64.urlsafe_b64encode(signature).decode().rstrip("=")])
        if chance.odds(0.3):
            spoiled = chance.spoiled(token.encode()).decode("utf-8", "replace")
            forged, token = forged or spoiled != token, spoiled
        self.input = token
        try:
            verified = await self._tokens.verify(token)
        except AccessError as error:
            return str(error.status)
        if forged and jwt.decode(token, options={"verify_signature": False}) != claims:
            raise Wrong("a forged token is taken")
        return f"verified {verified.tenant_id[:9]}"


def _part(value: Any) -> str:
    raw = json.dumps(value).encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


class TenantClients(Clients):
    """The `http` target's requests, with keys or without, to a router that asks for them."""

    name = "http-tenants"
    share = 1.0

    async def start(self) -> None:
        self._files = ExitStack()
        folder = Path(self._files.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-fuzz-")))
        self.settings = {"tenants_file": write(folder)}
        await super().start()

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            self._files.close()

    async def once(self, chance: Chance) -> str:
        self._shown = chance.pick((*KEYS, *KEYS, "", "odd"))
        return await super().once(chance)

    def _request(self, chance: Chance) -> bytes:
        raw = super()._request(chance)
        if not self._shown:
            return raw
        key = chance.text()[:200] if self._shown == "odd" else KEYS[self._shown]
        name = chance.pick(("Authorization: Bearer ", "x-api-key: ", "authorization:bearer "))
        line = f"Host: r\r\n{name}{key}\r\n".encode("utf-8", "replace")
        return raw.replace(b"Host: r\r\n", line, 1)

    def check(self, answer: Answer, *, ours: bool = True) -> str:
        # Letters of a key may be spoiled, so only what shows nothing, or nobody's key, is known to be nobody.
        if self._shown in ("", "mallory") and self.sent:
            raise Wrong("a request of nobody's reaches an engine")
        return super().check(answer, ours=ours)
