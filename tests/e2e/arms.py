"""Arms of a comparison: the same pair of engines with stock NIXL, with kvplane, and with kvplane alone.

Each arm is P (core 0) and D (core 1) behind the plainest proxy, in this process. All arms run side by side
and serve in turn, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp

from deploy.rig import metrics
from deploy.rig.engines import MODEL_NAME, Engine, EngineSettings, Role, small_model, vllm_venv
from deploy.rig.plane import ControlPlane
from deploy.rig.process import LOCALHOST, free_ports
from deploy.rig.usage import Usage
from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import ConversationKey
from tests.e2e.asking import prefilled

QUIET_PROGRESS_US = 1000
"""Idle engines look at NIXL this seldom, so that those which wait for their turn cost next to nothing."""


class Kind(StrEnum):
    """What runs in an arm's engines."""

    STOCK = "stock"
    """vLLM's NixlConnector in one direction: P to D, nothing retained."""
    KVPLANE = "kvplane"
    """kvplane with its control plane: P asks it for every prompt, D retains and announces every turn."""
    ROUTED = "routed"
    """The same behind a router of kvplane's, which asks instead of P; here the proxy does as it would."""
    GONE = "gone"
    """kvplane with an address where nobody listens."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request. `first_s` is from sending the decode leg to its first token, `total_s` is both legs."""

    tokens: tuple[int, ...]
    first_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Handed:
    """A request that P has computed: what D is to be sent."""

    body: dict[str, Any]
    params: dict[str, Any]
    began: float


class Arm:
    """One pair of engines behind a proxy that knows nothing of kvplane. What is started is to be stopped."""

    def __init__(self, kind: Kind, logs: Path, *, decode_options: Mapping[str, Any] | None = None) -> None:
        self.kind = kind
        port = free_ports(1)[0]
        self._address = address = f"{LOCALHOST}:{port}"
        plane = (
            ControlPlane(port=port, log_file=logs / f"{kind}-plane.log")
            if kind in (Kind.KVPLANE, Kind.ROUTED)
            else None
        )
        common: dict[str, Any] = {
            "venv": vllm_venv(),
            "model": small_model(),
            "dtype": "float32",
            "kv_cache_gib": 1,
            "max_model_len": 4096,
            "progress_delay_us": QUIET_PROGRESS_US,
            "connector": "stock" if kind is Kind.STOCK else "kvplane",
            "kvplane_address": address,
            "extra_config": {"bidirectional_kv_xfer": False} if kind is Kind.STOCK else {},
        }
        prefill = {**common, "role": Role.PREFILL, "core": 0, "prefix_caching": False}
        decode = {**common, "role": Role.DECODE, "core": 1, **(decode_options or {})}
        self.prefill = Engine(EngineSettings(**prefill, log_file=logs / f"{kind}-prefill.log"))
        self.decode = Engine(EngineSettings(**decode, log_file=logs / f"{kind}-decode.log"))
        self._client: ControlPlaneClient | None = None
        self._programs = [*([plane] if plane is not None else []), self.prefill, self.decode]

    def start(self) -> None:
        """Start everything and return at once."""
        for program in self._programs:
            program.start()

    def wait_ready(self) -> None:
        """Wait until all of it answers. Raises RigError."""
        for program in self._programs:
            program.wait_ready()

    def stop(self) -> None:
        """Stop what runs."""
        for program in reversed(self._programs):
            program.stop()

    def usage(self) -> Usage:
        """CPU time of both engines so far."""
        return self.prefill.usage() + self.decode.usage()

    def waited_s(self) -> float:
        """Seconds that D's requests waited to be scheduled so far, by its own metrics."""
        return metrics.read(self.decode.url).wait_seconds

    def log_lines(self) -> list[str]:
        """Return the lines in which the engines logged what kvplane has to say."""
        logs = [engine.log_file.read_text(errors="replace") for engine in (self.prefill, self.decode)]
        return [line for log in logs for line in log.splitlines() if "kvplane" in line]

    async def prefill_leg(
        self, session: aiohttp.ClientSession, prompt: Sequence[int], max_tokens: int
    ) -> Handed:
        """Have P compute a prompt of token ids."""
        began = time.perf_counter()
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if self.kind is not Kind.ROUTED:
            return Handed(body, await prefilled(session, self.prefill.url, "/v1/completions", body), began)
        name = f"{began}/{random.random()}"
        turn = (
            await self._control_plane().begin_turn(ConversationKey("default", MODEL_NAME, name), name)
        ).turn
        ours = {"kvplane": {"router": True}}
        params = await prefilled(session, self.prefill.url, "/v1/completions", body, ours)
        params["kvplane"] = {
            "tenant_id": "default",
            "model": MODEL_NAME,
            "conversation_id": name,
            "turn": turn,
            "endpoint": self.decode.url,
        }
        return Handed(body, params, began)

    async def decode_leg(self, session: aiohttp.ClientSession, handed: Handed) -> Served:
        """Have D write the reply."""
        body = {**handed.body, "kv_transfer_params": handed.params, "stream": True}
        sent, first = time.perf_counter(), 0.0
        tokens = list[int]()
        async with session.post(f"{self.decode.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or ()
                        first = first or (time.perf_counter() if tokens else 0.0)
        return Served(tuple(tokens), first - sent, time.perf_counter() - handed.began)

    def _control_plane(self) -> ControlPlaneClient:
        """Return the client; made in the loop that uses it."""
        if self._client is None:
            self._client = ControlPlaneClient(self._address)
        return self._client

    async def aclose(self) -> None:
        """Close what legs opened. Idempotent."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def serve(self, session: aiohttp.ClientSession, prompt: Sequence[int], max_tokens: int) -> Served:
        """Serve one request through both engines."""
        return await self.decode_leg(session, await self.prefill_leg(session, prompt, max_tokens))


@contextlib.contextmanager
def running(arms: Sequence[Arm]) -> Iterator[None]:
    """Start arms, one after the other, and stop them at the end."""
    with contextlib.ExitStack() as stops:
        for arm in arms:
            stops.callback(arm.stop)
            arm.start()
            arm.wait_ready()
        yield


def prompts(seed: str, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Return prompts of token ids that share no beginning."""
    source = random.Random(seed)
    return [
        [source.randrange(10, 4000) for _ in range(source.randint(shortest, longest))] for _ in range(count)
    ]


async def in_turn(count: int, at_once: int, work: Any) -> list[Any]:
    """Run `work(number)` for every number below `count`, `at_once` at any time; results in order."""
    results = dict[int, Any]()
    waiting = iter(range(count))

    async def worker() -> None:
        for number in waiting:
            results[number] = await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    return [results[number] for number in range(count)]
