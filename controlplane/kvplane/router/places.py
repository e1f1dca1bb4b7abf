"""Where a turn's decode leg runs, and in which line it waits for a place there."""

from __future__ import annotations

from kvplane.router.admission import Admission
from kvplane.router.engine import Engine
from kvplane.router.policy import Path
from kvplane.router.pool import EnginePool
from kvplane.router.turn import Turn
from kvplane.router.upstream import RefusedError

MOST_ASKED = 5
"""Engines that are asked, of however many, while each answers that it is busy or lacks the model.

Where all are, asking all would give each of them everybody's requests. Who lacks a model is asked again only
after a while, so the next request for it comes to others.
"""


def line(kind: str, tried: set[Engine], failed: Engine | None) -> str:
    """Name the line for a place: those that may not go everywhere do not hold up the others."""
    if not tried:
        return kind
    return " ".join([kind, "without", *sorted(e.url for e in tried), "or", failed.url if failed else "none"])


class DecodePlaces:
    """Finds decode engines for turns; waits while none has a place."""

    def __init__(self, pool: EnginePool, admission: Admission) -> None:
        self._pool = pool
        self._admission = admission

    async def find(self, turn: Turn, tried: set[Engine], failed: Engine | None) -> Engine | None:
        """Return an engine that was not tried, or else the one that `failed`: that may have been for once.

        None if there is none. For a direct turn it is not the holder if that has no place and another has.
        Raises OverloadedError.
        """
        holder, only = turn.holder, turn.only_engine
        if only is not None:
            again = only not in tried or only is failed
            return await self._admission.place(only.url, lambda: only) if again else None
        if turn.path is Path.DIRECT and holder is not None and holder not in tried:
            return await self._admission.place(holder.url, lambda: self._holder_or_idle(turn, holder))
        return await self._admission.place(
            line(f"decode {turn.model}", tried, failed),
            # After a pull, the engine that held the conversation needs the new part only.
            lambda: self._pool.choose(self._able(turn, tried, failed), prefer=turn.holder),
        )

    def others_may(self, turn: Turn, refused: RefusedError, tried: set[Engine]) -> bool:
        """Tell whether a refusal is one engine's only: it is busy, or no longer serves the model.

        `tried` are those that were asked before it.
        """
        engine, answer = refused.engine, refused.answer
        one_more = len(tried) + 1 < MOST_ASKED
        if answer.status == 429:
            return one_more
        return answer.lacks(turn.model) and self._pool.lacks_model(engine, turn.model) and one_more

    def _able(self, turn: Turn, tried: set[Engine], failed: Engine | None) -> list[Engine]:
        engines = self._pool.decode_engines(turn.model)
        if any(self._well(e) for e in engines if e not in tried):
            failed = None
        return [e for e in engines if e not in tried or e is failed]

    def _holder_or_idle(self, turn: Turn, holder: Engine) -> Engine:
        if self._admission.has_place(holder) or turn.reason == "forced":
            return holder
        others = self._able(turn, {holder}, None)
        return next((e for e in others if self._well(e) and self._admission.has_place(e)), holder)

    def _well(self, engine: Engine) -> bool:
        return engine.up and not self._pool.ejected(engine)
