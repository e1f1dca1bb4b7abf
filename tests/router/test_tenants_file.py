"""The tenants' file: what it may say, and one line that names what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplane.router.reloading import FileProblemError
from kvplane.router.tenancy.model import Quota
from kvplane.router.tenancy.reading import read_tenants
from tests.router.tenants import hashed, write

KEY = hashed("k")
JWT = '[jwt]\nissuer = "i"\naudience = ["a", "b"]\njwks_url = "https://issuer/keys"\n'


def test_all_that_it_may_say(tmp_path: Path) -> None:
    default = "[default]\nrequests_per_second = 2\nconcurrent_requests = 3\ntokens_per_minute = 100\n"
    alice = 'requests_per_second = "unlimited"\nburst = 7'
    tenants = read_tenants(write(tmp_path, default + JWT, alice=alice))
    assert tenants.tenants["alice"].quota == Quota(None, 7, 3, 100)
    assert tenants.tenants["bob"].quota == Quota(2, None, 3, 100)
    assert len(tenants.tenants["bob"].keys) == 2
    assert len(tenants.operators) == 1
    assert tenants.jwt is not None
    assert (tenants.jwt.audience, tenants.jwt.refetch_s, tenants.jwt.unlisted) == (("a", "b"), 60, False)
    assert tenants.cache_salt
    assert tenants.paths() == [str(tmp_path / "tenants.toml"), str(tmp_path / "secret")]
    assert "sssss" not in repr(tenants)


WRONG = {
    "x = ": "not TOML: Invalid value (at line",
    '[tenants.""]\nkeys = []': "a tenant's name has 1 to 256 bytes",
    "[tenants.c]\nkeys = 5": "[tenants.c] keys must be a list of strings",
    '[tenants.c]\nkeys = ["plain-key"]': '[tenants.c] keys: number 1 is no "sha256:"',
    f"[tenants.c]\nkeys = [{KEY}, {KEY}]": "[tenants.c] keys: number 2 is also a key of c",
    f"[tenants.c]\nkeys = [{hashed('key-of-alice')}]": "number 1 is also a key of alice",
    f"[tenants.c]\nkeys = [{hashed('key-of-operator')}]": "number 1 is also a key of operators",
    "[tenants.c]\nkey = []": "[tenants.c] key is unknown; did you mean keys?",
    "[tenants.c]\nrequests_per_second = 0": "[tenants.c] requests_per_second must be a number from 0.001",
    "[tenants.c]\nrequests_per_second = true": "[tenants.c] requests_per_second must be a number",
    "[tenants.c]\nburst = 1.5": "[tenants.c] burst must be a whole number from 1",
    "[tenants.c]\nconcurrent_requests = -1": "[tenants.c] concurrent_requests must be a whole number",
    '[tenants.c]\ntokens_per_minute = "many"': "[tenants.c] tokens_per_minute must be a whole number",
    "[default]\nrate = 1": "[default] rate is unknown; known are requests_per_second, burst",
    "[jwt]\naudience = 'a'\njwks_file = 'f'": "[jwt] issuer is missing",
    "[jwt]\nissuer = 'i'\njwks_file = 'f'": "[jwt] audience is missing",
    "[jwt]\nissuer = 'i'\naudience = 'a'": "[jwt] needs one of jwks_file and jwks_url",
    JWT + "jwks_file = 'f'": "[jwt] needs one of jwks_file and jwks_url",
    JWT + "algorithms = ['none']": "[jwt] algorithms: 'none' is not among",
    JWT + "algorithms = ['HS256']": "[jwt] algorithms: 'HS256' is not among",
    JWT + "algorithms = []": "[jwt] algorithms must name at least one",
    JWT + "leeway = -1": "[jwt] leeway must be a number from 0",
    JWT + "refetch = 0": "[jwt] refetch must be a number from 1",
    JWT + "unlisted = 1": "[jwt] unlisted must be true or false",
    JWT + "claim = 'x'": "[jwt] claim is unknown",
    JWT.replace("https:", "http:"): "[jwt] jwks_url must be https",
    JWT.replace("https://issuer/keys", "issuer"): "[jwt] jwks_url must be a URL",
    JWT.replace("https://issuer/keys", "file:///etc/keys"): "[jwt] jwks_url must be a URL",
    JWT.replace("https://issuer/keys", "https://u:p@issuer/"): "[jwt] jwks_url must be a URL",
    JWT.replace('jwks_url = "https://issuer/keys"', 'jwks_file = "absent"'): "[jwt] jwks_file",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_in_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(FileProblemError) as caught:
        read_tenants(write(tmp_path, text))
    said = str(caught.value)
    assert said.startswith(f"--tenants {tmp_path / 'tenants.toml'}: ")
    assert WRONG[text] in said
    assert "\n" not in said
    assert "plain-key" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no tenants"),
        (
            f"[tenants.a]\nkeys = [{KEY}]",
            "secret_file is missing: make one with `kvplane tenant secret FILE`",
        ),
        ("secret_file = 5\n[tenants.a]", "secret_file must be a string"),
        ('secret_file = "absent"\n[tenants.a]', "no such file"),
        ('secret_file = "short"\n[tenants.a]', "has fewer than 32 bytes"),
        ('secret_file = "short"\noperators = "x"\n[tenants.a]', "operators: number 1 is no"),
        ('secret_file = "short"\ncache_salt = "no"\n[tenants.a]', "has fewer than 32 bytes"),
        ("default = 5\n[tenants.a]", "default is no table"),
        ("tenants = 5", "tenants is no table"),
        ("[tenants]\na = 5", "[tenants.a] is no table"),
        ("jwt = 5", "[jwt] is no table"),
        ("tenant = 1", "tenant is unknown; did you mean tenants?"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "short").write_text("short\n" + " " * 40)
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(FileProblemError) as caught:
        read_tenants(str(file))
    assert said in str(caught.value)
