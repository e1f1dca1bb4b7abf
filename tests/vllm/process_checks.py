"""Checks of the connector in forked and spawned processes, with a control plane that is not there."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import kvplane.connector.plugin  # noqa: F401 - as the API server does, before it starts the engine core
from kvplane.client.sync import EngineSessionThread
from kvplane.connector import compat
from kvplane.connector.scheduler import KVPlaneConnectorScheduler
from tests.vllm import scheduler_checks as base
from tests.vllm.runner import run

_WAIT_S = 60


def _engine(queue: Any) -> None:
    """What an engine core's process does with the connector, from its making to its end."""
    before = {thread.name for thread in threading.enumerate()}
    made = KVPlaneConnectorScheduler(base.config("kv_consumer"), "e", base.layout())
    unbound = {thread.name for thread in threading.enumerate()}
    made.bind_gpu_block_pool(SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 60))
    assert isinstance(made._session, EngineSessionThread)
    bound = {thread.name for thread in threading.enumerate()}
    turn = base.finish(base.request(dict(base.DIRECT), 100, 30))
    kept, _ = made.request_finished(turn, base.blocks_of(turn))
    begin = time.monotonic()
    made.shutdown()
    queue.put((unbound - before, bound - before, kept, time.monotonic() - begin))


def _started_by(method: str) -> None:
    assert [thread.name for thread in threading.enumerate() if "kvplane" in thread.name] == []
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=_engine, args=(queue,))
    process.start()
    unbound, bound, kept, took = queue.get(timeout=_WAIT_S)
    process.join(_WAIT_S)
    assert process.exitcode == 0
    assert unbound == set()  # workers may be forked until the pool is bound
    assert "kvplane-session" in bound, bound  # and perhaps gRPC's, by now
    assert kept is False  # nobody would ever learn of it
    assert took < 10


def check_a_forked_engine() -> None:
    _started_by("fork")


def check_a_spawned_engine() -> None:
    _started_by("spawn")


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
