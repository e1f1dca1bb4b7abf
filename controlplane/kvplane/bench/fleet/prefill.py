"""A prefill engine: queue and prefix cache are modelled; what is pulled the connector's code decides."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvplane.bench.fleet.blocks import BlockPool
from kvplane.bench.fleet.engines import CONTEXT, RECOMPUTE_TOKENS, SimulatedEngine, World
from kvplane.bench.fleet.history import Stretches, common, contents, tokens_of
from kvplane.client.model import EngineLoad
from kvplane.connector.groups import CacheLayout, Group
from kvplane.connector.prefill import PrefillLedger
from kvplane.connector.pull import PullPlan, plan_pull
from kvplane.controlplane import model as m


class Holder(Protocol):
    """A decode engine, as one that reads from it has to know it."""

    alive: bool
    process: int
    pool: BlockPool

    def holds(self, request_id: str) -> bool:
        """Tell whether a request's blocks are still held."""

    def read_over(self, request_id: str) -> None:
        """Take the notice that a request's blocks were read, or are not needed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be computed."""

    conversation: int
    stretches: Stretches
    tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """What became of it: tokens found in the own cache, pulled, computed; and what the router is told."""

    local: int
    pulled: int
    computed: int
    envelope: Mapping[str, Any]


class PrefillEngine(SimulatedEngine):
    """Computes prompts in the order in which they come."""

    def __init__(self, world: World, name: str, url: str, total_blocks: int) -> None:
        super().__init__(world, name, url, m.EngineRole.PREFILL, total_blocks)
        self._layout = CacheLayout((Group(world.block_tokens),))
        self._ledger = PrefillLedger(world.simulation.clock.monotonic)
        # Of each conversation the last prompt, the least recently used first.
        self._cache: OrderedDict[int, tuple[int, Stretches]] = OrderedDict()
        self._cached_tokens = 0
        self._waiting = 0
        self._told = -1
        self.computed_tokens = 0
        """So far."""
        self.busy_s = 0.0

    def begin(self) -> None:
        """Begin with an empty cache."""
        self._ledger = PrefillLedger(self.world.simulation.clock.monotonic)
        self._cache.clear()
        self._cached_tokens = self._waiting = 0
        self._told = -1

    @property
    def busy(self) -> bool:
        """See SimulatedEngine."""
        return self._waiting > 0

    def look(self) -> None:
        """Tell the load."""
        if self._waiting == self._told:
            return
        self._told = self._waiting
        waits = max(0, self._waiting - 1)
        self.session.set_load(EngineLoad(min(1, self._waiting), waits, self.total_blocks, 0, 0))

    async def prefill(
        self, prompt: Prompt, params: Mapping[str, Any], holder: Holder | None, process: int
    ) -> Prefill:
        """Compute a prompt, pulling what `params` say that `holder` holds, in its `process`.

        Raises EngineGoneError.
        """
        self.check()
        request_id = self.request_id()
        self._ledger.arrive(request_id)
        self._waiting += 1
        try:
            # It is looked at when its turn comes.
            await self.until(self.world.simulation.now + self.computing_s)
            local, plan = self._local(prompt), None
            if holder is not None:
                plan = self._plan(request_id, prompt, params)
                self._ledger.planned(request_id, plan)
            offered = max(0, plan.tokens - local) if plan is not None else 0
            offered = offered if offered >= RECOMPUTE_TOKENS else 0
            self._ledger.asked(request_id, local, offered)
            pulled = await self._pull(request_id, prompt, params, plan, offered, holder, process)
            computed = max(1, prompt.tokens - local - pulled)
            self.computed_tokens += computed
            self.busy_s += computed / self.world.speeds.prefill
            await self.compute(computed, self.world.speeds.prefill)
            self._remember(prompt)
            return Prefill(local, pulled, computed, self._ledger.report(request_id, prompt.tokens))
        finally:
            self._ledger.forget(request_id)
            self._waiting = max(0, self._waiting - 1)

    def _plan(self, request_id: str, prompt: Prompt, params: Mapping[str, Any]) -> PullPlan:
        world, registration = self.world, self.session.registration
        timeout_s = registration.claim_timeout_s if registration is not None else 30.0
        return plan_pull(
            params,
            layout=self._layout,
            context=CONTEXT,
            tokens=tokens_of(prompt.stretches, prompt.tokens),
            too_late=self._ledger.waited(request_id) > timeout_s * 2 / 3,  # as the scheduler has it
            hasher=world.chains,
        )

    async def _pull(
        self,
        request_id: str,
        prompt: Prompt,
        params: Mapping[str, Any],
        plan: PullPlan | None,
        offered: int,
        holder: Holder | None,
        process: int,
    ) -> int:
        """Read what is worth it; returns the tokens that came. Whatever comes of it, the holder is told."""
        if holder is None or plan is None:
            return 0
        remote = str(params["remote_request_id"])
        if plan.block_ids is None:
            return 0
        self._ledger.allocated(request_id, offered)
        if not offered:
            if holder.alive and holder.process == process:
                holder.read_over(remote)
            return 0
        is_there = _same_process(holder, process)
        if not is_there():
            self._failed(request_id)
            return 0
        read = self._read_of(prompt, params, plan)
        where = (str(params["remote_engine_id"]), process, remote)
        self.world.oracle.read(where, holder.holds(remote), holder.pool, *read)
        if not await self.read(offered, while_alive=is_there):
            self._failed(request_id)
            return 0
        self.world.oracle.read(where, holder.holds(remote), holder.pool, *read)
        self._ledger.received([request_id], set(), set())
        holder.read_over(remote)
        return offered

    def _failed(self, request_id: str) -> None:
        self._ledger.received([request_id], {request_id}, set())
        self.world.oracle.counts["failed_reads"] += 1

    def _read_of(
        self, prompt: Prompt, params: Mapping[str, Any], plan: PullPlan
    ) -> tuple[list[int], list[int]]:
        """Return the blocks of a plan that are looked at, and what has to be in them."""
        size = self.world.block_tokens
        whole = plan.tokens // size
        if plan.tokens == params["remote_num_tokens"]:
            whole = -(-plan.tokens // size)  # the last one too, which is not full
        assert plan.block_ids is not None
        return plan.block_ids[0][:whole], contents(prompt.stretches, plan.tokens, size)[:whole]

    def _local(self, prompt: Prompt) -> int:
        known = self._cache.get(prompt.conversation)
        if known is None:
            return 0
        same = min(known[0], common(known[1], prompt.stretches), prompt.tokens - 1)
        return same // self.world.block_tokens * self.world.block_tokens

    def _remember(self, prompt: Prompt) -> None:
        known = self._cache.pop(prompt.conversation, None)
        if known is not None:
            self._cached_tokens -= known[0]
        self._cache[prompt.conversation] = prompt.tokens, prompt.stretches
        self._cached_tokens += prompt.tokens
        most = self.total_blocks * self.world.block_tokens
        while self._cached_tokens > most:
            self._cached_tokens -= self._cache.popitem(last=False)[1][0]


def _same_process(holder: Holder, process: int) -> Callable[[], bool]:
    return lambda: holder.alive and holder.process == process
