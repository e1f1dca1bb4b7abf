"""`kvplane tenant`, and `kvplane explain` where there are tenants."""

from __future__ import annotations

import asyncio
import stat
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvplane.cli.entry import app
from kvplane.cli.errors import StartError
from tests.router.rig import chat, rig
from tests.router.tenants import KEYS, bearer, write


def run(*arguments: str, text: str = "") -> tuple[int, str, str, str]:
    result = CliRunner().invoke(app, list(arguments), input=text)
    if isinstance(result.exception, StartError):
        return 2, result.stdout, result.stderr, str(result.exception)
    return result.exit_code, result.stdout, result.stderr, ""


def test_a_key_and_its_hash_open_the_door(tmp_path: Path) -> None:
    code, key, line, _ = run("tenant", "key")
    assert (code, key.startswith("kvp_"), len(key.strip()) > 40) == (0, True, True)
    (mine,) = tomllib.loads(line)["keys"]
    assert run("tenant", "hash", text=key)[1].strip() == mine
    assert run("tenant", "key")[1] != key
    assert "standard input" in run("tenant", "hash")[3]


def test_a_key_goes_to_a_file_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "acme.key"
    code, line, told, _ = run("tenant", "key", "--out", str(file))
    assert (code, told, stat.S_IMODE(file.stat().st_mode)) == (0, "", 0o600)
    assert tomllib.loads(line)["keys"] == [run("tenant", "hash", text=file.read_text())[1].strip()]
    assert "file exists" in run("tenant", "key", "--out", str(file))[3]


def test_a_secret_is_written_for_its_owner_only_and_never_over_another(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert run("tenant", "secret", str(file))[0] == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert len(text) > 40
    assert "file exists" in run("tenant", "secret", str(file))[3]
    assert file.read_text() == text


def test_a_file_is_checked(tmp_path: Path) -> None:
    code, said, _, _ = run("tenant", "check", write(tmp_path))
    assert (code, "2 tenants with 3 keys, 1 key of operators" in said) == (0, True)
    code, _, _, problem = run("tenant", "check", write(tmp_path, "[tenants.c]\nkey = 1"))
    assert (code, "[tenants.c] key is unknown" in problem) == (2, True)


async def test_explain_shows_a_key(tmp_path: Path) -> None:
    file = await asyncio.to_thread(write, tmp_path)
    key, other = tmp_path / "key", tmp_path / "other"
    await asyncio.to_thread(key.write_text, KEYS["alice"] + "\n")
    await asyncio.to_thread(other.write_text, KEYS["bob"])
    async with rig(tenants_file=file) as r:
        reply = await r.post(chat("hello"), headers=bearer("alice"))
        request_id = reply.headers["x-request-id"]

        async def explained(*more: str) -> tuple[int, str, str, str]:
            return await asyncio.to_thread(run, "explain", request_id, "--router", r.url, *more)

        assert (await explained("--api-key-file", str(key)))[0] == 0
        assert "not on record" in (await explained("--api-key-file", str(other)))[3]
        assert "API key is needed" in (await explained())[3]
        assert "no such file" in (await explained("--api-key-file", str(tmp_path / "absent")))[3]


@pytest.mark.parametrize("text", ["", "two\nlines", "é"])
def test_a_key_file_that_has_no_key_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    assert "has to hold one key" in run("explain", "x", "--api-key-file", str(file))[3]
