"""The session thread's half of asking: begins the turn, decides whether pulling is worth it, and claims."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import ControlPlaneError, ControlPlaneUnavailableError
from kvplane.client.logs import get_logger, trace
from kvplane.client.model import BegunTurn, Claim, ConversationKey, Fingerprint, Location
from kvplane.client.slot import Slot
from kvplane.connector.chains import ChainCache
from kvplane.connector.envelope import MEMBER, Outcome
from kvplane.connector.fingerprint import Context, Item, make_chain, matching_tokens
from kvplane.connector.groups import CacheLayout
from kvplane.connector.pull import PullPlan, plan_pull
from kvplane.connector.recall import PromptMemory

_log = get_logger("kvplane.connector")

_FINISH_ATTEMPTS = 3
_FINISH_AGAIN_S = 1.0
_IN_FLIGHT_WAIT_S = 0.05
_MADE_UP_ID = "auto/"  # as the control plane's own


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be known before a request is scheduled.

    Attributes:
        key: the conversation; with an empty conversation_id it is found by its prompt.
        context: what the prompt's KV depends on besides tokens.
        tokens: the prompt; not changed any more.
        items: its multimodal items.
        local_tokens: so many are in the own cache.
        least_tokens: a pull brings at least so many more, or is not worth it; 0: nothing can be pulled.
        avoided: engines not to pull from now.
    """

    key: ConversationKey
    context: Context
    tokens: Sequence[int]
    items: Sequence[Item] = ()
    local_tokens: int = 0
    least_tokens: int = 1
    avoided: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it.

    Attributes:
        begun: the turn, None if none was begun.
        claim: a claim to read with, exactly once; what owns the answer finishes it.
        params: the request's kv_transfer_params for it.
        plan: what to pull, or why nothing.
    """

    begun: BegunTurn | None
    plan: PullPlan
    claim: Claim | None = None
    params: dict[str, Any] | None = None


class Inquirer:
    """Answers questions. Belongs to the session's thread, on which nothing of the engine's is touched.

    Args:
        engine_id: of this engine, which is the reader.
        layout: how it keeps KV.
        chunk_tokens: of its fingerprints.
        timeout_s: after which nobody waits for an answer.
    """

    def __init__(self, engine_id: str, layout: CacheLayout, chunk_tokens: int, timeout_s: float) -> None:
        self._engine_id = engine_id
        self._layout = layout
        self._chunk_tokens = chunk_tokens
        self._timeout_s = timeout_s
        self._memory = PromptMemory(chunk_tokens)
        self._chains = ChainCache()
        self._reported: set[tuple[str, type[Exception]]] = set()

    async def inquire(
        self, client: ControlPlaneClient, question: Question, owner: str, slot: Slot[Answer]
    ) -> None:
        """Find out, hand over what was found, and finish a claim that nobody wants. Raises nothing."""
        claim_id = uuid.uuid4().hex
        unsure = False
        begun: BegunTurn | None = None
        try:
            begun = await self._begin(client, question)
            answer = self._judge(question, begun)
            if answer.plan.outcome is None and slot.open:
                unsure = True  # from here on a claim may exist
                answer = await self._claim(client, question, answer, begun, claim_id, owner)
                unsure = False
        except ControlPlaneUnavailableError:
            answer = replace(cold("control_plane_silent"), begun=begun)
        except ControlPlaneError as error:
            self._report("control_plane_refused", error, reason=error.reason)
            answer = replace(cold("control_plane_refused"), begun=begun)
        except Exception as error:
            self._report("connector_fault", error, trace=trace(error))
            answer = replace(cold("fault"), begun=begun)
        taken = slot.put(answer)
        if unsure or (answer.claim is not None and not taken):
            await finish_claim(client, claim_id, owner)

    def _report(self, event: str, error: Exception, **more: str) -> None:
        """Log what should not be; each kind once, since each request may meet it."""
        if (event, type(error)) not in self._reported:
            self._reported.add((event, type(error)))
            _log.warning(event, where="ask", error=type(error).__name__, **more)

    async def _begin(self, client: ControlPlaneClient, question: Question) -> BegunTurn:
        async def begin(key: ConversationKey, chain: bytes | None = None) -> BegunTurn:
            fingerprint = Fingerprint(self._chunk_tokens, chain) if chain is not None else None
            return await client.begin_turn(
                key,
                uuid.uuid4().hex,
                wait_s=min(_IN_FLIGHT_WAIT_S, self._timeout_s / 2),
                fingerprint=fingerprint,
                timeout_s=self._timeout_s,
            )

        key, tokens, items = question.key, question.tokens, question.items
        if key.conversation_id:
            return await begin(key)
        seed = question.context.seed()
        chain = make_chain(question.context, tokens, self._chunk_tokens, items, self._chains)
        known = self._memory.take(seed, chain, tokens, items)
        if known is not None and replace(known, conversation_id="") == key:
            begun = await begin(known)
        else:
            begun = await begin(key, chain)
            if begun.location is not None and not self._is_whole_prefix(begun.location, question):
                # All its whole chunks are in the prompt, and then it differs: a long beginning in common.
                begun = await begin(replace(key, conversation_id=f"{_MADE_UP_ID}{uuid.uuid4().hex}"))
        self._memory.remember(seed, chain, tokens, begun.key, items)
        return begun

    def _judge(self, question: Question, begun: BegunTurn) -> Answer:
        """Decide whether to claim: the plan has no outcome then."""
        location = begun.location
        if location is None:
            return Answer(begun, PullPlan(0, None, Outcome.COLD, str(begun.miss or "")))
        if not question.least_tokens:
            return Answer(begun, PullPlan(0, None, Outcome.COLD, "not_readable"))
        if location.engine_id == self._engine_id:
            return Answer(begun, PullPlan(0, None, Outcome.COLD, "own_location"))
        if location.engine_id in question.avoided:
            return Answer(begun, PullPlan(0, None, Outcome.COLD, "peer_breaker"))
        plan, params = self._plan(question, location)
        if plan.outcome is None:
            if plan.tokens <= question.local_tokens:
                plan = replace(plan, outcome=Outcome.LOCAL_HIT)
            elif plan.tokens - question.local_tokens < question.least_tokens:
                plan = replace(plan, outcome=Outcome.BELOW_THRESHOLD)
        if plan.outcome is not None:
            return Answer(begun, replace(plan, block_ids=None))
        return Answer(begun, plan, None, params)

    async def _claim(
        self,
        client: ControlPlaneClient,
        question: Question,
        worth: Answer,
        begun: BegunTurn,
        claim_id: str,
        owner: str,
    ) -> Answer:
        assert begun.location is not None
        claim = await client.claim_location(
            begun.key,
            claim_id,
            owner,
            reader_engine_id=self._engine_id,
            turn=begun.location.turn,
            wait_s=0.0,
        )
        if not isinstance(claim, Claim):
            return Answer(begun, PullPlan(0, None, Outcome.COLD, f"claim_lost_{claim}"))
        plan, params = worth.plan, worth.params
        if claim.location.kv_transfer_params != begun.location.kv_transfer_params:
            plan, params = self._plan(question, claim.location)
        return Answer(begun, plan, claim, params)

    def _plan(self, question: Question, location: Location) -> tuple[PullPlan, dict[str, Any]]:
        params = _read_params(location)
        plan = plan_pull(
            params,
            layout=self._layout,
            context=question.context,
            tokens=question.tokens,
            items=question.items,
            hasher=self._chains,
        )
        return plan, params

    def _is_whole_prefix(self, location: Location, question: Question) -> bool:
        fingerprint = location.fingerprint
        equal = matching_tokens(
            fingerprint.chain,
            location.token_count,
            fingerprint.chunk_tokens,
            question.context,
            question.tokens,
            question.items,
            self._chains,
        )
        return equal == location.token_count


async def finish_claim(client: ControlPlaneClient, claim_id: str, owner: str) -> None:
    """Finish a claim, or leave it to its timeout if the control plane does not answer. Raises nothing."""
    for attempt in range(_FINISH_ATTEMPTS):
        try:
            await client.finish_claim(claim_id, owner)
            return
        except ControlPlaneUnavailableError:
            if attempt + 1 < _FINISH_ATTEMPTS:
                await asyncio.sleep(_FINISH_AGAIN_S)
        except ControlPlaneError:
            return  # it has no such claim of ours


def cold(detail: str) -> Answer:
    """Return the answer that there is nothing to pull, and no turn."""
    return Answer(None, PullPlan(0, None, Outcome.COLD, detail))


def _read_params(location: Location) -> dict[str, Any]:
    """Return what a prefill request needs to pull a location; whether it is well-formed the plan will see."""
    try:
        announced = json.loads(location.kv_transfer_params)
    except ValueError:
        announced = {}
    return {
        **(announced if isinstance(announced, dict) else {}),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        MEMBER: {
            "fingerprint": {
                "chunk_tokens": location.fingerprint.chunk_tokens,
                "chain": location.fingerprint.chain.hex(),
            },
            "token_count": location.token_count,
        },
    }
