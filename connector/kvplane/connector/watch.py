"""Sees what vLLM tells no connector: that the engine pauses, ends, or changes its weights."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from vllm.v1.engine.core import EngineCore

from kvplane.connector.lifecycle import EngineState


class EngineWatch:
    """Sees what no connector is told: that the engine pauses, ends, or changes its weights.

    vLLM tells a connector to reset its cache when asked for that (`reset_connector`, sleep). It does not when
    weights are changed over `collective_rpc` or an adapter is loaded in place, nor when the prefix cache
    alone is reset; and it waits with a pause and its end for blocks that the connector holds, without a
    word. So the connector looks at the engine core, which makes it: its frame is on the stack then.
    """

    def __init__(self, core: Any | None) -> None:
        self._core = weakref.ref(core) if core is not None else None

    @classmethod
    def of_caller(cls) -> EngineWatch:
        """Return a watch of the engine core that is being made further up the stack, if there is one."""
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), EngineCore):
                return cls(frame.f_locals["self"])
            frame = frame.f_back  # type: ignore[assignment]  # ends with None
        return cls(None)

    @property
    def found(self) -> bool:
        """Whether there is an engine core to watch."""
        return self._core is not None and self._core() is not None

    @property
    def weight_version(self) -> str:
        """The version the caller gave to the weights in use, "" if none (vLLM 0.32 and later)."""
        version = str(getattr(self._get(), "_weight_version", ""))
        return "" if version == "default" else version

    def state(self) -> EngineState:
        """Return what the engine is about. Two attributes are read."""
        core = self._get()
        if core is None:
            return EngineState.SERVING
        running = getattr(core, "is_running", None)
        if running is not None and hasattr(core, "shutdown_state") and not running():
            return EngineState.STOPPING
        # While the core is being made it has no scheduler yet.
        if hasattr(core, "scheduler") and core.is_scheduler_paused():
            return EngineState.PAUSED
        return EngineState.SERVING

    def tell(self, changed: Callable[[str], None]) -> None:
        """Have `changed` called, with the cause, before anything that makes KV of before unlike KV of after.

        It is called on the engine's own thread, between two steps.
        """
        core = self._get()
        if core is None:
            return
        _around(core, "collective_rpc", lambda method, *_, **__: _changes_weights(method), changed)
        _around(core, "reset_prefix_cache", lambda *_, **__: "reset_prefix_cache", changed)
        _around(core, "add_lora", lambda request, *_, **__: _replaces_adapter(request), changed)
        # After the fact: the version is what KV computed from now on is named by.
        _around(core, "set_weight_version", lambda *_, **__: "set_weight_version", changed, after=True)

    def _get(self) -> Any | None:
        return self._core() if self._core is not None else None


def _around(
    core: Any, name: str, cause: Callable[..., str], changed: Callable[[str], None], *, after: bool = False
) -> None:
    method = getattr(core, name, None)
    if method is None:
        return

    @functools.wraps(method)  # vLLM looks at the signature
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        why = cause(*args, **kwargs)
        if why and not after:
            changed(why)
        result = method(*args, **kwargs)
        if why and after:
            changed(why)
        return result

    setattr(core, name, wrapped)


def _changes_weights(method: Any) -> str:
    """Return the name of a call to the workers that may change weights, "" of any other.

    Training frameworks bring calls of their own; a name is all there is to go by. One too many costs
    reuse, one too few would mean KV of other weights.
    """
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    asks = name.startswith(("get_", "check_", "compute_", "has_", "is_", "save_", "determine_", "init_"))
    return name if not asks and any(word in name for word in ("weight", "reload", "load_model")) else ""


def _replaces_adapter(request: Any) -> str:
    return "add_lora" if getattr(request, "load_inplace", False) else ""
