"""Traffic: fake engines that announce, withdraw, renew, obey, die, and come back under the same id.

Some speak over the stream, by the connector's own parts, the others by unary calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from pathlib import Path

import uvloop

from kvplane.client.errors import ControlPlaneError
from tests.robustness import history as h
from tests.robustness.fake_engines import RecordingClient, StreamEngine, UnaryEngine

TTLS_S = (5.0, 8.0, 20.0, 40.0)


class Driver:
    """Has one engine do something `rate` times a second, as a random generator says."""

    def __init__(
        self, options: argparse.Namespace, engine_id: str, recorder: h.Recorder, *, unary: bool
    ) -> None:
        self._options = options
        self._engine_id = engine_id
        self._recorder = recorder
        self._unary = unary
        self._random = random.Random(f"{options.seed}/{options.run}/{engine_id}")
        self._client = RecordingClient(options.addresses, recorder, timeout_s=1.0)
        self._count = 0
        self._engine = self._start()

    def _start(self) -> StreamEngine | UnaryEngine:
        options = self._options
        if self._unary:
            return UnaryEngine(self._engine_id, options.addresses, self._recorder)
        return StreamEngine(self._engine_id, options.addresses, self._recorder, options.margin)

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-{self._engine_id}-{self._options.run}-{self._count}"

    async def run(self) -> None:
        """Go on until cancelled."""
        pause = 1.0 / self._options.rate
        busy = set[asyncio.Task[None]]()
        while True:
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.5))
            self._engine.step()
            if self._engine.ready and len(busy) < 8:
                task = asyncio.create_task(self._act())
                busy.add(task)
                task.add_done_callback(busy.discard)
            if self._random.random() < self._options.deaths / self._options.rate:
                await asyncio.gather(*busy)
                await self._die()

    async def _die(self) -> None:
        if isinstance(self._engine, StreamEngine) and self._random.random() < 0.3:
            self._engine.reset()
            return
        await self._engine.die()
        await asyncio.sleep(self._random.uniform(0.0, 1.0))
        self._engine = self._start()

    async def _act(self) -> None:
        engine, chance = self._engine, self._random.random()
        try:
            if chance < 0.15 and engine.held:
                request_id = self._random.choice(list(engine.held))
                if isinstance(engine, UnaryEngine):
                    await engine.withdraw(request_id)
                else:
                    engine.withdraw(request_id)
            elif chance < 0.25 and engine.held and isinstance(engine, UnaryEngine):
                await engine.set_life(
                    self._random.choice(list(engine.held)), self._random.choice((6.0, 15.0, 50.0))
                )
            else:
                await self._announce(engine)
        except ControlPlaneError as error:
            self._recorder.count(f"engine_{error.reason or type(error).__name__}")

    async def _announce(self, engine: StreamEngine | UnaryEngine) -> None:
        conversation = f"c{self._random.randrange(self._options.conversations)}"
        turns = [(await self._client.next_turn(conversation, self._name("b"))).turn]
        if self._random.random() < 0.1:  # two turns, the newer one announced first
            turns.insert(0, (await self._client.next_turn(conversation, self._name("b"))).turn)
        for turn in turns:
            if not engine.ready:
                return
            request_id, life_s = self._name("q"), self._random.choice(TTLS_S)
            if isinstance(engine, UnaryEngine):
                await engine.announce(conversation, request_id, turn, life_s)
            else:
                engine.announce(conversation, request_id, turn, life_s)


async def run(options: argparse.Namespace) -> None:
    """Run the engines until killed."""
    recorder = h.Recorder(options.history)
    async with asyncio.TaskGroup() as tasks:
        for engine_id in filter(None, options.stream.split(",")):
            tasks.create_task(Driver(options, engine_id, recorder, unary=False).run())
        for engine_id in filter(None, options.unary.split(",")):
            tasks.create_task(Driver(options, engine_id, recorder, unary=True).run())


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", required=True, help="of the replicas, with commas between")
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--run", type=int, default=1, help="number of this start, part of all names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stream", default="", help="engine ids that use the stream")
    parser.add_argument("--unary", default="", help="engine ids that use unary calls")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--rate", type=float, default=20.0, help="actions per second and engine")
    parser.add_argument("--deaths", type=float, default=0.05, help="deaths per second and engine")
    parser.add_argument("--margin", type=float, default=5.0, help="seconds taken off each announced life")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
