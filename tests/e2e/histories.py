"""Random histories on real vLLM: every reply compared with recomputing, every reuse with the true prefix.

usage: python -m tests.e2e.histories [--count 300] [--seed 1] [--json PATH] [--at-once 2] [--no-adapters]

Starts `kvplane up`, P without prefix caching and D with it, in float32. Turns go through the router by pull,
direct and cold in a random mix. Recomputing is the same request sent to P alone, which has no prefix cache
and is told of no KV: plain vLLM. What can be reused is counted on token ids (truth.py), and the sum is
compared with what P's own metrics say was transferred.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from deploy.rig import metrics
from deploy.rig.engines import ADAPTER_NAME, BLOCK_TOKENS, MODEL_NAME, small_model, vllm_venv
from deploy.rig.make_tiny_adapter import write_adapter
from deploy.rig.stack import Stack
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import Claim, ConversationKey, Location
from tests.e2e.asking import NotAnsweredError, Question, Reply, ask, ask_with_offer
from tests.e2e.edits import Ask, Edit, History, Plan, Step, next_prompts, plan, reply_of
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
REQUEST_S = 300.0


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


@dataclass(slots=True)
class Report:
    """A whole run."""

    results: list[Result] = field(default_factory=list)
    transferred_tokens: int = 0
    """As P's own metrics count them."""
    seconds: float = 0.0

    def conversations(self) -> dict[str, list[Result]]:
        """Return the turns by conversation."""
        found = dict[str, list[Result]]()
        for result in self.results:
            found.setdefault(result.conversation, []).append(result)
        return found

    def summary(self) -> dict[str, Any]:
        """Return the figures."""
        conversations = list(self.conversations().values())
        pulled = sum(result.reused for result in self.results if result.served == "pull")
        return {
            "histories": len(conversations),
            "histories_equal": sum(all(turn.equal for turn in turns) for turns in conversations),
            "histories_reuse_exact": sum(all(turn.exact for turn in turns) for turns in conversations),
            "turns": len(self.results),
            "turns_equal": sum(result.equal for result in self.results),
            "turns_reuse_exact": sum(result.exact for result in self.results),
            "served": dict(Counter(result.served for result in self.results)),
            "different_replies": len({result.reply for result in self.results}),
            "turns_with_reuse": sum(result.reused > 0 for result in self.results),
            "turns_with_part_reused": sum(0 < result.reused < result.held_tokens for result in self.results),
            "tokens_pulled": pulled,
            "tokens_transferred_by_p_metrics": self.transferred_tokens,
            "edits": dict(sorted(Counter(result.edit for result in self.results).items())),
            "faults": [dataclasses.asdict(r) for r in self.results if not (r.equal and r.exact)][:50],
            "seconds": round(self.seconds, 1),
        }


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
class Player:
    """Plays plans on a stack and judges every turn."""

    stack: Stack
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
        self._stack, self._session, self._plane = player.stack, player.session, player.plane
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
                    ask(self._session, self._stack.url, question, headers=headers, conversation_id=name)
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
        prefill, decode = self._stack.prefill.url, self._stack.decode.url
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
            plain = await ask(self._session, self._stack.prefill.url, question)
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


async def run(
    stack: Stack,
    count: int,
    seed: int,
    *,
    at_once: int = 2,
    adapters: bool = True,
    progress: Callable[[Report, int], None] = lambda report, done: None,
) -> Report:
    """Play `count` conversations, `at_once` of them at any time, on a running stack.

    A request that an engine refuses is a fault of its conversation, not an end of the run.
    """
    report, began, done = Report(), time.monotonic(), 0
    before = await asyncio.to_thread(metrics.read, stack.prefill.url)
    waiting = iter(range(count))
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_S)) as session,
        ControlPlaneClient(stack.plane.grpc_address) as plane,
    ):
        player = Player(stack, session, plane)

        async def work() -> None:
            nonlocal done
            for number in waiting:
                one = plan(seed, number, adapters=adapters)
                try:
                    report.results += await player.play(one)
                except (NotAnsweredError, aiohttp.ClientError, TimeoutError) as error:
                    report.results.append(_broken(one, error))
                done += 1
                report.seconds = time.monotonic() - began
                progress(report, done)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())
    after = await asyncio.to_thread(metrics.read, stack.prefill.url)
    report.transferred_tokens = round((after - before).transferred_tokens)
    return report


def _broken(one: Plan, error: Exception) -> Result:
    return Result(
        one.name, "", "", "", "", 0, 0, 0, (), 0, equal=False, fault=f"{type(error).__name__}: {error}"
    )


def exact_stack(model: Path, logs: Path, *, adapters: bool = True) -> Stack:
    """Return a stack for comparing tokens, not started: float32, and an adapter unless told otherwise."""
    options: dict[str, Any] = {"kv_cache_gib": 1, "max_model_len": 4096}
    if adapters:
        options["adapter"] = logs / "adapter"
        write_adapter(model, options["adapter"])
    return Stack(
        venv=vllm_venv(),
        model=model,
        log_dir=logs,
        dtype="float32",
        prefill_options=options,
        decode_options=options,
    )


def main() -> int:
    """Run from the command line; 1 when a reply or a count of reused tokens is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.histories", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="conversations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write figures and every turn to this file")
    parser.add_argument(
        "--at-once", type=int, default=2, help="conversations at a time (default: %(default)s)"
    )
    parser.add_argument("--no-adapters", action="store_true", help="engines without LoRA")
    options = parser.parse_args()

    def progress(report: Report, done: int) -> None:
        if done % 10 and done != options.count:
            return
        figures = report.summary()
        print(
            f"{done}/{options.count}: {figures['histories_equal']} equal,"
            f" {figures['histories_reuse_exact']} reused exactly, {figures['turns']} turns,"
            f" {report.seconds:.0f} s",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as logs:
        print("starting engines", flush=True)
        with exact_stack(small_model(), Path(logs), adapters=not options.no_adapters) as stack:
            report = asyncio.run(
                run(
                    stack,
                    options.count,
                    options.seed,
                    at_once=options.at_once,
                    adapters=not options.no_adapters,
                    progress=progress,
                )
            )
    figures = report.summary()
    if options.json:
        turns = [dataclasses.asdict(result) for result in report.results]
        options.json.write_text(json.dumps({**figures, "results": turns}, indent=1))
    print(json.dumps(figures, indent=1))
    return 0 if figures["histories_equal"] == figures["histories_reuse_exact"] == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
