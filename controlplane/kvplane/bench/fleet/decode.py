"""A decode engine: blocks, streams and queues are modelled; what is kept the connector's code decides."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvplane.bench.fleet.blocks import BlockPool
from kvplane.bench.fleet.engines import CHUNK_TOKENS, CONTEXT, PORT, SimulatedEngine, World
from kvplane.bench.fleet.history import contents, tokens_of
from kvplane.bench.fleet.prefill import PrefillEngine, Prompt
from kvplane.bench.fleet.simulation import Wait
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.envelope import Envelope
from kvplane.connector.keeper import FinishedTurn, Keeper
from kvplane.connector.retention import Retention
from kvplane.controlplane import model as m

MAX_STREAMS = 256
"""Requests that run at once: vLLM's max_num_seqs."""


_LOOK_S = 1.5
"""After a step without another the connector looks after what is retained."""


class LoadFailedError(Exception):
    """The KV of the prefill engine could not be read: the request fails."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How engines keep KV: the connector's options of the same names. `ttl_s` None: learned."""

    retain_fraction: float = 0.5
    free_block_floor: float = 0.1
    ttl_s: float | None = None
    max_ttl_s: float = 480.0
    off: bool = False


@dataclass(slots=True, eq=False)
class Decode:
    """A request, and what became of it.

    `source` has computed the prompt, and is to be read from; None: all is computed here.
    """

    prompt: Prompt
    reply_tokens: int
    envelope: Envelope | None
    source: PrefillEngine | None = None
    source_process: int = 0
    on_first_token: Callable[[], None] = field(default=lambda: None)
    local: int = 0
    """Tokens found in the engine's own cache."""
    waited: Wait | None = None
    request_id: str = ""
    found: list[int] = field(default_factory=list)
    wanted: int = 0


class DecodeEngine(SimulatedEngine):
    """Decodes streams, keeps finished turns, and computes the prompts of direct ones."""

    pool: BlockPool
    keeper: Keeper

    def __init__(self, world: World, name: str, url: str, total_blocks: int, keeping: Keeping) -> None:
        super().__init__(world, name, url, m.EngineRole.DECODE, total_blocks)
        self._keeping = keeping
        self._config = ConnectorConfig(
            "simulated:1",
            endpoint=url,
            chunk_tokens=CHUNK_TOKENS,
            retain_fraction=keeping.retain_fraction,
            free_block_floor=keeping.free_block_floor,
            ttl_s=keeping.ttl_s,
            max_ttl_s=keeping.max_ttl_s,
        )
        self._queue: deque[Decode] = deque()
        self._running = 0
        self._held: dict[str, list[int]] = {}
        self._deadlines: dict[str, float] = {}
        self._step_due = False
        self._next_look = 0.0
        self._is_idle = False
        """Whether it was idle when it was last looked at: then there is nothing new."""
        self.generated_tokens = 0
        self.computed_tokens = 0
        self.most_running = 0

    def begin(self) -> None:
        """Begin with no KV, and nothing learned."""
        world = self.world
        monotonic = world.simulation.clock.monotonic
        self._is_idle = False
        self.pool = BlockPool(self.total_blocks)
        self._queue, self._running, self._held, self._deadlines = deque(), 0, {}, {}
        retention = Retention(
            self.total_blocks,
            fraction=self._keeping.retain_fraction,
            floor=self._keeping.free_block_floor,
            monotonic=monotonic,
        )
        self.keeper = Keeper(
            self._config,
            self.session,
            retention,
            monotonic=monotonic,
            block_tokens=world.block_tokens,
            chains=world.chains,
        )

    # What others ask of it.

    def holds(self, request_id: str) -> bool:
        """See Holder."""
        return request_id in self._held

    def read_over(self, request_id: str) -> None:
        """See Holder: vLLM's worker frees what was read, and says so."""
        self._let_go(request_id)

    @property
    def busy(self) -> bool:
        """See SimulatedEngine: also while a reader may come for what is held."""
        return bool(self._running or self._queue or self._held)

    @property
    def running(self) -> int:
        """Streams that run."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    async def generate(self, job: Decode) -> None:
        """Answer a request. Raises EngineGoneError, LoadFailedError."""
        self.check()
        keeper, process = self.keeper, self.process
        job.request_id = self.request_id()
        if job.envelope is not None:
            keeper.arrive(job.request_id, job.envelope)
        blocks: list[int] | None = None
        try:
            blocks = await self._room(job)
            await self._fetch(job)
            size, prompt = self.world.block_tokens, job.prompt
            of_prompt = contents(prompt.stretches, prompt.tokens, size)
            self.pool.fill(blocks, of_prompt, len(job.found), prompt.tokens // size)
            await self.until(self.world.simulation.now + self.world.speeds.step_s)
            job.on_first_token()
            self.generated_tokens += job.reply_tokens
            rate = self.world.speeds.decode / (1.0 + (self._running - 1) / self.world.speeds.crowd)
            await self.until(self.world.simulation.now + job.reply_tokens / rate)
            if self._finish(job, blocks):
                blocks = None
        finally:
            if process == self.process and self.alive:
                keeper.leave(job.request_id)
                if blocks is not None:
                    self.pool.give_back(blocks)
                    self._running -= 1
                self._step()

    async def _room(self, job: Decode) -> list[int]:
        """Wait for blocks, first come first served, and take them."""
        job.wanted = -(-(job.prompt.tokens + job.reply_tokens) // self.world.block_tokens)
        if job.wanted > self.total_blocks:
            raise LoadFailedError("the prompt is larger than the engine")
        if self._queue or not self._fits(job):
            self._queue.append(job)
            job.waited = self.world.simulation.wait()
            self._step()
            await self.over(job.waited)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        taken = self.pool.take(job.found, job.wanted)
        self.keeper.admitted(job.wanted - len(job.found))
        return taken

    def _fits(self, job: Decode) -> bool:
        if self._running >= MAX_STREAMS:
            return False
        prompt, size = job.prompt, self.world.block_tokens
        # One token at least is computed, so that there is something to go on with.
        whole = (prompt.tokens - 1) // size
        job.found = self.pool.find(contents(prompt.stretches, whole * size, size))
        job.local = len(job.found) * size
        return self.pool.missing(job.found, job.wanted) <= self.pool.free

    async def _fetch(self, job: Decode) -> None:
        """Get the KV of what is not here: from the prefill engine, or by computing it."""
        missing = job.prompt.tokens - job.local
        source = job.source
        if source is None:
            self.computed_tokens += missing
            await self.compute(missing, self.world.speeds.decode_prefill)
            return
        process = job.source_process
        there = source.alive and source.process == process
        if not there or not await self.read(
            missing, while_alive=lambda: source.alive and source.process == process
        ):
            raise LoadFailedError(source.name)

    def _finish(self, job: Decode, blocks: list[int]) -> bool:
        """The reply is complete; tells whether the turn is retained."""
        prompt, size = job.prompt, self.world.block_tokens
        tokens = prompt.tokens + job.reply_tokens - 1  # the last one's KV is not computed any more
        all_of_them = contents(prompt.stretches, tokens, size)
        self.pool.fill(blocks, all_of_them, prompt.tokens // size, tokens // size)
        if job.envelope is None or self._keeping.off:
            return False
        spare, blocks = blocks[len(all_of_them) :], blocks[: len(all_of_them)]
        terms = self.keeper.finish(
            FinishedTurn(
                request_id=job.request_id,
                envelope=job.envelope,
                context=CONTEXT,
                tokens=tokens_of(prompt.stretches, tokens),
                items=(),
                blocks=blocks,
                params=self._params(job.request_id, tokens, blocks),
                prompt_tokens=prompt.tokens,
                finish="stop",
            )
        )
        if terms is None:
            return False
        self._held[job.request_id] = blocks
        self._deadlines[job.request_id] = terms.blocks
        self.pool.give_back(spare)
        self._running -= 1
        return True

    def _params(self, request_id: str, tokens: int, blocks: list[int]) -> dict[str, Any]:
        return {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [blocks],
            "remote_engine_id": self.name,
            "remote_request_id": request_id,
            "remote_host": self.url.split("/")[2].split(":")[0],
            "remote_port": PORT,
            "tp_size": 1,
            "remote_num_tokens": tokens,
            "transfer_mode": "pull",
        }

    # Steps: only such as have something to do.

    def poke(self) -> None:
        """See SimulatedEngine."""
        self._step()

    def look(self) -> None:
        """See SimulatedEngine."""
        if not self.busy and self._is_idle:
            return
        self._is_idle = not self.busy
        now = self.world.simulation.clock.monotonic()
        for request_id in [name for name, deadline in self._deadlines.items() if deadline <= now]:
            self._let_go(request_id)  # the worker does so by itself
        if now >= self._next_look:
            self._take_step()
        self.keeper.report_load(running=self._running, waiting=len(self._queue), free_blocks=self.pool.free)

    def _step(self) -> None:
        if not self._step_due and self.alive:
            self._step_due = True
            self.world.simulation.after(self.world.speeds.step_s, self._due_step)

    def _due_step(self) -> None:
        self._step_due = False
        if self.alive:
            self._take_step()

    def _take_step(self) -> None:
        """What the scheduler does in a step: let in who fits, have the connector look after what is kept."""
        self._next_look = self.world.simulation.clock.monotonic() + _LOOK_S
        self._admit()
        first = self._queue[0] if self._queue else None
        wanted = self.pool.missing(first.found, first.wanted) if first is not None else 0
        spare = first.envelope if first is not None else None
        deadlines = self.keeper.step(self.pool.free, wanted_blocks=wanted, spare=spare)
        now = self.world.simulation.clock.monotonic()
        over = [request_id for request_id, deadline in deadlines.items() if deadline <= now]
        self._deadlines.update(deadlines)
        for request_id in over:
            self._let_go(request_id)
        self.keeper.step_done()
        if over:
            self._admit()
        if self._queue or self.keeper.retention.frees_soon:
            self._step()

    def _admit(self) -> None:
        while self._queue and self._fits(self._queue[0]):
            waited = self._queue.popleft().waited
            if waited is not None:
                waited.end()

    def _let_go(self, request_id: str) -> None:
        """The worker frees a request's blocks."""
        self._deadlines.pop(request_id, None)
        blocks = self._held.pop(request_id, None)
        if blocks is not None:
            self.pool.give_back(blocks)
            self.keeper.freed([request_id])
            if self._queue:
                self._step()
