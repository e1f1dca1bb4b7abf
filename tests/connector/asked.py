"""Stand-ins for what the prefill side talks to: a session that is run step by step, and a client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneError
from kvplane.connector.fingerprint import Context, make_chain
from kvplane.connector.groups import CacheLayout, Group
from kvplane.connector.inquiry import Question

CHUNK = 16
CONTEXT = Context("m")
LAYOUT = CacheLayout((Group(16),))
KEY = m.ConversationKey("t", "m", "c")
UNNAMED = m.ConversationKey("t", "m", "")


def location(
    tokens: Sequence[int],
    *,
    key: m.ConversationKey = KEY,
    turn: int = 1,
    engine_id: str = "d0",
    context: Context = CONTEXT,
    **changes: Any,
) -> m.Location:
    """A location that holds these tokens."""
    blocks = LAYOUT.blocks_for(len(tokens))
    params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(1, blocks + 1))],
        "remote_engine_id": engine_id,
        "remote_request_id": f"{key.conversation_id}-{turn}",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": len(tokens),
        "remote_blocks_expiry_time": 1234.5,
        "transfer_mode": "pull",
        **changes,
    }
    return m.Location(
        key=key,
        engine_id=m.EngineId(engine_id),
        engine_epoch=1,
        request_id=m.RequestId(f"{key.conversation_id}-{turn}"),
        turn=turn,
        token_count=len(tokens),
        block_count=blocks,
        kv_transfer_params=json.dumps(params).encode(),
        fingerprint=m.Fingerprint(CHUNK, make_chain(context, tokens, CHUNK)),
        remaining_s=400,
        revision=1,
    )


def question(tokens: Sequence[int], key: m.ConversationKey = KEY, **changes: Any) -> Question:
    """A question about a prompt of these tokens."""
    return Question(key, CONTEXT, tokens, **{"least_tokens": 16, **changes})


class Client:
    """Has the calls that are used, with answers put in before; counts what is claimed and finished.

    Attributes:
        locations: by conversation; what is claimed goes.
        by_prompt: what is found for an empty conversation_id.
        fails: by call, what it raises; after it has done its work where `lost` names it.
    """

    def __init__(self) -> None:
        self.locations: dict[m.ConversationKey, m.Location] = {}
        self.by_prompt: m.Location | None = None
        self.fails: dict[str, ControlPlaneError] = {}
        self.lost: set[str] = set()
        self.refuse_claims: m.MissReason | None = None
        self.begun: list[tuple[m.ConversationKey, m.Fingerprint | None]] = []
        self.granted: dict[str, m.Claim] = {}
        self.claimed: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.request_ids: list[str] = []
        self.gate: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._turn = 100

    async def _enter(self, call: str) -> None:
        if self.gate is not None:
            await self.gate()
        if call in self.fails and call not in self.lost:
            raise self.fails[call]

    async def _leave(self, call: str) -> None:
        if self.gate is not None:
            await self.gate()
        if call in self.fails and call in self.lost:
            raise self.fails[call]

    async def begin_turn(
        self,
        key: m.ConversationKey,
        request_id: str,
        *,
        wait_s: float | None = None,
        fingerprint: m.Fingerprint | None = None,
        timeout_s: float | None = None,
    ) -> m.BegunTurn:
        self.request_ids.append(request_id)
        self.begun.append((key, fingerprint))
        await self._enter("begin_turn")
        found = self.locations.get(key)
        if not key.conversation_id:
            assert fingerprint is not None
            found = self.by_prompt
            key = found.key if found else m.ConversationKey(key.tenant_id, key.model, f"auto/{self._turn}")
        self._turn += 1
        miss = None if found else m.MissReason.UNKNOWN_CONVERSATION
        answer = m.BegunTurn(self._turn, found, miss, key, 3, 12.5, 7)
        await self._leave("begin_turn")
        return answer

    async def claim_location(
        self,
        key: m.ConversationKey,
        request_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> m.Claim | m.MissReason:
        assert reader_engine_id == "p0"
        self.request_ids.append(request_id)
        await self._enter("claim_location")
        if self.refuse_claims is not None:
            return self.refuse_claims
        found = self.locations.pop(key, None) or self.by_prompt
        if found is None or found.turn != turn:
            return m.MissReason.CLAIMED
        self.by_prompt = None if found is self.by_prompt else self.by_prompt
        self.claimed[request_id] += 1
        claim = self.granted[request_id] = m.Claim(request_id, owner, found, 30.0)
        await self._leave("claim_location")
        return claim

    async def finish_claim(self, claim_id: str, owner: str) -> m.ReleaseOutcome:
        assert owner == "p0@5"
        await self._enter("finish_claim")
        self.finished[claim_id] += 1
        return m.ReleaseOutcome.RELEASED

    def unfinished(self) -> list[str]:
        """Claims that were granted and not finished."""
        return [claim_id for claim_id in self.claimed if not self.finished[claim_id]]


class _Turnstile:
    """Awaited, it gives control back to whoever steps the coroutine."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Session:
    """Runs what it is given only as far as it is told to: every interleaving can be had."""

    def __init__(self) -> None:
        self.attached = True
        self.takes = True
        self.registration: m.Registration | None = m.Registration(5, 10, 480, 30)
        self.client = Client()
        self.client.gate = self._pause
        self.running: list[Coroutine[Any, Any, None]] = []

    @staticmethod
    async def _pause() -> None:
        await _Turnstile()

    def submit(self, work: Callable[[Any], Coroutine[Any, Any, None]]) -> bool:
        if self.takes:
            self.running.append(work(self.client))
        return self.takes

    def step(self, index: int = 0) -> None:
        """Let one of the coroutines go on to its next pause."""
        work = self.running[index]
        try:
            work.send(None)
        except StopIteration:
            self.running.remove(work)

    def finish(self) -> None:
        """Run everything to its end."""
        while self.running:
            self.step()

    def close(self) -> None:
        """End what still runs."""
        for work in self.running:
            work.close()
        self.running.clear()
