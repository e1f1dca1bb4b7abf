"""Traffic: claimers that fight over the same conversations, through Turns streams to several replicas.

Each attempt has a claim id of its own; some are submitted twice, to two replicas at once. Who wins reads for
a moment and finishes, or never does. Lookups and begun turns are mixed in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import deque
from pathlib import Path

import uvloop

from kvplane.client import convert
from kvplane.v1 import common_pb2, location_pb2
from tests.robustness import history as h
from tests.robustness.fake_engines import key
from tests.robustness.turn_stream import TurnStream

_WAIT = convert.duration(0.0)
_DEADLINE_S = 2.0
_BACKOFF_S = 0.2


class _Asked:
    """An operation on its way."""

    __slots__ = ("conversation", "invoked", "name")

    def __init__(self, conversation: str, name: str, invoked: float) -> None:
        self.conversation = conversation
        self.name = name
        self.invoked = invoked


class Claimer:
    """One claimer. `rate` attempts a second are made, if the replicas can."""

    def __init__(self, owner: str, options: argparse.Namespace, recorder: h.Recorder) -> None:
        self._owner = owner
        self._options = options
        self._recorder = recorder
        self._random = random.Random(f"{options.seed}/{owner}")
        self._asked: dict[int, _Asked] = {}
        self._next_id = 0
        self._count = 0
        self._finish: deque[tuple[float, str]] = deque()
        self._won: set[str] = set()
        self._keys = [convert.key_to_wire(key(f"c{number}")) for number in range(options.conversations)]
        self._streams = [
            TurnStream(address, self._on_result, self._on_error) for address in options.addresses.split(",")
        ]

    async def run(self) -> None:
        """Go on until cancelled."""
        options = self._options
        pause = options.batch / options.rate
        due = time.monotonic()
        while True:
            chosen = self._random.sample(self._streams, min(2, len(self._streams)))
            twice = len(chosen) > 1 and self._random.random() < options.twice
            batch = self._batch()
            if twice:
                copies = [self._copy(batch), self._copy(batch)]
                missing = sum(
                    await asyncio.gather(
                        *(stream.ask(copy, _DEADLINE_S) for stream, copy in zip(chosen, copies, strict=True))
                    )
                )
            else:
                missing = await chosen[0].ask(self._copy(batch), _DEADLINE_S)
            if missing:
                self._recorder.count("unanswered", missing)
                self._asked.clear()
                await asyncio.sleep(_BACKOFF_S)
            due = max(due + pause, time.monotonic() - 1.0)
            await asyncio.sleep(due - time.monotonic())

    def _batch(self) -> list[location_pb2.TurnsOperation]:
        """Return operations without ids: claims, and what is due to be finished."""
        operations = list[location_pb2.TurnsOperation]()
        first = self._random.randrange(len(self._keys))
        for number in range(self._options.batch):
            wire = self._keys[(first + number) % len(self._keys)]
            self._count += 1
            name, chance = f"{self._owner}-{self._count}", self._random.random()
            if chance < 0.02:
                operation = location_pb2.TurnsOperation(lookup=location_pb2.LookupLocationRequest(key=wire))
            elif chance < 0.03:
                begin = location_pb2.BeginTurnRequest(key=wire, request_id=name, wait=_WAIT)
                operation = location_pb2.TurnsOperation(begin_turn=begin)
            else:
                claim = location_pb2.ClaimLocationRequest(
                    key=wire, request_id=name, owner=self._owner, wait=_WAIT
                )
                operation = location_pb2.TurnsOperation(claim=claim)
            operations.append(operation)
        now = time.monotonic()
        while self._finish and self._finish[0][0] <= now:
            _, claim_id = self._finish.popleft()
            self._recorder.record(h.Finishing(claim_id, now))
            target = location_pb2.FinishClaim(claim_id=claim_id, owner=self._owner)
            release = location_pb2.ReleaseLocationRequest(finish_claim=target)
            operations.append(location_pb2.TurnsOperation(release=release))
        return operations

    def _copy(self, batch: list[location_pb2.TurnsOperation]) -> list[location_pb2.TurnsOperation]:
        """Return operations with ids of their own, noted as invoked now."""
        copies, now, claims = list[location_pb2.TurnsOperation](), time.monotonic(), 0
        for operation in batch:
            self._next_id += 1
            copy = location_pb2.TurnsOperation()
            copy.CopyFrom(operation)
            copy.id = self._next_id
            copies.append(copy)
            kind = operation.WhichOneof("operation")
            if kind == "claim":
                claims += 1
                asked = _Asked(operation.claim.key.conversation_id, operation.claim.request_id, now)
            elif kind == "begin_turn":
                begin = operation.begin_turn
                asked = _Asked(begin.key.conversation_id, begin.request_id, now)
            elif kind == "lookup":
                asked = _Asked(operation.lookup.key.conversation_id, "", now)
            else:
                asked = _Asked("", operation.release.finish_claim.claim_id, now)
            self._asked[self._next_id] = asked
        self._recorder.count("claims_asked", claims)
        return copies

    def _on_error(self, name: str) -> None:
        self._recorder.count(f"stream_{name}")

    def _on_result(self, result: location_pb2.TurnsResult, at: float) -> None:
        asked = self._asked.pop(result.id, None)
        if asked is None:
            return
        kind = result.WhichOneof("result")
        if kind == "claim":
            self._on_claim(result.claim, asked, at)
        elif kind == "begin_turn":
            turn = result.begin_turn.turn
            self._recorder.record(h.Begun(asked.conversation, asked.name, turn, asked.invoked, at))
            if result.begin_turn.HasField("location"):
                self._offered(result.begin_turn.location, asked, at)
        elif kind == "lookup" and result.lookup.HasField("location"):
            self._offered(result.lookup.location, asked, at)
        elif kind == "error":
            self._recorder.count(f"error_{result.error.reason or result.error.code}")

    def _on_claim(self, answer: location_pb2.ClaimLocationResponse, asked: _Asked, at: float) -> None:
        self._recorder.count("claims_decided")
        if not answer.HasField("claim"):
            name = common_pb2.MissReason.Name(answer.miss_reason).removeprefix("MISS_REASON_")
            self._recorder.count(f"miss_{name.lower()}")
            return
        claim = convert.claim_from_wire(answer.claim)
        location = claim.location
        self._recorder.count("claim_hits")
        self._recorder.record(
            h.Granted(
                h.Place(location.engine_id, location.engine_epoch, location.request_id),
                location.key.conversation_id,
                location.turn,
                asked.name,
                claim.owner,
                claim.timeout_s,
                location.remaining_s,
                asked.invoked,
                at,
                "turns",
            )
        )
        if claim.claim_id != asked.name or location.key.conversation_id != asked.conversation:
            self._recorder.count("answers_of_another_question")
        if claim.claim_id not in self._won:
            self._won.add(claim.claim_id)
            if self._random.random() < 0.85:  # the others die while they read
                self._finish.append((at + self._random.uniform(0.0, 0.3), claim.claim_id))

    def _offered(self, wire: common_pb2.Location, asked: _Asked, at: float) -> None:
        place = h.Place(wire.engine_id, wire.engine_epoch, wire.request_id)
        remaining_s = convert.seconds(wire.remaining)
        self._recorder.record(
            h.Offered(place, asked.conversation, wire.turn, remaining_s, asked.invoked, at, "turns")
        )


async def run(options: argparse.Namespace) -> None:
    """Run the claimers until killed."""
    recorder = h.Recorder(options.history)
    async with asyncio.TaskGroup() as tasks:
        for number in range(options.claimers):
            owner = f"{options.name}{number}-{options.run}"
            tasks.create_task(Claimer(owner, options, recorder).run())


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--addresses", required=True, help="of the replicas, with commas between")
    parser.add_argument("--history", type=Path, required=True)
    parser.add_argument("--name", default="r", help="begins the claimers' names")
    parser.add_argument("--run", type=int, default=1, help="number of this start, part of all names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--claimers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32, help="operations in a message")
    parser.add_argument("--rate", type=float, default=500.0, help="attempts per second and claimer")
    parser.add_argument("--twice", type=float, default=0.1, help="share of batches sent to two replicas")
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
