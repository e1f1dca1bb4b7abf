"""Traffic: a router-like caller, so many requests a second, whatever becomes of them.

Each request is a conversation of its own with two turns: the first is served cold and announced by an engine,
the second wants it. No answer within the deadline means cold, as in the router; anything but an answer or the
lack of one is a failed request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from pathlib import Path

import uvloop

from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneError, ControlPlaneUnavailableError, LimitExceededError
from tests.robustness import history as h
from tests.robustness.fake_engines import RecordingClient, StreamEngine, key, place

_ANNOUNCED_WITHIN_S = 0.3
_LIFE_S = 30.0
_EXPECTED = {"CONTENTION"}
"""Reasons of refusals that a router answers with a cold turn too."""


class Caller:
    """Makes requests, and is the engine that serves them."""

    def __init__(self, options: argparse.Namespace, recorder: h.Recorder) -> None:
        self._options = options
        self._recorder = recorder
        self._client = RecordingClient(options.addresses, recorder, timeout_s=options.deadline)
        self._engine = StreamEngine(options.engine, options.addresses, recorder, options.margin)
        self._count = 0

    async def run(self) -> None:
        """Go on until cancelled; a request never waits for the one before."""
        due, requests = time.monotonic(), set[asyncio.Task[None]]()
        while True:
            self._count += 1
            task = asyncio.create_task(
                self._request(f"{self._options.engine}-{self._options.run}-{self._count}")
            )
            requests.add(task)
            task.add_done_callback(requests.discard)
            if not self._count % 100:
                self._engine.step()
            due = max(due + 1.0 / self._options.rate, time.monotonic() - 1.0)
            await asyncio.sleep(due - time.monotonic())

    async def _request(self, name: str) -> None:
        invoked = time.monotonic()
        try:
            outcome, detail = await self._turns(name)
        except ControlPlaneUnavailableError as error:
            outcome, detail = "cold", error.reason or "no answer"
        except LimitExceededError as error:
            outcome, detail = "cold", error.reason
        except ControlPlaneError as error:
            cold = error.reason in _EXPECTED
            outcome, detail = "cold" if cold else "failed", f"{error.reason} {error}"
        except Exception as error:
            outcome, detail = "failed", f"{type(error).__name__}: {error}"
        self._recorder.record(h.Request(outcome, detail, invoked, time.monotonic()))
        self._recorder.count(f"request_{outcome}" + (f"_{detail}" if outcome == "cold" else ""))

    async def _turns(self, name: str) -> tuple[str, str]:
        first = await self._client.next_turn(name, f"{name}-1")
        if not self._engine.ready:
            return "cold", "not registered"
        self._engine.announce(name, name, first.turn, _LIFE_S)
        begun = await self._begin_again(name)
        if isinstance(begun, m.MissReason):
            return "cold", str(begun)
        owner, invoked = self._options.engine, time.monotonic()
        claim = await self._client.claim_location(
            key(name), f"{name}-claim", owner, turn=begun.turn, wait_s=0.0
        )
        answered = time.monotonic()
        if isinstance(claim, m.MissReason):
            return "cold", str(claim)
        location = claim.location
        self._recorder.record(
            h.Granted(
                place(location),
                name,
                location.turn,
                claim.claim_id,
                claim.owner,
                claim.timeout_s,
                location.remaining_s,
                invoked,
                answered,
                "unary",
            )
        )
        self._recorder.record(h.Finishing(claim.claim_id, time.monotonic()))
        if self._count % 2:
            self._engine.read(name)  # as an engine that notices by itself that it was read
        else:
            await self._client.finish_claim(claim.claim_id, owner)
        return "hit", ""

    async def _begin_again(self, name: str) -> m.Location | m.MissReason:
        """Begin the second turn; the server waits for the first one's announcement."""
        invoked = time.monotonic()
        begun = await self._client.begin_turn(key(name), f"{name}-2", wait_s=_ANNOUNCED_WITHIN_S)
        answered = time.monotonic()
        self._recorder.record(h.Begun(name, f"{name}-2", begun.turn, invoked, answered))
        if begun.location is None:
            return begun.miss or m.MissReason.UNKNOWN_CONVERSATION
        found = begun.location
        self._recorder.record(
            h.Offered(place(found), name, found.turn, found.remaining_s, invoked, answered, "unary")
        )
        return found


async def run(options: argparse.Namespace) -> None:
    """Call until killed."""
    recorder = h.Recorder(options.history)
    await Caller(options, recorder).run()


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", required=True, help="of the replicas, with commas between")
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--run", type=int, default=1, help="number of this start, part of all names")
    parser.add_argument("--engine", default="caller", help="id of the engine that it is too")
    parser.add_argument("--rate", type=float, default=50.0, help="requests per second")
    parser.add_argument("--deadline", type=float, default=0.5, help="seconds for each call")
    parser.add_argument("--margin", type=float, default=5.0, help="seconds taken off each announced life")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
