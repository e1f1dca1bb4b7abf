"""Turns of conversations that their clients do not name: see `history`.

A turn that is numbered at a place is waited for, and keeps others from it, until it is announced there. So a
place is looked at before a turn is numbered, and where one was only to learn of the turn before, the place is
ended as soon as there is nothing left to find.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace

from kvplane.client.model import BegunTurn, ConversationKey, Location, MissReason
from kvplane.router.history import PLACES, Trace
from kvplane.router.plane import Plane

_LOOKS = 5
"""Times that a turn which is still in flight is looked for, within the wait for it."""


@dataclass(frozen=True, slots=True)
class AutomaticTurn:
    """A turn that has begun. `begun.key` is under which it is to be announced."""

    begun: BegunTurn
    before: ConversationKey | None
    """Where the turn before was found, or should have been."""
    borrowed: bool = False
    """The location is another turn's of the same name: to be used where it is, not to be taken away."""


async def begin(plane: Plane, key: ConversationKey, trace: Trace, wait_s: float) -> AutomaticTurn | None:
    """Begin a turn and find the one before; `key` has tenant, model and adapter. None: plane unavailable.

    Two exchanges with the control plane, for what has not been said before; more where several turns have
    the same name.
    """
    group = uuid.uuid4().hex
    if trace.before is None or trace.before == trace.own:
        return await _begin_own(plane, key, trace, group)
    own, found = await asyncio.gather(
        _begin_own(plane, key, trace, group), _begin_after(plane, key, trace.before, wait_s, group)
    )
    if own is None or found is None:
        return None
    if found.location is None and own.begun.location is not None:
        # The turn is said again, and only its first answer is left.
        return replace(own, before=own.begun.location.key)
    learned = replace(found, turn=own.begun.turn, key=own.begun.key)
    return AutomaticTurn(learned, found.key)


def taken(plane: Plane, location: Location) -> None:
    """Note that the turn before has been claimed: its place is free for who says the same again."""
    plane.end_later(location.key)


async def look_up(plane: Plane, key: ConversationKey, trace: Trace) -> Location | MissReason | None:
    """Find the turn before without beginning one."""
    missed: MissReason | None = None
    for place in range(PLACES):
        answer = await plane.lookup(_at(key, trace.before or trace.own, place))
        if answer is None or isinstance(answer, Location):
            return answer
        missed = missed or answer
    return missed


def _at(key: ConversationKey, name: str, place: int) -> ConversationKey:
    return replace(key, conversation_id=Trace.at(name, place))


async def _begin_own(plane: Plane, key: ConversationKey, trace: Trace, group: str) -> AutomaticTurn | None:
    """Begin the turn at the first place that nobody has; what is at the others may be borrowed."""
    borrowed: Location | None = None
    place = 0
    while True:
        at = _at(key, trace.own, place)
        place += 1
        known = await plane.lookup(at, group=group)
        if known is None:
            return None
        if isinstance(known, Location):
            borrowed = borrowed or known
            if place < PLACES:
                continue
        begun = await plane.begin_turn(at, wait_s=0.0, group=group)
        if begun is None:
            return None
        borrowed = borrowed or begun.location
        is_free = begun.location is None and begun.miss is not MissReason.TURN_IN_FLIGHT
        if is_free or place == PLACES:
            break
    if borrowed is None:
        return AutomaticTurn(begun, None)
    return AutomaticTurn(replace(begun, location=borrowed, miss=None), borrowed.key, borrowed=True)


async def _begin_after(
    plane: Plane, key: ConversationKey, name: str, wait_s: float, group: str
) -> BegunTurn | None:
    """Find the turn before at one of its places; the first one's answer if there is nothing."""
    first: BegunTurn | None = None
    for place in range(PLACES):
        begun = await plane.begin_turn(_at(key, name, place), wait_s=0.0, group=group)
        if begun is None:
            return None
        if begun.miss is MissReason.TURN_IN_FLIGHT:
            begun = await _when_announced(plane, begun, wait_s, group)
        if begun.location is not None:
            return begun
        if begun.turn and begun.miss is not MissReason.TURN_IN_FLIGHT:
            plane.end_later(begun.key)
        first = first or begun
        if begun.turn_index <= 1:
            break  # Nobody has ever begun a turn there, so nor at the next.
    return first


async def _when_announced(plane: Plane, begun: BegunTurn, wait_s: float, group: str) -> BegunTurn:
    """Wait for a turn that is still in flight, or for another that came from it too, which nobody awaits."""
    for _ in range(_LOOKS):
        await asyncio.sleep(wait_s / _LOOKS)
        answer = await plane.lookup(begun.key, group=group)
        if isinstance(answer, Location):
            return replace(begun, location=answer, miss=None)
        if answer is not MissReason.TURN_IN_FLIGHT and answer is not MissReason.UNKNOWN_CONVERSATION:
            break
    return begun
