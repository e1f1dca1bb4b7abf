"""Asking engines how they are, and what they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import aiohttp
import structlog

from kvplane.router import openai
from kvplane.router.connections import MAX_LIST_BYTES, read_answer
from kvplane.router.engine import Engine
from kvplane.router.keys import EngineKeys
from kvplane.router.mistakes import refused_key
from kvplane.router.resources import exhausted, told

log = structlog.get_logger("kvplane.router")

_DOWN_PROBE_S = 0.5
_TIMEOUT_S = 2.0
_MODELS_EVERY_S = 30.0
_UNAUTHORIZED = (401, 403)


class Prober:
    """Probes engines in turn, one that is down more often, and notes on each what it has found.

    `engines` returns those to probe, every `interval_s` seconds. `on_up`, `on_down` and `on_models` are
    called when one has come up, does not answer, or has said which models it serves.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: Callable[[], Collection[Engine]],
        *,
        keys: EngineKeys,
        interval_s: float,
        monotonic: Callable[[], float],
        on_up: Callable[[], None],
        on_down: Callable[[Engine], None],
        on_models: Callable[[], None],
    ) -> None:
        self._session = session
        self._engines = engines
        self._keys = keys
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._on_up = on_up
        self._on_down = on_down
        self._on_models = on_models
        self._wake = asyncio.Event()
        self._tasks: dict[Engine, asyncio.Task[None]] = {}

    def wake(self) -> None:
        """Look again which engine is due."""
        self._wake.set()

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                self._wake.clear()
                now = self._monotonic()
                engines = self._engines()
                for engine in engines:
                    if not engine.probing and engine.probe_at <= now:
                        self._spawn(engine)
                due = min((e.probe_at for e in engines if not e.probing), default=now + self._interval_s)
                try:
                    async with asyncio.timeout(max(0.01, due - now)):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = tuple(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def settle(self, engines: Iterable[Engine]) -> None:
        """Wait until those of some engines have been probed that are due now, or are being probed."""
        now = self._monotonic()
        due = [e for e in engines if e in self._tasks or e.probe_at <= now]
        if due:
            await asyncio.wait([self._tasks.get(e) or self._spawn(e) for e in due])

    def _spawn(self, engine: Engine) -> asyncio.Task[None]:
        engine.probing = True
        task = self._tasks[engine] = asyncio.create_task(self.probe(engine), name=f"probe {engine.url}")
        task.add_done_callback(partial(self._forget, engine))
        return task

    def _forget(self, engine: Engine, task: asyncio.Task[None]) -> None:
        if self._tasks.get(engine) is task:  # and no later one yet
            del self._tasks[engine]

    async def probe(self, engine: Engine) -> None:
        """Ask an engine for its health and its models and note the answers. Never raises."""
        engine.probing = True
        try:
            if self._keys.for_requests:
                # Before anything is sent to one that comes up.
                engine.accept_keys(await self._keys.meant_for(engine.url, named=engine.static))
            await self._ask_health(engine)
            now = self._monotonic()
            if engine.up and engine.models_at <= now:
                engine.models_at = now + _MODELS_EVERY_S
                await self._ask_models(engine)
            wait_s = self._interval_s if engine.up else min(_DOWN_PROBE_S, self._interval_s)
            # Meanwhile it may have shown that it has other models.
            engine.probe_at = 0.0 if engine.up and not engine.models_at else now + wait_s
        finally:
            engine.probing = False
            self._wake.set()

    async def _ask_health(self, engine: Engine) -> None:
        problem = ""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with self._session.get(engine.at("/health"), allow_redirects=False) as response:
                    if response.status >= 500 or 300 <= response.status < 400:
                        problem = f"GET /health answered {response.status}"
                engine.timeouts = 0
        except TimeoutError:
            # A busy engine may be late once.
            engine.timeouts += 1
            problem = "GET /health timed out" if engine.timeouts >= 2 or not engine.up else ""
        except (aiohttp.ClientError, OSError, UnicodeError) as error:
            if exhausted(error):
                return  # That says nothing of the engine.
            problem = f"{type(error).__name__}: {told(error)}"
        if problem:
            if engine.up:
                log.warning("engine_went_down", engine=engine.url, problem=problem)
                engine.down_since = self._monotonic()
            engine.up, engine.verifies = False, None
            self._on_down(engine)
        elif not engine.timeouts and not engine.up:
            log.info("engine_came_up", engine=engine.url)
            engine.up, engine.models_at = True, 0.0
            engine.health.came_back(self._monotonic())
            self._on_up()

    async def _ask_models(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                status, answer = await self._models_of(engine)
            names = [entry["id"] for entry in answer["data"]] if status == 200 else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            return
        refused, engine.models_refused = engine.models_refused, status if status in _UNAUTHORIZED else 0
        if engine.models_refused and not refused:
            log.warning("engine_wants_api_key", engine=engine.url, problem=refused_key(engine))
        if names is None:
            return
        engine.models = frozenset(name for name in names if isinstance(name, str))
        self._on_models()

    async def _models_of(self, engine: Engine) -> tuple[int, Any]:
        """Return status and body of what an engine says it serves, with the key that it takes, if any."""
        # With a key first: who wants none takes any.
        for key in await self._keys.meant_for(engine.url, named=engine.static) or (None,):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with self._session.get(
                engine.at("/v1/models"), headers=headers, allow_redirects=False
            ) as response:
                status = response.status
                if status not in _UNAUTHORIZED:
                    if self._keys.for_requests:
                        engine.api_key = key or ""
                    return status, openai.parse_json(
                        await read_answer(response, MAX_LIST_BYTES)
                    ) if status == 200 else None
        return status, None
