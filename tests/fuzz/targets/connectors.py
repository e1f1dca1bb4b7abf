"""What a connector and a router's client are told: by requests, and by a control plane that may be any."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvplane.client import convert
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import ControlPlaneError, from_rpc_error
from kvplane.client.outbox import Outbox
from kvplane.client.session import EngineSession
from kvplane.client.slot import Slot
from kvplane.client.turns import TurnsStream
from kvplane.connector.envelope import read_envelope, read_promise
from kvplane.connector.fingerprint import Context
from kvplane.connector.inquiry import Answer, Inquirer, Question
from kvplane.connector.pull import plan_pull
from kvplane.v1 import engine_pb2, location_pb2
from tests.connector.asked import CHUNK, CONTEXT, KEY, LAYOUT, location
from tests.connector.test_pull import offer
from tests.fuzz.chance import Chance
from tests.fuzz.core import Target, Wrong
from tests.fuzz.messages import encoded, make
from tests.fuzz.world import REQUESTS, World, spoiled_json

_HELD = list(range(200))
_ENVELOPE: dict[str, Any] = {
    "do_remote_prefill": True,
    "kvplane": {
        "router": True,
        "tenant_id": "t",
        "model": "m",
        "adapter": "",
        "conversation_id": "c",
        "turn": 7,
        "endpoint": "http://10.0.0.2:8200",
        "turn_index": 2,
        "idle_s": 1.5,
        "lease_class": 3,
    },
}
_MEMBERS = ("kvplane", "fingerprint", "chain", "token_count", "remote_block_ids", "transfer_mode", "tp_size")
_LOCATION = location_pb2.LookupLocationResponse.DESCRIPTOR.fields_by_name["location"].message_type


class Params(Target):
    """kv_transfer_params of requests, which any client and router may have written."""

    name = "params"
    share = 3.0

    async def once(self, chance: Chance) -> str:
        if chance.odds(0.4):
            params = _many_spoiled(_ENVELOPE, chance)
            self.input = params
            envelope = read_envelope(params)
            if envelope is not None and not 0 < len(envelope.key.tenant_id.encode()) <= 256:
                raise Wrong("a tenant that is none is taken")
            return "envelope" if envelope is not None else "no envelope"
        params = _many_spoiled(offer(_HELD), chance)
        self.input = params
        if not isinstance(params, dict):
            return "no params"
        read_promise(params)
        prompt = [*_HELD[: chance.below(201)], *range(chance.below(40))]
        plan = plan_pull(params, layout=LAYOUT, context=Context("m"), tokens=prompt)
        if plan.tokens > len(prompt) or (plan.outcome is None) != bool(plan.tokens):
            raise Wrong("more is pulled than there is")
        return str(plan.outcome or "pull")


def _many_spoiled(value: Any, chance: Chance) -> Any:
    for _ in range(chance.pick((0, 1, 1, 2, 4))):
        value = spoiled_json(value, chance, _MEMBERS)
    return value


class _Made:
    """A control plane's client whose answers are made up."""

    def __init__(self, chance: Chance, known: Any) -> None:
        self._chance = chance
        self._known = known
        self._location = location(_HELD) if chance.odds(0.3) else None

    def _make(self, kind: Any) -> Any:
        wire = make(kind.DESCRIPTOR, self._chance, self._known)
        raw = encoded(wire, self._chance)
        try:
            return kind.FromString(raw)
        except Exception:  # gRPC answers that itself
            raise ControlPlaneError("cannot be read") from None

    async def begin_turn(self, key: m.ConversationKey, request_id: str, **_: Any) -> m.BegunTurn:
        begun = convert.begun_from_wire(self._make(location_pb2.BeginTurnResponse), key)
        return begun if self._location is None else m.BegunTurn(1, self._location, None, key)

    async def claim_location(self, *_: Any, **__: Any) -> m.Claim | m.MissReason:
        answer = self._make(location_pb2.ClaimLocationResponse)
        if answer.HasField("claim"):
            return convert.claim_from_wire(answer.claim)
        return convert.miss_from_wire(answer.miss_reason)

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        return convert.release_outcome_from_wire(self._make(location_pb2.ReleaseLocationResponse).outcome)


class Answers(Target):
    """Answers of a control plane: to a connector that asks, to an engine's session, in errors."""

    name = "answers"
    share = 3.0

    async def start(self) -> None:
        self._known = World().known()

    async def once(self, chance: Chance) -> str:
        kind = chance.below(4)
        if kind == 0:
            return await self._ask(chance)
        if kind == 1:
            return self._refused(chance)
        return self._session(chance)

    async def _ask(self, chance: Chance) -> str:
        inquirer, slot = Inquirer("p0", LAYOUT, CHUNK, 0.3), Slot[Answer]()
        client = cast(ControlPlaneClient, _Made(chance, self._known))
        key = KEY if chance.odds(0.7) else m.ConversationKey("t", "m", "")
        question = Question(key, CONTEXT, [*_HELD, 1, 2, 3], least_tokens=16)
        await inquirer.inquire(client, question, "p0@1", slot)
        answer = slot.take()
        if answer is None:
            raise Wrong("a question without an answer")
        if answer.plan.detail == "fault":
            raise Wrong("an answer is a fault of ours")
        return str(answer.plan.outcome or "pull")

    def _refused(self, chance: Chance) -> str:
        status = status_pb2.Status(code=3, message=chance.text())
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason=chance.text()[:99], domain="kvplane"))
        status.details.add().Pack(error_details_pb2.BadRequest())
        raw = status.SerializeToString()
        if chance.odds(0.7):
            raw = chance.spoiled(raw)
        self.input = raw
        metadata = grpc.aio.Metadata(("grpc-status-details-bin", raw), ("x", "y"))
        code = chance.pick(list(grpc.StatusCode))
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=chance.text())
        return type(from_rpc_error(error)).__name__

    def _session(self, chance: Chance) -> str:
        events = list[object]()
        outbox = Outbox(monotonic=lambda: 1.0)
        for request_id in REQUESTS[:4]:
            made = m.Announcement(
                KEY, m.RequestId(request_id), 1, 100, 4, b"{}", m.Fingerprint(64, b""), 60.0
            )
            outbox.announce(made, expires_at=100.0)
        spec = m.EngineSpec(m.EngineId("d"), m.EngineRole.DECODE, m.EngineProfile())
        client = cast(ControlPlaneClient, None)
        session = EngineSession(client, spec, outbox, events.append, monotonic=lambda: 1.0)
        for _ in range(chance.pick((1, 2, 3))):
            outbox.take()
            message: Any = make(engine_pb2.AttachEngineResponse.DESCRIPTOR, chance, self._known)
            self.input = message.SerializeToString()
            session._receive(message)
        return "received"


class _Stream:
    """A Turns call whose answers are made up."""

    def __init__(self, chance: Chance, known: Any) -> None:
        self._chance = chance
        self._known = known
        self._ids: deque[int] = deque()
        self._asked = asyncio.Event()

    async def write(self, message: Any) -> None:
        self._ids.extend(operation.id for operation in message.operations)
        self._asked.set()

    async def read(self) -> Any:
        chance = self._chance
        if chance.odds(0.05 + chance.wild / 4):
            return grpc.aio.EOF
        while not self._ids:
            self._asked.clear()
            await self._asked.wait()
        await asyncio.sleep(chance.pick((0, 0, 0, 0.01, 3)))
        made: Any = make(location_pb2.TurnsResponse.DESCRIPTOR, chance, self._known)
        if chance.odds(0.9):
            made.results.add()
            made.results[-1].CopyFrom(make(location_pb2.TurnsResult.DESCRIPTOR, chance, self._known))
            made.results[-1].id = self._ids.popleft()
        return made

    async def code(self) -> grpc.StatusCode:
        return self._chance.pick(list(grpc.StatusCode))

    def cancel(self) -> None:
        self._ids.clear()


class TurnsClient(Target):
    """A router's stream of operations, to a control plane that answers whatever it likes, or not."""

    name = "turns-client"
    share = 1.0
    life = 500

    async def start(self) -> None:
        self._known = World().known()

    async def once(self, chance: Chance) -> str:
        stream = TurnsStream(lambda: _Stream(chance, self._known), timeout_s=1.0)
        key = m.ConversationKey("t1", "m", "c1")
        calls = [
            stream.begin_turn(key, "q1"),
            stream.lookup_location(key),
            stream.claim_location(key, "q2", "r1"),
            stream.finish_claim("claim", "r1"),
            stream.touch_conversation(key, 60.0),
        ]
        try:
            done = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await stream.aclose()
        for outcome in done:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ControlPlaneError):
                raise outcome
        return f"{sum(not isinstance(outcome, BaseException) for outcome in done)} answered"
