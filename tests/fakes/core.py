"""What a fake engine does with requests: registers, computes, pulls, keeps, announces, lets go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
import zlib
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import aiohttp

from kvplane.client import model as m
from kvplane.client.errors import ControlPlaneError
from tests.fakes import kv

Body = dict[str, Any]
RETAIN_S, PREFILL_LEASE_S = 480.0, 30.0


class EnginePlane(Protocol):
    """What an engine uses of ControlPlaneClient."""

    def register_engine(self, spec: m.EngineSpec, *, request_id: str = "") -> Awaitable[m.Registration]: ...
    def renew_engine(
        self, engine_id: m.EngineId, engine_epoch: int, load: m.EngineLoad | None = None
    ) -> Awaitable[tuple[float, bool]]: ...
    def announce_location(
        self, engine_id: m.EngineId, engine_epoch: int, announcement: m.Announcement
    ) -> Awaitable[m.AnnouncementResult]: ...
    def withdraw_location(
        self, engine_id: m.EngineId, engine_epoch: int, request_id: m.RequestId
    ) -> Awaitable[m.ReleaseOutcome]: ...


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a fake engine behaves."""

    role: m.EngineRole
    model: str = "fake"
    connector: bool = True
    """False: stock vLLM, which pulls what it is told, unverified, and announces nothing."""
    prefix_caching: bool = True
    total_blocks: int = 4096
    prefill_s_per_token: float = 0.0
    token_gap_s: float = 0.0
    recompute_threshold: int = 64
    data_parallel_rank: int = 0
    reads_refused: str = ""
    """Why a prefill engine reads from nobody, "" if it does."""
    host: str = "127.0.0.1"
    announces_endpoint: bool = False
    adapters: tuple[str, ...] = ()
    """More names it answers to."""
    tells_params: bool = False
    """Its replies always hold kv_transfer_params, as other connectors' do."""
    load_failure_policy: str = "recompute"
    """vLLM's kv_load_failure_policy; with "fail" a failed read ends the request."""


class LoadFailedError(Exception):
    """KV could not be read, and is not to be computed instead."""


@dataclass(slots=True)
class Held:
    """Blocks kept after their request's end, until read or let go."""

    blocks: list[int]
    tokens: int
    key: m.ConversationKey | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Work:
    """One request on its way through the engine."""

    body: Body
    request_id: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    kvs: list[int] = field(default_factory=list)
    reply: list[int] = field(default_factory=list)
    local_tokens: int = 0
    pulled_tokens: int = 0
    matched_tokens: int = 0
    outcome: str = "cold"
    prompt_count: int = 0
    finish_reason: str = "length"

    @property
    def salt(self) -> str:
        """What keeps its KV apart from other requests'."""
        return str(self.body.get("cache_salt", ""))

    def keys(self, tokens: Sequence[int]) -> list[int]:
        """Return what cached blocks are found by: the KV that they should hold, and the salt."""
        return kv.chain(tokens, seed=zlib.crc32(self.salt.encode()) if self.salt else 7)

    @property
    def params(self) -> Body:
        return self.body.get("kv_transfer_params") or {}


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class EngineCore:
    """The engine without HTTP. `stopped` clears what it holds."""

    def __init__(self, config: EngineConfig, plane: EnginePlane | None = None) -> None:
        self.config = config
        self.plane = plane
        self.engine_id = m.EngineId(f"{config.role}-{uuid.uuid4().hex[:12]}")
        self.violations: list[str] = []
        """Reads of blocks that were not held for the reader."""
        self.strangers = 0
        """Reads that were meant for the engine that was at this address before."""
        self.pool = kv.BlockPool(config.total_blocks)
        self.held: dict[str, Held] = {}
        self.port = 0
        self._epoch = 0
        self._session: aiohttp.ClientSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{_bracketed(self.config.host)}:{self.port}"

    async def started(self) -> None:
        """Register, once the port is known."""
        self._session = aiohttp.ClientSession()
        if self.plane is not None and self.config.connector:
            await self._register(self.plane)
            self._spawn(self._renew(self.plane))

    async def stopped(self) -> None:
        """Forget everything, as a killed process does."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        for held in self.held.values():
            if held.timer is not None:
                held.timer.cancel()
        self.held.clear()
        self.pool = kv.BlockPool(self.config.total_blocks)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Control plane

    async def _register(self, plane: EnginePlane) -> float:
        spec = m.EngineSpec(
            self.engine_id,
            self.config.role,
            m.EngineProfile(model=self.config.model, kv_dtype="float32", block_size=kv.BLOCK_TOKENS),
            endpoint=self.url if self.config.announces_endpoint else "",
            data_parallel_rank=self.config.data_parallel_rank,
            total_blocks=self.config.total_blocks,
            served_models=(self.config.model,),
        )
        try:
            registration = await plane.register_engine(spec)
        except ControlPlaneError:
            return 1.0
        self._epoch = registration.engine_epoch
        return registration.lease_ttl_s

    async def _renew(self, plane: EnginePlane) -> None:
        lease_s = 3.0
        while True:
            await asyncio.sleep(lease_s / 3)
            try:
                lease_s, _ = await plane.renew_engine(self.engine_id, self._epoch)
            except ControlPlaneError:
                lease_s = await self._register(plane)

    async def _announce(self, plane: EnginePlane, work: Work, envelope: Body, params: Body) -> None:
        key = m.ConversationKey(
            envelope["tenant_id"], envelope["model"], envelope["conversation_id"], envelope["adapter"]
        )
        held = self.held[work.request_id]
        tokens = work.tokens[: held.tokens]
        announcement = m.Announcement(
            key=key,
            request_id=m.RequestId(work.request_id),
            turn=envelope["turn"],
            token_count=held.tokens,
            block_count=len(held.blocks),
            kv_transfer_params=json.dumps(params).encode(),
            fingerprint=m.Fingerprint(kv.CHUNK_TOKENS, kv.fingerprint(self.config.model + work.salt, tokens)),
            ttl_s=RETAIN_S - 5,
            endpoint=envelope["endpoint"],
        )
        try:
            result = await plane.announce_location(self.engine_id, self._epoch, announcement)
        except ControlPlaneError:
            self._let_go(work.request_id)
            return
        if result.outcome is not m.AnnounceOutcome.ACCEPTED:
            self._let_go(work.request_id)
            return
        for request_id, other in tuple(self.held.items()):
            if other.key == key and request_id != work.request_id:
                self._let_go(request_id)
        held.key = key

    # KV

    def _hold(self, work: Work, seconds: float) -> None:
        tokens = len(work.kvs)
        timer = asyncio.get_running_loop().call_later(seconds, self._let_go, work.request_id)
        self.held[work.request_id] = Held(work.blocks, tokens, timer=timer)
        work.blocks = []

    def _let_go(self, request_id: str) -> None:
        held = self.held.pop(request_id, None)
        if held is not None:
            self.pool.release(held.blocks)
            if held.timer is not None:
                held.timer.cancel()

    async def _allocate(self, count: int) -> list[int]:
        """Take blocks, if need be from conversations that are kept: agreed with the plane, oldest first."""
        while True:
            try:
                return self.pool.allocate(count)
            except kv.PoolFullError:
                victim = next((i for i, held in self.held.items() if held.key is not None), None)
                if victim is None or self.plane is None:
                    await asyncio.sleep(0.01)
                    continue
            try:
                await self._give_up(self.plane, victim)
            except ControlPlaneError:
                await asyncio.sleep(0.01)

    async def _give_up(self, plane: EnginePlane, victim: str) -> None:
        """Let go of what is kept, unless a reader is on its way. Raises ControlPlaneError."""
        outcome = await plane.withdraw_location(self.engine_id, self._epoch, m.RequestId(victim))
        if outcome is m.ReleaseOutcome.CLAIMED and victim in self.held:
            self.held[victim].key = None
        else:
            self._let_go(victim)

    def _room_to_keep(self, count: int) -> bool:
        """Whether as many blocks may be kept: the rest is for requests, whatever the control plane says."""
        total, kept = self.config.total_blocks, sum(len(held.blocks) for held in self.held.values()) + count
        if kept > total // 2 and self.plane is not None:
            self._spawn(self._give_up_oldest(self.plane))
        return kept <= total * 3 // 4

    async def _give_up_oldest(self, plane: EnginePlane) -> None:
        victim = next((i for i, held in self.held.items() if held.key is not None), None)
        if victim is not None:
            with contextlib.suppress(ControlPlaneError):
                await self._give_up(plane, victim)

    async def _read_remote(self, params: Body, blocks: list[int]) -> list[int] | None:
        """Read blocks of another engine, which frees them; None if it cannot be reached, or is another.

        Raises LoadFailedError where a read that fails is to end the request.
        """
        assert self._session is not None
        url = f"http://{_bracketed(params['remote_host'])}:{params['remote_port']}/kv/read"
        question = {
            "engine_id": params["remote_engine_id"],
            "request_id": params["remote_request_id"],
            "blocks": blocks,
        }
        try:
            async with self._session.post(url, json=question) as response:
                if response.status == 200:
                    return cast("list[int]", (await response.json())["kv"])
        except aiohttp.ClientError:
            pass
        # That blocks are not needed is only a message to who keeps them: nothing depends on it.
        if blocks and self.config.load_failure_policy == "fail":
            raise LoadFailedError
        return None

    def read_by_other(self, engine_id: str, request_id: str, blocks: list[int]) -> list[int] | None:
        """Give another engine what it asks for and let go of it, as after a READ.

        None if it means another engine, as vLLM's handshake finds out: what that one kept is gone.
        """
        if engine_id != self.engine_id:
            self.strangers += 1
            return None
        held = self.held.get(request_id)
        if held is None or not set(blocks) <= set(held.blocks):
            self.violations.append(f"read of {request_id}")
        answer = self.pool.read(blocks)
        self._let_go(request_id)
        return answer

    async def _fetch(self, work: Work) -> list[int]:
        """Return the KV that comes from elsewhere, for the beginning of the prompt."""
        params, count = work.params, len(work.tokens)
        if params.get("do_remote_prefill") and params.get("remote_block_ids"):
            kvs = await self._read_remote(params, params["remote_block_ids"][0])
            work.pulled_tokens = min(len(kvs or []), count)
            return (kvs or [])[:count]
        if not params.get("do_remote_decode") or not params.get("remote_block_ids"):
            return []
        blocks, usable = params["remote_block_ids"][0], min(params["remote_num_tokens"], count)
        if self.config.connector:
            usable, work.outcome = self._verified(work, params)
        if usable - work.local_tokens < self.config.recompute_threshold:
            if usable:
                work.outcome = "local_hit" if work.local_tokens >= usable else "below_threshold"
            blocks = []
        else:
            blocks = blocks[: -(-usable // kv.BLOCK_TOKENS)]
        kvs = await self._read_remote(params, blocks)
        if blocks and kvs is None:
            work.outcome = "failed"
        if not blocks or kvs is None:
            return []
        work.pulled_tokens = usable - work.local_tokens
        return kvs[:usable]

    def _verified(self, work: Work, params: Body) -> tuple[int, str]:
        promise = params.get("kvplane")
        if not promise:
            return 0, "no_fingerprint"
        if self.config.reads_refused:
            return 0, "cold"
        hashes = bytes.fromhex(promise["fingerprint"]["chain"])
        equal = kv.matching_tokens(self.config.model + work.salt, hashes, promise["token_count"], work.tokens)
        work.matched_tokens = equal
        return equal, "pulled" if equal else "mismatch"

    async def prefill(self, work: Work) -> None:
        """Compute a prompt, as far as its KV is not known. Raises LoadFailedError."""
        keys = work.keys(work.tokens)
        # The last token is always computed: it is what the reply begins with.
        shared = self.pool.cached_prefix(keys[:-1]) if self.config.prefix_caching else []
        work.blocks = list(shared)
        work.local_tokens = len(shared) * kv.BLOCK_TOKENS
        fetched = await self._fetch(work)
        known = self.pool.read(shared) + fetched[work.local_tokens :]
        computed = len(work.tokens) - len(known)
        if self.config.prefill_s_per_token and computed > 0:
            await asyncio.sleep(computed * self.config.prefill_s_per_token)
        work.kvs = kv.chain(work.tokens, known)
        await self._write(work)

    async def _write(self, work: Work) -> None:
        missing = -(-len(work.kvs) // kv.BLOCK_TOKENS) - len(work.blocks)
        if missing > 0:
            work.blocks += await self._allocate(missing)
        self.pool.write(work.blocks, work.kvs, work.keys(work.tokens[: len(work.kvs)]))

    def next_token(self, work: Work) -> int | None:
        """Say the next token; None at the end of the reply."""
        stops_first = kv.tokenize(kv.STOP_WORD)[0] in work.tokens[-3:]
        if stops_first and not work.reply:
            work.finish_reason = "stop"
            return None
        limit = work.body.get("max_completion_tokens") or work.body.get("max_tokens") or 16
        if len(work.reply) >= limit:
            return None
        if work.reply:
            work.tokens.append(work.reply[-1])
            work.kvs.append(kv.next_kv(work.kvs[-1], work.reply[-1]))
        work.reply.append(kv.reply_token(work.kvs[-1]))
        return work.reply[-1]

    async def finish(self, work: Work) -> Body | None:
        """End a request; keeps its blocks if somebody may read them, and returns vLLM's params."""
        params = work.params
        await self._write(work)
        is_prefill = bool(params.get("do_remote_decode"))
        envelope = params.get("kvplane") if not is_prefill else None
        keeps = (
            is_prefill
            or (envelope is not None and self.config.connector)
            or (params and not self.config.connector)
        )
        if keeps and not is_prefill and self.config.connector:
            keeps = self._room_to_keep(len(work.blocks))
        if not keeps or (is_prefill and not work.reply):
            self.pool.release(work.blocks)
            work.blocks = []
            return None
        answer: Body = {
            "do_remote_prefill": is_prefill,
            "do_remote_decode": not is_prefill,
            "remote_block_ids": [list(work.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": work.request_id,
            "remote_host": self.config.host,
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": len(work.kvs),
            "transfer_mode": "pull",
        }
        self._hold(work, PREFILL_LEASE_S if is_prefill else RETAIN_S)
        if not self.config.connector:
            return answer
        if is_prefill:
            answer["kvplane"] = {
                "outcome": work.outcome,
                "detail": "read_failed" if work.outcome == "failed" else self.config.reads_refused,
                "reused_tokens": work.pulled_tokens,
                "matched_tokens": work.matched_tokens,
                "local_tokens": work.local_tokens,
                "prompt_tokens": work.prompt_count,
            }
            return answer
        if self.plane is not None and envelope is not None:
            # Usually on record before the client has the last chunk; a slow plane holds nobody up.
            await asyncio.wait({self._spawn(self._announce(self.plane, work, envelope, answer))}, timeout=0.1)
        return None
