"""A router that runs out of files itself, and engines that fall silent in the middle of their streams."""

from __future__ import annotations

import errno
import resource
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from kvplane.client.model import EngineRole
from kvplane.router.app import RouterServer
from kvplane.router.pool import EnginePool
from kvplane.router.resources import raise_file_limit, too_few_files
from tests.fakes.core import EngineConfig
from tests.router.rig import CHAT, chat, long_text, rig, until
from tests.router.stub import Answer, Stub, front


def exhaust(router: RouterServer, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every connection of the router's fail for want of files."""

    async def connect(*_: Any, **__: Any) -> Any:
        key = ConnectionKey("engine", 8200, False, True, None, None, None)
        raise aiohttp.ClientConnectorError(key, OSError(number, "Too many open files"))

    assert router._session is not None
    monkeypatch.setattr(router._session.connector, "connect", connect)


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
async def test_no_engine_goes_down_for_what_the_router_has_run_out_of(
    path: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front(Stub(Answer())) as f:
        exhaust(f.router, number, monkeypatch)
        (engine,) = f.router.pool.engines
        reply = await f.post(path, input="hello")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        # Where engines are is no client's affair.
        assert "resources (Too many open files)" in reply.body["error"]["message"]
        await f.router.pool.probe_all()
        assert engine.up


async def test_a_claim_is_given_back_where_no_file_is_left_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        await r.say(long_text(200))
        exhaust(r.router, errno.EMFILE, monkeypatch)
        assert (await r.post(chat("next"), path="pull")).status == 503
        await until(lambda: r.plane.finished)
        assert not r.plane.claims


def test_a_limit_on_files_is_raised_and_named_where_it_is_too_low() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        problem = too_few_files(1000)
        assert problem is not None
        assert "--max-requests" in problem
        assert too_few_files(50) is too_few_files(0) is None
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_stream_whose_engine_is_given_up_ends_and_does_not_look_whole() -> None:
    slow = [EngineConfig(EngineRole.DECODE, token_gap_s=0.02)]
    async with rig(decode=slow) as r:
        body = chat("hello") | {"stream": True, "max_tokens": 500}
        async with r.http.post(r.url + CHAT, json=body) as response:
            first = await response.content.readany()
            assert first
            next(e for e in r.router.pool.engines if e.url == r.d.url).cut_streams()
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.content.read()


class _Stream:
    closed = False

    def close(self) -> None:
        self.closed = True


async def test_streams_are_given_up_when_their_engine_has_been_down_for_long() -> None:
    now, stream = 0.0, _Stream()
    async with aiohttp.ClientSession() as session:
        pool = EnginePool(
            session,
            prefill_urls=(),
            decode_urls=("http://127.0.0.1:1",),
            probe_interval_s=1,
            monotonic=lambda: now,
        )
        (engine,) = pool.engines
        engine.streams.add(cast(aiohttp.ClientResponse, stream))
        await pool.probe_all()
        assert not engine.up
        now = 29.0
        await pool.probe_all()
        assert not stream.closed
        now = 31.0
        await pool.probe_all()
        assert stream.closed
