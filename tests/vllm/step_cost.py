"""What the connector's scheduler half costs the scheduler thread, beside vLLM's own NIXL scheduler.

usage, in vLLM's environment: python -m tests.vllm.step_cost [--prompt 2000] [--repeat 300]

CPU time of the thread, so that it says the same on a busy machine. The session is the checks' recorder: what
the session's own thread does is not counted. Printed as JSON, in microseconds: medians of batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvplane.connector import compat
from tests.vllm.scheduler_checks import BLOCK, ENVELOPE, config, finish, layout, request, scheduler

READ: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "p",
    "remote_request_id": "x",
    "remote_host": "h",
    "remote_port": 5,
    "tp_size": 1,
}
"""What D gets of a request that P computed."""
POOL = 100_001
STEP = SimpleNamespace(num_scheduled_tokens={})


def microseconds(work: Callable[[int], None], repeat: int, batch: int = 10) -> float:
    """Return the median CPU time of one call."""
    spent = []
    for number in range(0, repeat, batch):
        began = time.thread_time_ns()
        for each in range(number, number + batch):
            work(each)
        spent.append((time.thread_time_ns() - began) / batch / 1000)
    return round(statistics.median(spent), 1)


def kvplane() -> Any:
    """Return kvplane's, with a pool in which everything fits."""
    made = scheduler()
    made.bind_gpu_block_pool(SimpleNamespace(num_gpu_blocks=POOL, get_num_free_blocks=lambda: POOL))
    return made


def stock() -> Any:
    """Return vLLM's own scheduler half, in one direction."""
    plain = config("kv_consumer")
    plain.kv_transfer_config.kv_connector_extra_config["bidirectional_kv_xfer"] = False
    return compat.SchedulerBase(plain, "e_dp3", layout())


def steps(made: Any) -> Callable[[int], None]:
    """Return a step in which nothing happens, as one that only decodes."""

    def step(number: int) -> None:
        made.build_connector_meta(STEP)
        if hasattr(made, "update_connector_output"):
            made.update_connector_output(KVConnectorOutput())

    return step


def lives(made: Any, requests: list[Request]) -> Callable[[int], None]:
    """Return a decode request's life: arrived, read from P, allocated, finished, and freed again."""

    def life(number: int) -> None:
        one = requests[number]
        compat.call_if_there(made, "on_new_request", one)
        made.get_num_new_matched_tokens(one, 0)
        given = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([7, 8, 9],), blocks=((),))
        made.update_state_after_alloc(one, given, one.num_prompt_tokens)
        made.build_connector_meta(STEP)
        finish(one)
        blocks = -(-one.num_computed_tokens // BLOCK)
        first = number % 20 * blocks + 1
        made.request_finished(one, (list(range(first, first + blocks)),))
        made.build_connector_meta(STEP)
        compat.call_if_there(
            made, "update_connector_output", KVConnectorOutput(finished_sending={one.request_id})
        )

    return life


def measure(prompt: int, repeat: int) -> dict[str, Any]:
    """Return the figures for prompts of so many tokens."""
    figures: dict[str, Any] = {"prompt_tokens": prompt, "block_tokens": BLOCK}
    for name, made in (("stock", stock()), ("kvplane", kvplane())):
        figures[f"{name}_step_us"] = microseconds(steps(made), repeat * 10)
        requests = [
            request(
                {**READ, "kvplane": {**ENVELOPE, "conversation_id": f"c{number}"}}
                if name == "kvplane"
                else dict(READ),
                prompt,
                32,
                f"r{number}",
            )
            for number in range(repeat)
        ]
        figures[f"{name}_request_us"] = microseconds(lives(made, requests), repeat)
        if name == "kvplane":
            figures["announced"] = len(made._session.announced)
    return figures


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.vllm.step_cost", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--prompt", type=int, default=2000, help="tokens (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=300, help="requests (default: %(default)s)")
    options = parser.parse_args()
    print(json.dumps(measure(options.prompt, options.repeat)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
