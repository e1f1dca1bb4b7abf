"""What becomes of retained KV when the engine pauses, sleeps, gets new weights, or ends.

vLLM completes a pause, a sleep or a shutdown only when no request holds blocks any more, and a retained turn
holds them for minutes. So everything is given back as soon as the engine begins one of these, and nothing is
retained until it serves again. Pure: no vLLM, time injected.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from kvplane.client.logs import get_logger

_LONGEST_FAREWELL_S = 30.0

_log = get_logger("kvplane.connector")


class EngineState(StrEnum):
    """What the engine is about."""

    SERVING = "serving"
    PAUSED = "paused"
    STOPPING = "stopping"


class Kept(Protocol):
    """What is needed of Retention."""

    def __len__(self) -> int:
        """Number of requests held."""

    def request_ids(self) -> list[str]:
        """All of them."""

    def withdraw_all(self) -> None:
        """Ask everything back."""


class LifeCycle:
    """Follows the engine's state, step by step. Belongs to the scheduler thread.

    Args:
        state: tells the engine's state; called at every step, must cost next to nothing.
        monotonic: clock.
        shutdown_timeout_s: how long the engine is given to end once it was told to; half of it is for
            readers of what it holds, at most 30 s.
    """

    def __init__(
        self,
        state: Callable[[], EngineState],
        *,
        monotonic: Callable[[], float],
        shutdown_timeout_s: float = 0.0,
    ) -> None:
        self._read = state
        self._monotonic = monotonic
        self._farewell_s = min(shutdown_timeout_s / 2, _LONGEST_FAREWELL_S)
        self._state = EngineState.SERVING
        self._give_up_at: float | None = None

    @property
    def refusal(self) -> str:
        """Why nothing is retained now, "" if it may be."""
        state = self._read()
        return "" if state is EngineState.SERVING else f"engine_{state}"

    def step(self, kept: Kept, *, live: bool) -> list[str]:
        """Look after a change of state; returns requests whose blocks are to be freed whoever reads them.

        That is none but for an engine which is about to end, when its readers had their time: it would be
        killed with its blocks a moment later. Not while requests are live, which could be given the blocks
        and write into what is being read.
        """
        state = self._read()
        if state is not self._state:
            _log.info("engine_state_changed", state=str(state), held=len(kept))
            self._state = state
            stopping = state is EngineState.STOPPING
            self._give_up_at = self._monotonic() + self._farewell_s if stopping else None
            if state is not EngineState.SERVING:
                kept.withdraw_all()
        if self._give_up_at is None or live or self._monotonic() < self._give_up_at:
            return []
        self._give_up_at = None
        return kept.request_ids()
