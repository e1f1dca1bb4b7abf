"""For machines with few cores only: let NIXL's progress thread sleep between two looks at the network.

NIXL's Python API starts every agent with a progress delay of zero: one thread per engine then polls without
a pause and fills a core. On two cores, two engines starve their own computing that way (a prefill of one
second was seen to take 80). A delay of 100 microseconds brings the idle cost to about 3 % of a core.

Python imports this module by itself in every process that has this folder on PYTHONPATH; the rig puts it
there for its engines. A production engine has cores to spare and must not use it.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DELAY_MICROSECONDS = int(os.environ.get("NIXL_PROGRESS_DELAY_US", "100"))


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


class _NixlFinder(importlib.abc.MetaPathFinder):
    """Finds NIXL's `_api` module the ordinary way and changes it right after it has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec with a loader that ends in `_slow_down`, or None if not NIXL's."""
        if not (fullname.startswith("nixl") and fullname.endswith("._api")):
            return None
        sys.meta_path.remove(self)  # or the look-up below would come back here
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if _slow_down(module) and self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this one loader object only
        return spec


sys.meta_path.insert(0, _NixlFinder())
