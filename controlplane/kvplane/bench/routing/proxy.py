"""A bare prefill/decode proxy, as a yardstick: what aiohttp costs with nothing on top.

It knows one prefill and one decode engine, and nothing of conversations, failures or metrics.

    python proxy.py PORT PREFILL_URL DECODE_URL
"""

from __future__ import annotations

import json
import sys

import aiohttp
import uvloop
from aiohttp import web

_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


async def _app(prefill_url: str, decode_url: str) -> web.Application:
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": _PARAMS}
        async with session.post(prefill_url + request.path, json=leg) as answer:
            prefilled = json.loads(await answer.read())
        leg = {**body, "kv_transfer_params": prefilled.get("kv_transfer_params")}
        async with session.post(decode_url + request.path, json=leg) as answer:
            out = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await out.prepare(request)
            async for chunk in answer.content.iter_any():
                await out.write(chunk)
            await out.write_eof()
            return out

    async def close(app: web.Application) -> None:
        await session.close()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/v1/chat/completions", generate)
    app.on_cleanup.append(close)
    return app


def main() -> None:
    """Serve until killed."""
    port, prefill_url, decode_url = sys.argv[1:]
    uvloop.install()
    web.run_app(
        _app(prefill_url, decode_url), host="127.0.0.1", port=int(port), access_log=None, print=lambda _: None
    )


if __name__ == "__main__":
    main()
