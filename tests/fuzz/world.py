"""What callers of a control plane plausibly say: few names, so that inputs meet each other."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.fuzz.chance import Chance
from tests.fuzz.messages import Known

TENANTS = ("t1", "t2", "default")
ENGINES = ("d1", "d2", "p1")
REQUESTS = tuple(f"q{number}" for number in range(12))
CONVERSATIONS = tuple(f"c{number}" for number in range(6))


def params(engine_id: str = "d1") -> dict[str, Any]:
    """Return kv_transfer_params as vLLM's connector makes them."""
    return {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": engine_id,
        "remote_request_id": "q1",
        "remote_host": "127.0.0.1",
        "remote_port": 5601,
        "tp_size": 1,
        "remote_num_tokens": 100,
        "remote_blocks_expiry_time": 12345.678,
        "some_future_member": 9007199254740993,
    }


class World:
    """What was learned from answers: epochs, turns, claims, revisions, page tokens."""

    def __init__(self) -> None:
        self.epochs: dict[str, int] = {}
        self.turns: deque[int] = deque([1], maxlen=32)
        self.claims: deque[str] = deque(["claim"], maxlen=16)
        self.tokens: deque[str] = deque(["", "YQ"], maxlen=8)
        self.revisions: deque[int] = deque([0, 1], maxlen=16)
        self._engine = "d1"
        self._sequence = 0

    def _engine_id(self, chance: Chance) -> str:
        self._engine = chance.pick(ENGINES)
        return self._engine

    def _epoch(self, chance: Chance) -> int:
        return self.epochs.get(self._engine, 1) - chance.pick((0, 0, 0, 0, 0, 0, 1))

    def next_sequence(self, chance: Chance) -> int:
        self._sequence += 1
        return self._sequence

    def known(self) -> Known:
        """Return what fields plausibly hold."""
        among: Callable[[Any], Callable[[Chance], Any]] = lambda values: lambda chance: chance.pick(values)  # noqa: E731
        return {
            "tenant_id": among(TENANTS),
            "model": among(("m", "m", "m2")),
            "adapter": among(("", "", "lora")),
            "conversation_id": among(CONVERSATIONS),
            "LookupLocationRequest.fingerprint": among((None,)),
            "engine_id": self._engine_id,
            "reader_engine_id": among(("", "p1", "d1", "none")),
            "engine_epoch": self._epoch,
            "request_id": among(REQUESTS),
            "owner": among(("r1", "r2")),
            "claim_id": among(self.claims),
            "turn": among(self.turns),
            "page_size": among((0, 1, 2, 100, 1000)),
            "page_token": among(self.tokens),
            "from_revision": among(self.revisions),
            "sequence": self.next_sequence,
            "endpoint": among(("", "http://10.0.0.7:8200", "http://[fd00::7]:8200", "https://e.example/")),
            "transfer_mode": among(("", "pull")),
            "role": among((1, 2, 3)),
            "served_models": among(("m", "m2", "lora")),
            "lease_class": among((0, 1, 7, 1024)),
            "seconds": among((0, 0, 1, 5, 300, 600)),
            "nanos": among((0, 0, 1, 500_000_000)),
            "data_parallel_rank": among((0, 0, 1)),
            "id": lambda chance: chance.below(1000),
            "sent_at_ms": among((0, 1, 1000, 10**12)),
            "Announcement": lambda chance: lambda wire: _whole_announcement(wire, chance, self._engine),
            "Fingerprint": lambda chance: lambda wire: _whole_fingerprint(wire, chance),
            "Location": lambda chance: lambda wire: _whole_announcement(wire, chance, wire.engine_id),
            "BeginTurnRequest": lambda chance: lambda wire: _mostly_named(wire, chance),
            "LookupLocationRequest": lambda chance: lambda wire: _mostly_named(wire, chance),
        }

    def learn(self, request: Any, answer: Any) -> None:
        """Take from an answer what later requests may name."""
        name = answer.DESCRIPTOR.name
        if name == "RegisterEngineResponse":
            self.epochs[request.spec.engine_id] = answer.engine_epoch
        elif name == "BeginTurnResponse":
            self.turns.append(answer.turn)
        elif name == "ClaimLocationResponse" and answer.HasField("claim"):
            self.claims.append(answer.claim.claim_id)
        elif name in ("ListLocationsResponse", "ListEnginesResponse"):
            self.tokens.append(answer.next_page_token)
            if name == "ListLocationsResponse":
                self.revisions.append(answer.revision)


def _mostly_named(wire: Any, chance: Chance) -> None:
    """Have a conversation be asked for by its id in most cases, by its prompt in some."""
    if chance.odds(0.7):
        wire.ClearField("fingerprint")
    elif chance.odds(0.5):
        wire.key.conversation_id = ""
    if wire.DESCRIPTOR.fields_by_name.get("wait") is not None and chance.odds(0.9):
        wire.wait.Clear()
        wire.wait.nanos = 50_000_000


def _whole_fingerprint(wire: Any, chance: Chance) -> None:
    wire.chunk_tokens = 64
    wire.chain = b"ABCDEFGH" * chance.pick((1, 2, 2, 3, 40)) + chance.pick((b"", b"12345678"))


def _whole_announcement(wire: Any, chance: Chance, engine_id: str) -> None:
    _whole_fingerprint(wire.fingerprint, chance)
    wire.token_count = len(wire.fingerprint.chain) // 8 * 64 - chance.below(64)
    wire.block_count = 1 + chance.below(100)
    made: Any = params(engine_id)
    if chance.odds(0.2):
        made = spoiled_json(made, chance)
    wire.kv_transfer_params = json.dumps(made).encode("utf-8", "replace")
    if chance.odds(0.9) and wire.DESCRIPTOR.fields_by_name.get("ttl") is not None:
        wire.ttl.Clear()
        wire.ttl.seconds = chance.pick((20, 400, 480, 1000))


_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1.5, 2**63, -(2**70), 1e308, "", "x", "é" * 300, [], {}, [[]], [None],
    {"": None},
)  # fmt: skip


def odd_json(chance: Chance, depth: int = 3) -> Any:
    """Return a JSON value of no meaning."""
    kind = chance.below(8)
    if kind < 4 or not depth:
        return chance.pick(_ODD)
    if kind == 4:
        return chance.text()
    if kind == 5:
        return [odd_json(chance, depth - 1) for _ in range(chance.below(4))]
    if kind == 6:
        return {chance.text(): odd_json(chance, depth - 1) for _ in range(chance.below(4))}
    value: Any = chance.pick(_ODD)
    for _ in range(chance.pick((2, 10, 100, 300, 900))):
        value = [value] if chance.odds(0.5) else {"a": value}
    return value


def spoiled_json(value: Any, chance: Chance, more: tuple[str, ...] = ()) -> Any:
    """Return a JSON value with one thing in it changed, removed, or put in under a name of `more`."""
    if isinstance(value, dict) and value:
        name = chance.pick(list(value))
        kind = chance.below(6)
        if kind == 0:
            return {key: item for key, item in value.items() if key != name}
        if kind == 1:
            return {**value, name: odd_json(chance)}
        if kind == 2:
            return {**value, chance.pick(more) if more else chance.text(): odd_json(chance)}
        return {**value, name: spoiled_json(value[name], chance, more)}
    if isinstance(value, list) and value:
        at, kind = chance.below(len(value)), chance.below(5)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value + value[at:] * chance.pick((1, 1, 50))
        if kind == 2:
            return [*value[:at], odd_json(chance), *value[at:]]
        return [*value[:at], spoiled_json(value[at], chance, more), *value[at + 1 :]]
    return odd_json(chance)
