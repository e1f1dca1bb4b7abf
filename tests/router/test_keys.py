"""Engines that were started with an API key, and the router's own questions to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvplane.router.app import RouterStartError
from kvplane.router.keys import EngineKeys, KeyFileError
from tests.router.stub import Answer, Stub, front

KEY = "s3cret-a"
ASKS = {"Authorization": f"Bearer {KEY}"}


def of_model(model: str, key: str = KEY) -> Stub:
    def answer(body: Any) -> Answer:
        if body["model"] == model:
            return Answer()
        return Answer({"error": {"message": "no such model", "param": "model", "code": 404}}, 404)

    return Stub(answer, model, key=key)


def written(folder: Path, *keys: str) -> str:
    file = folder / "keys"
    file.write_text("\n".join(keys) + "\n")
    return str(file)


async def test_engines_with_keys_say_what_they_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = of_model("a"), of_model("b"), of_model("c", "another"), of_model("d", "")
    file = await asyncio.to_thread(written, tmp_path, KEY, "", "another")
    async with front(*engines, engine_api_key_file=file) as f:
        served = {e.url: e.models for e in f.router.pool.engines}
        assert [served[e.url] for e in engines] == [{"a"}, {"b"}, {"c"}, {"d"}]
        for _ in range(3):
            assert (await f.post(model="b", headers=ASKS)).status == 200
        assert [e.asked for e in engines] == [0, 3, 0, 0]
        assert not [problem for problem in (await f.ready())["problems"] if "401" in problem]
        # Clients bring their own.
        assert (await f.post(model="b")).status == 401
    logged = capsys.readouterr()
    assert KEY not in logged.out + logged.err


async def test_without_a_key_that_is_said_and_requests_find_their_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines = of_model("a"), of_model("b")
    async with front(*engines) as f:
        problems = [line for line in (await f.ready())["problems"] if "--engine-api-key-file" in line]
        assert len(problems) == 2
        assert "answers 401 to GET /v1/models" in problems[0]
        for model in "abab":
            assert (await f.post(model=model, headers=ASKS)).status == 200
    assert capsys.readouterr().out.count("engine_wants_api_key") == 2


async def test_who_is_known_to_serve_a_model_is_asked_first() -> None:
    known, unknown = of_model("a", ""), of_model("a")
    async with front(known, unknown) as f:
        for _ in range(6):
            for to in ("/v1/chat/completions", "/v1/embeddings"):
                assert (await f.post(to, model="a")).status == 200
        assert (known.asked, unknown.asked) == (12, 0)
        # Else whoever may serve it.
        engine = next(e for e in f.router.pool.engines if e.url == known.url)
        engine.up = False
        assert (await f.post(model="a", headers=ASKS)).status == 200
        assert unknown.asked == 1


async def test_keys_are_read_anew_and_kept_while_they_cannot_be(tmp_path: Path) -> None:
    keys = EngineKeys(await asyncio.to_thread(written, tmp_path, "a", " b "))
    assert await keys.meant_for("http://d", named=True) == ("a", "b")
    await asyncio.to_thread(written, tmp_path, "c")
    assert await keys.meant_for("http://d", named=True) == ("c",)
    await asyncio.to_thread((tmp_path / "keys").unlink)
    assert await keys.meant_for("http://d", named=True) == ("c",)
    assert await EngineKeys(None).read() == ()


async def test_a_key_goes_only_to_the_engines_it_is_meant_for(tmp_path: Path) -> None:
    lines = "for-named", "http://D:80/ for-d", "https://d:8443   for-other"
    keys = EngineKeys(await asyncio.to_thread(written, tmp_path, *lines))
    assert await keys.meant_for("http://d", named=True) == ("for-d",)
    assert await keys.meant_for("http://d", named=False) == ("for-d",)
    assert await keys.meant_for("https://d:8443", named=False) == ("for-other",)
    assert await keys.meant_for("http://e", named=True) == ("for-named",)
    # One that registered itself is whoever it is.
    assert await keys.meant_for("http://e", named=False) == ()


@pytest.mark.parametrize(
    "content", [None, "", "\n \n", "k\x01ey", "kéy", "x" * 70_000, "a b c", "k1-of-mine k2"]
)
async def test_a_file_that_has_no_keys_is_refused_by_its_flag(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        await asyncio.to_thread(file.write_text, content)
    with pytest.raises(KeyFileError, match=r"^--engine-api-key-file .*keys(, line 1)?: [^\n]+$") as caught:
        await EngineKeys(str(file)).read()
    words = (content or "").split()
    assert not any(word in str(caught.value) for word in words if len(word) > 1)
    with pytest.raises(RouterStartError, match="--engine-api-key-file"):
        async with front(Stub(Answer()), engine_api_key_file=str(file)):
            pass
