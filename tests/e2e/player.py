"""Plays conversations on a stack and judges every turn: its reply, its path, and what was reused."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from deploy.rig.engines import ADAPTER_NAME, BLOCK_TOKENS, MODEL_NAME
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import Claim, ConversationKey, Location
from tests.e2e.asking import Question, Reply, ask, ask_with_offer
from tests.e2e.edits import Ask, Edit, History, Plan, Step, next_prompts, reply_of
from tests.e2e.truth import (
    Circumstances,
    Kept,
    Knowledge,
    cached,
    common_prefix,
    kept_after,
    prefix_of,
    pullable,
)

CHUNK_TOKENS = 64
THRESHOLD_TOKENS = 64
"""vLLM's kv_recompute_threshold and kvplane's chunk, both as they are by default."""
ANNOUNCED_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """One turn. Token counts; `prefix` is the true common prefix with what was on offer."""

    conversation: str
    edit: str
    asked: str
    served: str
    reason: str
    prompt_tokens: int
    held_tokens: int
    prefix: int
    expected: tuple[int, ...]
    reused: int
    equal: bool
    reply: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    gap: float | None = None
    """Between the two best logprobs of recomputing where the replies first differ; None if they do not."""
    fault: str = ""

    @property
    def exact(self) -> bool:
        """Whether as much was reused as can be, and no more."""
        return self.reused in self.expected and not self.fault


class OneModel:
    """Lets requests of one model name run at a time.

    vLLM's LoRA on CPUs gives wrong tokens where a batch mixes requests with and without an adapter, with no
    KV connector at all; that must not be taken for a fault of reuse.
    """

    def __init__(self) -> None:
        self._running = Counter[str]()
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def of(self, model: str) -> AsyncIterator[None]:
        """Wait until no request of another model runs, and hold those up meanwhile."""
        async with self._changed:
            await self._changed.wait_for(lambda: not set(self._running) - {model})
            self._running[model] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._running[model] -= 1
                self._running += Counter()
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a stack is: base URLs, and host:port of the control plane."""

    router: str
    prefill: str
    decode: str
    plane: str


@dataclass(frozen=True, slots=True)
class Player:
    """Plays plans on a stack and judges every turn."""

    at: Addresses
    session: aiohttp.ClientSession
    plane: ControlPlaneClient
    one_model: OneModel = field(default_factory=OneModel)

    async def play(self, one: Plan) -> list[Result]:
        """Play a conversation to its end and have it released."""
        talk = _Talk(self, one)
        try:
            await talk.run()
        finally:
            for model in (MODEL_NAME, ADAPTER_NAME):
                await self.plane.end_conversation(talk.key(model))
        return talk.results


class _Talk:
    """One conversation under way."""

    def __init__(self, player: Player, one: Plan) -> None:
        self._at, self._session, self._plane = player.at, player.session, player.plane
        self._one_model, self._plan = player.one_model, one
        self._knowledge = Knowledge()
        self._circumstances = Circumstances(MODEL_NAME)
        self._history: History = ()
        self._last_turn = dict[str, int]()
        self.results = list[Result]()

    def key(self, model: str) -> ConversationKey:
        return ConversationKey("default", model, self._plan.name)

    async def run(self) -> None:
        opening = Step(Edit.CONTINUE, Ask.COLD, "", 0)
        await self._turns(opening, [self._plan.opening], self._circumstances)
        for step in self._plan.steps:
            circumstances = self._circumstances
            if step.edit is Edit.ADAPTER:
                other = ADAPTER_NAME if circumstances.model == MODEL_NAME else MODEL_NAME
                circumstances = dataclasses.replace(circumstances, model=other)
            elif step.edit is Edit.SALT:
                circumstances = dataclasses.replace(circumstances, salt=f"salt-{step.seed}")
            prompts = next_prompts(step, self._history, self._plan.as_tokens)
            if step.edit is Edit.OFFERED and circumstances.model == MODEL_NAME:
                await self._offered(step, prompts[0])
            else:
                await self._turns(step, prompts, circumstances)

    async def _turns(self, step: Step, prompts: Sequence[History], circumstances: Circumstances) -> None:
        """Send one turn, or several at once, through the router."""
        self._circumstances = circumstances
        offered = self._knowledge.offered(circumstances.model)
        questions = [Question(prompt, self._plan.as_tokens, circumstances) for prompt in prompts]
        headers = {"x-kvplane-path": str(step.ask)}
        name = self._plan.name
        async with self._one_model.of(circumstances.model):
            replies = await asyncio.gather(
                *(
                    ask(self._session, self._at.router, question, headers=headers, conversation_id=name)
                    for question in questions
                )
            )
        kept = [kept_after(circumstances, reply.prompt, reply.tokens) for reply in replies]
        missing = await self._until_announced(circumstances.model, kept)
        for number, (question, reply) in enumerate(zip(questions, replies, strict=True)):
            others = kept[:number] + kept[number + 1 :]
            expected, fault = self._expected(step, reply, offered, others, circumstances)
            await self._judge(step, question, reply, offered, expected, fault or missing)
        self._knowledge.announced(kept)
        self._history = (*prompts[0], reply_of(self._plan.as_tokens, replies[0].text, replies[0].tokens))

    async def _offered(self, step: Step, prompt: History) -> None:
        """Offer the model's location to a request for the adapter, past the router, which would not."""
        circumstances = Circumstances(ADAPTER_NAME)
        question = Question(prompt, self._plan.as_tokens, circumstances)
        offered = self._knowledge.offered(MODEL_NAME)
        claim = await self._plane.claim_location(
            self.key(MODEL_NAME), f"{self._plan.name} {step.seed}", "histories"
        )
        if not isinstance(claim, Claim):
            await self._judge(step, question, None, offered, frozenset({0}), f"not claimed: {claim}")
            return
        prefill, decode = self._at.prefill, self._at.decode
        async with self._one_model.of(circumstances.model):
            reply = await ask_with_offer(self._session, prefill, decode, question, claim.location)
        await self._plane.finish_claim(claim.claim_id, "histories")
        self._knowledge.taken(MODEL_NAME)
        self._knowledge.ever.append(kept_after(circumstances, reply.prompt, reply.tokens))
        fault = "" if reply.reason == "mismatch" else f"P reports {reply.reason}"
        await self._judge(step, question, reply, offered, frozenset({0}), fault)
        self._history = (*prompt, reply_of(self._plan.as_tokens, reply.text, reply.tokens))

    def _expected(
        self,
        step: Step,
        reply: Reply,
        offered: Sequence[Kept],
        others: Sequence[Kept],
        circumstances: Circumstances,
    ) -> tuple[frozenset[int], str]:
        """Return the counts of reused tokens that are right, and what is wrong with the path.

        `others` are turns that ran at the same time: what they left may have been found, or nothing at all,
        because one of them claimed what was on offer.
        """
        on_offer = [*offered, *others]
        wanted = str(step.ask) if offered else "cold"
        fault = "" if reply.path == wanted or others else f"served {reply.path}, not {wanted}"
        if reply.path == "pull":
            tokens = {
                pullable(kept, circumstances, reply.prompt, chunk=CHUNK_TOKENS, threshold=THRESHOLD_TOKENS)
                for kept in on_offer
            }
        elif reply.path == "direct":
            ends = [
                cached(which, circumstances, reply.prompt, block=BLOCK_TOKENS)
                for which in (offered, [*self._knowledge.ever, *others])
            ]
            tokens = set(range(ends[0], ends[1] + 1, BLOCK_TOKENS))
        else:
            tokens = {0}
        return frozenset(tokens | ({0} if others else set())), fault

    async def _judge(
        self,
        step: Step,
        question: Question,
        reply: Reply | None,
        offered: Sequence[Kept],
        expected: frozenset[int],
        fault: str,
    ) -> None:
        """Compare a turn with the same request computed by P alone, and note the result."""
        async with self._one_model.of(question.circumstances.model):
            plain = await ask(self._session, self._at.prefill, question)
        prompt = reply.prompt if reply is not None else ()
        best = max(offered, key=lambda kept: prefix_of(kept, question.circumstances, prompt), default=None)
        self.results.append(
            Result(
                conversation=self._plan.name,
                edit=str(step.edit),
                asked=str(step.ask),
                served=reply.path if reply is not None else "",
                reason=reply.reason if reply is not None else "",
                prompt_tokens=len(prompt),
                held_tokens=len(best.tokens) if best is not None else 0,
                prefix=prefix_of(best, question.circumstances, prompt) if best is not None else 0,
                expected=tuple(sorted(expected)),
                reused=(reply.reused_tokens or 0) if reply is not None else 0,
                equal=reply is not None and (reply.tokens, prompt) == (plain.tokens, plain.prompt),
                reply=reply.tokens if reply is not None else (),
                recomputed=plain.tokens,
                gap=plain.gap_at(common_prefix(reply.tokens, plain.tokens)) if reply is not None else None,
                fault=fault,
            )
        )

    async def _until_announced(self, model: str, kept: Sequence[Kept]) -> str:
        """Wait until the turn that has ended is on offer; returns what is wrong if it never is."""
        ends = time.monotonic() + ANNOUNCED_WITHIN_S
        lengths = {len(one.tokens) for one in kept}
        while True:
            found = await self._plane.lookup_location(self.key(model))
            if isinstance(found, Location) and found.turn > self._last_turn.get(model, 0):
                self._last_turn[model] = found.turn
                held = found.token_count
                return "" if held in lengths else f"{held} tokens announced, not {sorted(lengths)}"
            if time.monotonic() > ends:
                return f"not announced: {found if not isinstance(found, Location) else 'an older turn'}"
            await asyncio.sleep(0.01)
