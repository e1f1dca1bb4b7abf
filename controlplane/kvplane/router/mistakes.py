"""What is wrong with how engines were started and named, in one line each. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvplane.client.model import EngineRole

if TYPE_CHECKING:
    from kvplane.client.model import Engine as RegisteredEngine
    from kvplane.router.engine import Engine

UNREACHABLE = "no decode engine answers: requests get 503"
"""What is said while all are down."""


def wrong_roles(
    engines: Sequence[Engine], registered: Sequence[RegisteredEngine], id_of: Callable[[Engine], str]
) -> list[str]:
    """Return a line for each engine that is used in a role other than the one it registered, if it did.

    And for each that is named in both roles, unless it registered for both. `id_of` returns an engine's
    registered id, "" while that is not known. Once one engine is known to be in the wrong role, those of
    whom it is not known are told by what is left of the registry, where that is clear.
    """
    ids = {engine: id_of(engine) for engine in engines}
    taken = {known for engine in engines for known in (*engine.engine_ids, ids[engine])}
    roles = {str(entry.spec.engine_id): entry.spec.role for entry in registered}
    left = [e.spec.role for e in registered if not e.spec.endpoint and e.spec.engine_id not in taken]
    strangers = [engine for engine in engines if not ids[engine]]
    lines = list[str]()
    swapped = False
    for engine in engines:
        role = roles.get(ids[engine])
        if role is None and EngineRole.BOTH in left:
            continue  # it may be that one
        if line := _in_wrong_role(engine, role, "registered"):
            swapped = True
            lines.append(line)
        elif engine.static and engine.prefill and engine.decode and role is not EngineRole.BOTH:
            lines.append(
                f"{engine.url} is named both as a prefill and as a decode engine, and has not registered as"
                " both (kv_role kv_both): name it as a decode engine alone, which computes prompts itself"
            )
    if swapped and len(strangers) == len(left) and len(set(left)) == 1:
        lines += [line for e in strangers if (line := _in_wrong_role(e, left[0], "seems to be registered"))]
    return lines


def _in_wrong_role(engine: Engine, role: EngineRole | None, how: str) -> str:
    if engine.prefill and not engine.decode and role is EngineRole.DECODE:
        return f"{engine.url} is given with --prefill, but {how} as a decode engine"
    if engine.decode and not engine.prefill and role is EngineRole.PREFILL:
        return f"{engine.url} is given with --decode, but {how} as a prefill engine"
    return ""


def no_decode(engines: Sequence[Engine]) -> str | None:
    """Return why no decode engine takes requests; None if one does, as far as it is known."""
    decode = [engine for engine in engines if engine.decode]
    if not decode:
        return (
            "no decode engine is known: give --decode, or set kvplane_endpoint on the engines so that"
            " their registration says where they are"
        )
    up = [engine for engine in decode if engine.up]
    if not up:
        return UNREACHABLE
    if all(engine.draining for engine in up):
        return "all decode engines that answer drain: start one, or restart one that has drained"
    return None


def no_decode_answer(engines: Sequence[Engine]) -> str:
    """Return what a client is told whose request no decode engine takes."""
    why = no_decode(engines)
    if why is None or why is UNREACHABLE:
        return "No decode engine can be reached."
    return f"{why[0].upper()}{why[1:]}."


def refused_key(engine: Engine) -> str | None:
    """Return what is wrong if an engine does not say what it serves since it wants an API key."""
    if not engine.models_refused:
        return None
    return (
        f"{engine.url} answers {engine.models_refused} to GET /v1/models, so its models are not known: write"
        " the API key it was started with into a file and name that with --engine-api-key-file"
    )


def no_common_model(engines: Sequence[Engine]) -> str | None:
    """Return what is wrong if prefill and decode engines serve no model in common."""
    prefill = frozenset[str]().union(*(e.models for e in engines if e.prefill))
    decode = frozenset[str]().union(*(e.models for e in engines if e.decode))
    if not prefill or not decode or prefill & decode:
        return None
    return (
        f"prefill engines serve {', '.join(sorted(prefill))}, decode engines serve "
        f"{', '.join(sorted(decode))}: start both with the same model and --served-model-name"
    )
