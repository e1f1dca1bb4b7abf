"""A proxy for one prefill and one decode engine as they come with vLLM: it knows nothing of kvplane.

usage: python -m deploy.rig.plain_proxy --prefill URL --decode URL --port N

Each request goes to the prefill engine with one token to generate, then to the decode engine with the
kv_transfer_params that came back; its answer is passed on as it comes.
"""

import argparse
import uuid
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the prefill engine is sent. What the client put into kv_transfer_params stays there."""
    one_token = {"max_tokens": 1, "stream": False, "kv_transfer_params": {**_given(body), **_LEG}}
    if "max_completion_tokens" in body:
        one_token["max_completion_tokens"] = 1
    dropped = ("stream_options", "min_tokens")
    return {name: value for name, value in body.items() if name not in dropped} | one_token


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(body.get("kv_transfer_params") or {})


class PlainProxy:
    """Its routes. `prefill` and `decode` are base URLs."""

    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one request; 502 where an engine cannot be reached or breaks off before it has answered."""
        out = web.StreamResponse()
        try:
            return await self._serve(request, out)
        except aiohttp.ClientError as error:
            if not out.prepared:
                return web.json_response({"error": {"message": f"an engine failed: {error}"}}, status=502)
            if request.transport is not None:
                request.transport.abort()  # so that the client can tell that the end is missing
            return out

    async def _serve(self, request: web.Request, out: web.StreamResponse) -> web.StreamResponse:
        body, headers = await request.json(), {"x-request-id": uuid.uuid4().hex}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600)) as http:
            async with http.post(
                self._prefill + request.path, json=prefill_body(body), headers=headers
            ) as leg:
                answer = await leg.json()
                if leg.status != 200:
                    return web.json_response(answer, status=leg.status)
            if answer.get("kv_transfer_params"):
                body["kv_transfer_params"] = answer["kv_transfer_params"]
            async with http.post(self._decode + request.path, json=body, headers=headers) as reply:
                out.set_status(reply.status)
                out.headers["content-type"] = reply.content_type
                await out.prepare(request)
                async for chunk in reply.content.iter_any():
                    await out.write(chunk)
                await out.write_eof()
                return out

    async def health(self, request: web.Request) -> web.Response:
        """Say that it listens."""
        return web.Response(text="ok")

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self.health)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self.serve)
        return app


def main() -> None:
    """Parse the command line and serve on loopback."""
    parser = argparse.ArgumentParser(prog="python -m deploy.rig.plain_proxy", description=__doc__)
    parser.add_argument("--prefill", required=True, help="base URL of the prefill engine")
    parser.add_argument("--decode", required=True, help="base URL of the decode engine")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    app = PlainProxy(options.prefill, options.decode).app()
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
