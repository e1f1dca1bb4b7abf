"""What is wrong with how engines were started, in one line each. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvplane.client.model import EngineRole

if TYPE_CHECKING:
    from kvplane.router.engine import Engine


def wrong_roles(roles: Iterable[tuple[Engine, EngineRole | None]]) -> list[str]:
    """Return a line for each engine that is used in a role other than the one it registered, if it did.

    And for each that is named in both roles, unless it registered for both.
    """
    lines = list[str]()
    for engine, role in roles:
        if engine.prefill and not engine.decode and role is EngineRole.DECODE:
            lines.append(f"{engine.url} is given with --prefill, but registered as a decode engine")
        elif engine.decode and not engine.prefill and role is EngineRole.PREFILL:
            lines.append(f"{engine.url} is given with --decode, but registered as a prefill engine")
        elif engine.static and engine.prefill and engine.decode and role is not EngineRole.BOTH:
            lines.append(
                f"{engine.url} is named both as a prefill and as a decode engine, and has not registered as"
                " both (kv_role kv_both): name it as a decode engine alone, which computes prompts itself"
            )
    return lines


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
