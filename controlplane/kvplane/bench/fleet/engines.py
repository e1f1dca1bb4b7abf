"""What prefill and decode engines of the simulation have in common: life, waiting, the network card."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from kvplane.bench.fleet.oracle import Oracle
from kvplane.bench.fleet.planes import Planes
from kvplane.bench.fleet.session import PlaneSession
from kvplane.bench.fleet.simulation import Simulation, Wait
from kvplane.connector.chains import ChainCache
from kvplane.connector.fingerprint import Context
from kvplane.controlplane import model as m

MODEL = "model"
CONTEXT = Context(MODEL)
CHUNK_TOKENS = 64
RECOMPUTE_TOKENS = 64
"""Fewer tokens than this are not pulled: vLLM's kv_recompute_threshold."""
PORT = 5600


class EngineGoneError(Exception):
    """The engine died, or was not there."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast an engine is. Rates are in tokens per second.

    Attributes:
        prefill: a prefill engine computes prompts, one after the other.
        decode_prefill: a decode engine does.
        decode: a stream is decoded, alone; with n others at 1 / (1 + n / `crowd`) of it.
        crowd: streams that halve the rate of each.
        transfer: KV is read from another engine, one prompt after the other.
        step_s: of an engine.
        transfer_s: that a read takes whatever its size.
    """

    prefill: float = 12_000.0
    decode_prefill: float = 8_000.0
    decode: float = 50.0
    crowd: float = 96.0
    transfer: float = 60_000.0
    step_s: float = 0.02
    transfer_s: float = 0.005


@dataclass(slots=True)
class World:
    """What all engines share."""

    simulation: Simulation
    planes: Planes | None
    settings: m.Settings
    oracle: Oracle
    speeds: Speeds
    block_tokens: int
    report_s: float
    chains: ChainCache = field(default_factory=lambda: ChainCache(192 << 20))
    """One for all engines, to save time: what a chain is does not depend on who makes it."""


class SimulatedEngine:
    """An engine at an address. `kill` and `start` may follow each other; each start is a new process."""

    def __init__(self, world: World, name: str, url: str, role: m.EngineRole, total_blocks: int) -> None:
        self.world = world
        self.name = name
        self.url = url
        self.role = role
        self.total_blocks = total_blocks
        self.alive = False
        self.draining = False
        self.process = 0
        """Counts its processes."""
        self.session = self._session()
        self._waits: dict[Wait, None] = {}
        self._requests = itertools.count()
        self._reading_until = 0.0
        self._computing_until = 0.0

    def _session(self) -> PlaneSession:
        profile = m.EngineProfile(model=MODEL, block_size=self.world.block_tokens)
        spec = m.EngineSpec(
            self.name,
            self.role,
            profile,
            endpoint=self.url,
            total_blocks=self.total_blocks,
            served_models=(MODEL,),
        )
        world = self.world
        return PlaneSession(world.simulation, world.planes, spec, world.settings, self.poke)

    def start(self, *, beat_after: float = 0.0) -> None:
        """Begin a process. `beat_after`: so that those of many engines do not all come at once."""
        simulation = self.world.simulation
        self.alive, self.draining = True, False
        self.process += 1
        self._reading_until = self._computing_until = simulation.now
        self._requests = itertools.count()
        self.session = session = self._session()
        self.begin()
        simulation.start(session.attach())
        simulation.every(self.world.report_s, lambda: self._tick(session), first=beat_after)

    def kill(self) -> None:
        """End its process at once, and all that runs on it."""
        if not self.alive:
            return
        self.alive = False
        self.session.kill()
        waits, self._waits = list(self._waits), {}
        for wait in waits:
            wait.end(EngineGoneError(self.name))

    def _tick(self, session: PlaneSession) -> bool:
        if session is not self.session or not self.alive:
            return False
        self.look()
        session.beat()
        return True

    @property
    def epoch(self) -> int:
        """The incarnation's, 0 without one."""
        registration = self.session.registration
        return registration.engine_epoch if registration is not None and self.alive else 0

    @property
    def busy(self) -> bool:
        """Whether something runs on it."""
        return False

    def begin(self) -> None:
        """Begin with nothing."""

    def look(self) -> None:
        """Look after what is retained, and tell the load."""

    def poke(self) -> None:
        """Take note that the session has events."""

    def request_id(self) -> str:
        """Return an id for a new request."""
        return f"{self.process}-{next(self._requests)}"

    # Waiting, as long as the process lives.

    def check(self) -> None:
        """Raise EngineGoneError if it is not there."""
        if not self.alive:
            raise EngineGoneError(self.name)

    async def until(self, when: float) -> None:
        """Wait until a time. Raises EngineGoneError."""
        await self.over(self.world.simulation.sleep(when - self.world.simulation.now))

    async def over(self, wait: Wait) -> None:
        """Wait for something. Raises EngineGoneError."""
        self._waits[wait] = None
        try:
            await wait
        finally:
            self._waits.pop(wait, None)

    async def read(self, tokens: int, *, while_alive: Callable[[], bool] = lambda: True) -> bool:
        """Read KV from another engine, after what is being read; False if that other died meanwhile."""
        speeds, now = self.world.speeds, self.world.simulation.now
        begins = max(now, self._reading_until)
        self._reading_until = begins + speeds.transfer_s + tokens / speeds.transfer
        await self.until(self._reading_until)
        return while_alive()

    async def compute(self, tokens: int, rate: float) -> None:
        """Compute tokens of a prompt, after what is being computed."""
        begins = max(self.world.simulation.now, self._computing_until)
        self._computing_until = begins + max(self.world.speeds.step_s, tokens / rate)
        await self.until(self._computing_until)

    @property
    def computing_s(self) -> float:
        """For how long it has prompts to compute."""
        return max(0.0, self._computing_until - self.world.simulation.now)
