"""For machines with few cores only: what waits in an engine sleeps instead of spinning.

NIXL's Python API starts every agent with a progress delay of zero: one thread per engine then polls without
a pause and fills a core. On two cores, two engines starve their own computing that way (a prefill of one
second was seen to take 80). A delay of 100 microseconds brings the idle cost to about 3 % of a core.

vLLM's scheduler and its worker, two processes, each spin for a second after every message between them. On
one core that takes from the worker what the scheduler spins away, and CPU time says nothing of work. Here
they wait at once, as they do anyway after that second. The socket that wakes them has room for one message,
and learns that this one has left a millisecond late: until then it drops the next one, and who waits for that
looks again after five seconds. While they spin nobody misses it. Here the socket has to look first.

Python imports this module by itself in every process that has this folder on PYTHONPATH; the rig puts it
there for its engines. A production engine has cores to spare and must not use it.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DELAY_MICROSECONDS = int(os.environ.get("NIXL_PROGRESS_DELAY_US", "100"))
SPIN_SECONDS = float(os.environ.get("KVPLANE_RIG_SPIN_S", "0"))


def _slow_down(module: ModuleType) -> bool:
    """Wrap the agent class that `module` uses; False when this module only re-exports the real one."""
    bindings = getattr(module, "nixlBind", None)
    if bindings is None:
        return False
    real_agent = bindings.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = DELAY_MICROSECONDS
        return real_agent(name, config)

    wrapped = ModuleType(bindings.__name__)
    wrapped.__dict__.update(vars(bindings))
    wrapped.__dict__["nixlAgent"] = agent
    module.__dict__["nixlBind"] = wrapped
    return True


def _stop_spinning(module: ModuleType) -> bool:
    """Have readers of vLLM's message queues wait after SPIN_SECONDS, and miss no message.

    False if there is nothing to change.
    """
    condition = getattr(module, "SpinCondition", None)
    if condition is None:
        return False
    begin, notify = condition.__init__, condition.notify

    def begin_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_SECONDS)

    def notify_surely(self: Any) -> None:
        self.local_notify_socket.getsockopt(module.zmq.EVENTS)  # makes it look, whatever the answer
        notify(self)

    condition.__init__, condition.notify = begin_quietly, notify_surely
    return True


def _change_for(name: str) -> Callable[[ModuleType], bool] | None:
    """Return what to do to the module `name` after it has run, None if nothing."""
    if name.startswith("nixl") and name.endswith("._api"):
        return _slow_down
    if name == "vllm.distributed.device_communicators.shm_broadcast":
        return _stop_spinning
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to be changed the ordinary way and changes each right after it has run."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with a loader that ends in the change, or None if there is none."""
        change = _change_for(fullname)
        if change is None or self._looking:
            return None
        self._looking = True  # or the look-up below would come back here
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this one loader object only
        return spec


sys.meta_path.insert(0, _Finder())
