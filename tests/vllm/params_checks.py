"""Checks of what a request's kv_transfer_params may say, however wrong, on vLLM's own classes."""

from __future__ import annotations

import sys

from kvplane.connector import compat
from tests.vllm.runner import run
from tests.vllm.scheduler_checks import offer, request, scheduler


def check_params_that_are_no_object_are_taken_off() -> None:
    s = scheduler("kv_consumer")
    for params in ("x", ["do_remote_prefill"], 7):
        made = request(params, name=f"odd-{params}")  # type: ignore[arg-type]
        s.on_new_request(made)
        assert s.get_num_new_matched_tokens(made, 0) == (0, False)
        assert made.kv_transfer_params is None


def check_nothing_is_read_unverified_by_a_second_flag() -> None:
    for verified in (True, False):
        s = scheduler("kv_producer")
        params = {**offer([*range(80)]), "do_remote_prefill": True}
        if not verified:
            params["kvplane"] = {}
        made = request(params, prompt=100)
        compat.call_if_there(s, "on_new_request", made)
        external, _ = s.get_num_new_matched_tokens(made, 0)
        plan = s._ledger.plan("r")
        assert plan is not None
        assert external == plan.tokens == (80 if verified else 0), (external, plan)


def check_ids_that_are_no_text_are_not_read_by() -> None:
    for name in ("remote_engine_id", "remote_request_id"):
        s = scheduler("kv_consumer")
        params = {
            "do_remote_prefill": True,
            "remote_engine_id": "p",
            "remote_request_id": "x",
            "remote_host": "h",
            "remote_port": 5,
            "remote_block_ids": [[1]],
            "tp_size": 1,
            name: ["no", "text"],
        }
        made = request(params)
        compat.call_if_there(s, "on_new_request", made)
        assert s.get_num_new_matched_tokens(made, 0) == (0, False)


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
