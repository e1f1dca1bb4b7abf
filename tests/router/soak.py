"""Clients that leave at random moments, and engines that are killed under many streams.

`test_soak.py` runs both small; in full, about six minutes:

    python -m tests.router.soak disconnects --clients 1000
    python -m tests.router.soak kills --streams 256 --seconds 300 --every 30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvplane.client.model import EngineRole
from tests.fakes.core import EngineConfig
from tests.fakes.engine import FakeEngine
from tests.router.rig import CHAT, Rig, chat, long_text, rig, until

_HANG_S = 60.0


def _tasks() -> Counter[str]:
    """Count tasks by what they run; those of idle connections aside, which the engines here have too."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return Counter(name for name in names if name != "RequestHandler.start")


async def _leave(r: Rig, number: int, rng: random.Random) -> str:
    """Send a request and close the connection at some moment, perhaps not before the end."""
    body = chat(
        long_text(rng.choice((5, 200)), f"c{number}-"),
        conversation=f"c{number}",
        stream=rng.random() < 0.7,
        max_tokens=rng.choice((1, 8, 30)),
    )
    sent = json.dumps(body).encode()
    path = rng.choice(("auto", "pull", "cold"))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: r\r\nx-kvplane-path: {path}\r\nContent-Length: {len(sent)}\r\n\r\n"
    whole = head.encode() + sent
    # Some leave before they have said all.
    part = whole if rng.random() < 0.9 else whole[: rng.randrange(len(whole))]
    _, writer = await asyncio.open_connection("127.0.0.1", r.router.port)
    writer.write(part)
    await asyncio.sleep(rng.random() * 0.3)
    if rng.random() < 0.5:
        writer.transport.abort()
    else:
        writer.close()
    return path


async def disconnects(clients: int, *, at_once: int = 100, seed: int = 1) -> dict[str, Any]:
    """Have clients leave; returns what is left of them. Asserts that it is nothing."""
    rng = random.Random(seed)
    prefill = [
        EngineConfig(EngineRole.PREFILL, prefill_s_per_token=0.0002, total_blocks=1 << 16) for _ in range(2)
    ]
    decode = [EngineConfig(EngineRole.DECODE, token_gap_s=0.005, total_blocks=1 << 16) for _ in range(2)]
    async with rig(prefill=prefill, decode=decode) as r:
        # One conversation each: fake engines free a turn that a newer one replaces, claimed or not.
        for number in range(clients):
            await r.say(long_text(100), f"c{number}", max_tokens=1)
        before = _tasks()
        room = asyncio.Semaphore(at_once)

        async def client(number: int) -> None:
            async with room:
                await _leave(r, number, rng)

        await asyncio.gather(*(client(number) for number in range(clients)))
        router = r.router
        assert router._runner is not None
        server = router._runner.server
        assert server is not None
        assert router._session is not None
        connector = router._session.connector
        assert connector is not None
        engines = router.pool.engines
        await until(lambda: router._admission.requests == 0)
        await until(lambda: not any(engine.outstanding or engine.ahead_tokens for engine in engines))
        await until(lambda: not connector._acquired)
        # What is left is the rig's own client.
        await until(lambda: len(server.connections) <= 1)
        await until(lambda: not _tasks() - before)
        assert not any(engine.waits for engine in engines)
        assert router._bodies.held_bytes == 0
        left = {"queued": router._admission.queued, "claims_for_time_to_end": len(r.plane.claims)}
        assert left["queued"] == 0
        told = await r.metric("kvplane_router_client_disconnects_total")
        # Of clients that left while a prefill engine was reading: whether it has read is not known.
        assert len(r.plane.claims) <= sum(told.values())
        return {**left, "clients": clients, "disconnects_counted": sum(told.values())}


@dataclass
class Outcomes:
    """What became of streams while engines were killed."""

    whole: int = 0
    lost: list[str] = field(default_factory=list)
    """Ids of those that broke off."""
    refused: list[str] = field(default_factory=list)
    """Status and text of answers other than 200."""
    killed_under: set[str] = field(default_factory=set)
    """Ids of streams that were open on an engine when it was killed."""
    kills: int = 0


async def kills(
    streams: int, *, seconds: float, every_s: float, token_gap_s: float = 0.02, seed: int = 1
) -> Outcomes:
    """Keep streams open while engines are killed. Asserts that only streams of killed engines are lost.

    Ends after `seconds`, when at least two engines were killed and each client had more than a stream.
    """
    rng = random.Random(seed)
    prefill = [EngineConfig(EngineRole.PREFILL) for _ in range(2)]
    decode = [
        EngineConfig(EngineRole.DECODE, token_gap_s=token_gap_s, total_blocks=1 << 16) for _ in range(3)
    ]
    out = Outcomes()
    opened: dict[str, bool] = {}
    loop = asyncio.get_running_loop()
    async with rig(prefill=prefill, decode=decode, probe_interval_s=0.5) as r:
        ends = loop.time() + seconds

        def goes_on(more_s: float = 0.0) -> bool:
            return loop.time() + more_s < ends or out.kills < 2 or out.whole <= streams

        async def one(http: aiohttp.ClientSession, name: str, conversation: str) -> None:
            body = chat("hello", conversation=conversation, stream=True, max_tokens=rng.choice((5, 20, 50)))
            opened[name] = True
            try:
                async with (
                    asyncio.timeout(_HANG_S),
                    http.post(r.url + CHAT, json=body, headers={"x-request-id": name}) as response,
                ):
                    said = await response.read()
                    if response.status != 200:
                        out.refused.append(f"{response.status} {said.decode()}")
                    elif said.rstrip().endswith(b"data: [DONE]"):
                        out.whole += 1
                    else:
                        out.lost.append(name)
            except aiohttp.ClientError:
                out.lost.append(name)
            finally:
                del opened[name]

        async def client(number: int) -> None:
            connector = aiohttp.TCPConnector(limit=1)
            async with aiohttp.ClientSession(connector=connector) as http:
                turn = 0
                while goes_on():
                    await one(http, f"r{number}-{turn}", f"k{number}-{turn // 3}")
                    turn += 1

        async def kill() -> None:
            engines: list[FakeEngine] = [*r.decode, *r.prefill]
            while goes_on(every_s):
                await asyncio.sleep(every_s)
                engine = rng.choice(engines)
                before, lost_before = set(opened), len(out.lost)
                out.kills += 1
                await engine.stop()
                # It takes a moment to die, in which more may come.
                seen = {
                    value
                    for headers in engine.headers
                    for name, value in headers.items()
                    if name.lower() == "x-request-id"
                }
                out.killed_under |= seen & (before | set(opened) | set(out.lost[lost_before:]))
                await asyncio.sleep(every_s / 3)
                await engine.start()

        await asyncio.gather(kill(), *(client(number) for number in range(streams)))
        await until(lambda: r.router._admission.requests == 0)
    assert not out.refused, out.refused[:3]
    assert set(out.lost) <= out.killed_under, set(out.lost) - out.killed_under
    return out


def main() -> None:
    """Run one of them in full."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("disconnects", "kills"))
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    if given.what == "disconnects":
        print(asyncio.run(disconnects(given.clients, seed=given.seed)))
        return
    # Engines, router and clients share one process: more tokens per second would measure its lag.
    options = {"seconds": given.seconds, "every_s": given.every, "token_gap_s": 0.25}
    out = asyncio.run(kills(given.streams, **options, seed=given.seed))
    print(
        f"{out.whole} streams whole, {len(out.lost)} lost, {len(out.refused)} refused; {out.kills} kills"
        f" under {len(out.killed_under)} open requests"
    )


if __name__ == "__main__":
    main()
