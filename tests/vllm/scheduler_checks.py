"""Checks of KVPlaneConnectorScheduler on vLLM's own classes. Runs in vLLM's environment: one line per check.

Configuration objects are stand-ins with the attributes NIXL's scheduler reads; requests, KV cache layout and
the base class are vLLM's. The control plane is an address where nobody listens, the session a recorder.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvplane.client import events as ev
from kvplane.client.model import Announcement, ConversationKey, EngineLoad, Registration, RequestId
from kvplane.connector import compat
from kvplane.connector import scheduler as under_test
from kvplane.connector.fingerprint import make_chain
from tests.vllm.runner import run

BLOCK = 32
ENVELOPE = {
    "tenant_id": "t",
    "model": "m",
    "adapter": "",
    "conversation_id": "c",
    "turn": 2,
    "endpoint": "http://d",
}
DIRECT = {"do_remote_prefill": False, "do_remote_decode": False, "kvplane": ENVELOPE}


class Recorder:
    """Stands in for EngineSessionThread."""

    def __init__(self, address: str, spec: Any, **_: Any) -> None:
        self.spec = spec
        self.attached = True
        self.last_contact: float | None = 1e12
        self.registration = Registration(1, 10, 480, 30)
        self.announced: list[Announcement] = []
        self.freed_requests: list[str] = []
        self.renewals: list[tuple[str, float]] = []
        self.events: list[ev.Event] = []
        self.loads: list[EngineLoad] = []
        self.dropped = 0
        self.queues: dict[str, int] = {}

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def announce(self, announcement: Announcement, *, expires_at: float) -> None:
        self.announced.append(announcement)

    def withdraw(self, request_id: RequestId) -> bool:
        return True

    def renew(self, request_id: RequestId, *, expires_at: float) -> bool:
        self.renewals.append((request_id, expires_at))
        return True

    def freed(self, request_id: RequestId) -> None:
        self.freed_requests.append(request_id)

    def set_load(self, load: EngineLoad) -> None:
        self.loads.append(load)

    def submit(self, work: Any) -> bool:
        return False

    def start_incarnation(self) -> None:
        pass

    def drain_events(self) -> list[ev.Event]:
        events, self.events = self.events, []
        return events


def config(role: str) -> Any:
    extra = {
        "kvplane_address": "127.0.0.1:1",
        "bidirectional_kv_xfer": True,
        "kvplane_remote_host": "10.0.0.9",
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            data_parallel_index=3,
            data_parallel_rank=3,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto", mamba_cache_mode="none"),
        model_config=SimpleNamespace(
            model="/models/tiny", revision=None, dtype=torch.float32, served_model_name=["tiny", "t"]
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        kv_transfer_config=SimpleNamespace(
            kv_role=role,
            kv_buffer_device="cpu",
            kv_connector_extra_config=extra,
            get_from_extra_config=lambda key, default: extra.get(key, default),
        ),
        num_prefill_lookahead_tokens=0,
    )


def layout() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=101, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def scheduler(role: str = "kv_consumer") -> Any:
    under_test.EngineSessionThread = Recorder  # type: ignore[attr-defined, assignment]  # replaced, here only
    made = under_test.KVPlaneConnectorScheduler(config(role), "e_dp3", layout())
    made.bind_gpu_block_pool(SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 60))
    return made


def request(params: dict[str, Any] | None, prompt: int = 100, output: int = 0, name: str = "r") -> Request:
    sampling = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": params})
    made = Request(name, list(range(prompt)), sampling, None)
    made.append_output_token_ids(list(range(1000, 1000 + output)))
    return made


def finish(
    made: Request, in_flight: int = 0, status: RequestStatus = RequestStatus.FINISHED_STOPPED
) -> Request:
    made.status = status
    made.num_computed_tokens = made.num_tokens - 1 + in_flight
    made.num_in_flight_tokens = in_flight
    return made


def blocks_of(made: Request) -> tuple[list[int]]:
    return (list(range(1, 1 + -(-made.num_computed_tokens // BLOCK))),)


def allocated(s: Any, made: Request, external: int = 0) -> None:
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([7, 8, 9],), blocks=((),))
    s.update_state_after_alloc(made, blocks, external)


def meta(s: Any) -> Any:
    return s.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}))


def check_a_turn_is_announced_and_nothing_returned() -> None:
    s = scheduler()
    made = request(dict(DIRECT), 100, 30)
    allocated(s, made)
    finish(made)
    assert s.request_finished(made, blocks_of(made)) == (True, None)
    (sent,) = s._session.announced
    assert sent.key == ConversationKey("t", "m", "c")
    assert (sent.turn, sent.token_count, sent.block_count) == (2, 129, 5)
    assert b'"remote_host":"10.0.0.9"' in sent.kv_transfer_params
    assert sent.fingerprint.chain == make_chain(s._context, made.all_token_ids[:129], 64)
    sent_meta = meta(s)
    assert "r" in sent_meta.reqs_in_batch  # else the worker would never free a direct turn
    left_s = sent_meta.reqs_to_send["r"] - under_test._clock()
    assert 530 < left_s < 545, "480 s for the next turn, and then time for a last claim and its reader"
    assert sent.lease_class is not None


def check_a_renewed_deadline_reaches_the_worker_before_the_record() -> None:
    s = scheduler()
    made = finish(request(dict(DIRECT), 100, 30))
    s.request_finished(made, blocks_of(made))
    first = meta(s).reqs_to_send["r"]
    s._session.events.append(ev.Registered(Registration(1, 10, 480, 30), True))
    s._session.events.append(ev.RenewalOrdered(RequestId("r"), 900.0))
    assert "r" not in meta(s).reqs_to_send  # no more than the control plane grants
    s._session.events.append(ev.Registered(Registration(1, 10, 1000, 30), True))
    s._session.events.append(ev.RenewalOrdered(RequestId("r"), 900.0))
    assert 400 < meta(s).reqs_to_send["r"] - first < 430
    s.step_done()
    s.step_done()
    assert s._session.renewals == []
    s.step_done()
    ((request_id, expires_at),) = s._session.renewals
    assert request_id == "r"
    assert 910 < expires_at - under_test._clock() < 920


def check_agreed_blocks_keep_running_requests_from_preemption() -> None:
    s = scheduler()
    made = finish(request(dict(DIRECT), 100, 30))
    s.request_finished(made, blocks_of(made))
    assert not s.has_pending_block_frees()
    s._session.events.append(ev.Ordered(RequestId("r"), under_test_reason()))
    meta(s)
    assert s.has_pending_block_frees()
    s.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    assert not s.has_pending_block_frees()


def check_a_waiting_turns_own_conversation_goes_last() -> None:
    s = scheduler()
    for name, envelope in (("own", ENVELOPE), ("other", {**ENVELOPE, "conversation_id": "d"})):
        made = finish(request({**DIRECT, "kvplane": envelope}, 100, 30, name))
        s.request_finished(made, ([number + 10 * (name == "own") for number in range(1, 6)],))
    s._pool.get_num_free_blocks = lambda: 8
    s.get_num_new_matched_tokens(request(dict(DIRECT), 300, name="next"), 0)
    meta(s)
    assert s._keeper.retention.state("own").name == "RETAINED"
    assert s._keeper.retention.state("other").name == "WITHDRAWING"


def check_tokens_in_flight_are_not_announced() -> None:
    s = scheduler()
    made = request(dict(DIRECT), 100, 29)
    finish(made, in_flight=1)
    assert (made.num_computed_tokens, made.num_tokens) == (129, 129)
    assert s.request_finished(made, blocks_of(made)) == (True, None)
    (sent,) = s._session.announced
    assert sent.token_count == 128
    assert b'"remote_block_ids":[[1,2,3,4]]' in sent.kv_transfer_params
    assert b'"remote_num_tokens":128' in sent.kv_transfer_params


def check_without_envelope_nothing_is_retained() -> None:
    for params in (
        {"do_remote_prefill": False, "do_remote_decode": False},
        {**DIRECT, "kvplane": {"turn": 1}},
    ):
        s = scheduler()
        made = finish(request(params, 100, 30))
        assert s.request_finished(made, blocks_of(made)) == (False, None)
        assert s._session.announced == []
        sent_meta = meta(s)
        assert "r" in sent_meta.reqs_not_processed
        assert "r" not in sent_meta.reqs_to_send


def check_aborted_turns_are_not_retained() -> None:
    s = scheduler()
    made = finish(request(dict(DIRECT), 100, 30), status=RequestStatus.FINISHED_ABORTED)
    assert s.request_finished(made, blocks_of(made)) == (False, None)
    assert s._session.announced == []


def check_orders_and_reads() -> None:
    s = scheduler()
    made = finish(request(dict(DIRECT), 100, 30))
    s.request_finished(made, blocks_of(made))
    meta(s)
    s._session.events.append(ev.Ordered(RequestId("r"), under_test_reason()))
    due = meta(s).reqs_to_send
    assert due["r"] <= under_test._clock()
    s.update_connector_output(KVConnectorOutput(finished_sending={"r"}))
    assert s._session.freed_requests == ["r"]
    assert s._session.loads[-1].retained_blocks == 0


def under_test_reason() -> Any:
    from kvplane.client.model import ReleaseReason

    return ReleaseReason.SUPERSEDED


def check_a_prefill_engine_hands_over_as_ever() -> None:
    s = scheduler("kv_producer")
    made = request({"do_remote_decode": True, "do_remote_prefill": False}, 100, 1)
    s.on_new_request(made)
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    allocated(s, made)
    finish(made, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    delay, params = s.request_finished(made, blocks_of(made))
    assert delay
    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == 100
    assert params["remote_host"] != "10.0.0.9"  # P's own hand-over is vLLM's
    assert params["kvplane"]["outcome"] == "cold"
    assert s._session.announced == []
    assert s._session.spec.data_parallel_rank == 3


def offer(held: list[int]) -> dict[str, Any]:
    chain = make_chain(scheduler()._context, held, 64)
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(1, 1 + -(-len(held) // BLOCK)))],
        "remote_engine_id": "d",
        "remote_request_id": "x",
        "remote_host": "h",
        "remote_port": 5,
        "remote_num_tokens": len(held),
        "kvplane": {"fingerprint": {"chunk_tokens": 64, "chain": chain.hex()}, "token_count": len(held)},
    }


def check_an_equal_prefix_is_pulled_once() -> None:
    s = scheduler("kv_producer")
    made = request(offer([*range(150), 9999, *range(151, 200)]), 300)
    for _ in range(3):
        assert s.get_num_new_matched_tokens(made, 0) == (128, True)
    assert made.kv_transfer_params["remote_block_ids"] == [[1, 2, 3, 4]]
    allocated(s, made, 128)
    assert meta(s).reqs_to_recv["r"].remote.block_ids == [[1, 2, 3, 4]]
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)  # preempted: vLLM would wait for ever
    allocated(s, made, 0)
    assert "r" not in meta(s).reqs_to_recv


def check_the_worker_declines_a_read_that_begins_too_late() -> None:
    if not compat.DECLINES_LATE_READS:
        return
    s = scheduler("kv_producer")
    made = request(offer(list(range(100))), 100)
    s.on_new_request(made)
    assert s.get_num_new_matched_tokens(made, 0)[0]
    begin_by = -made.kv_transfer_params["remote_blocks_expiry_time"]
    timeout_s = s._session.registration.claim_timeout_s
    assert 0 < begin_by - under_test._clock() <= timeout_s
    asked: list[Any] = []

    def own_check(meta: Any) -> bool:
        asked.append(meta)
        return False

    worker = SimpleNamespace(_is_turn2_read_expired=own_check)
    compat.decline_late_reads(worker)

    def late(deadline: float | None, blocks: Any = ((1,),)) -> bool:
        remote = SimpleNamespace(blocks_expiry_time=deadline)
        meta = SimpleNamespace(remote=remote, local_physical_block_ids=blocks)
        return bool(worker._is_turn2_read_expired(meta))

    now = under_test._clock()
    assert not late(compat.read_by(now + 60))
    assert late(compat.read_by(now))
    assert not late(compat.read_by(now), ())  # only to tell the holder that it may free
    assert asked == []
    assert not late(None)
    assert not late(now + 1000)  # a holder's own deadline is vLLM's to judge
    assert len(asked) == 2


def check_the_worker_shakes_hands_anew_with_an_engine_that_a_read_from_failed() -> None:
    marked, cleaned = list[str](), list[set[str]]()
    worker = SimpleNamespace(
        _remote_agents={"lost": {}, "well": {}, "waits": {}},
        _failed_remote_engines={"lost", "waits", "never met"},
        _invalid_remote_engines={"waits"},
    )
    compat.renew_failed_peers(worker)  # of a vLLM that knows nothing of the kind
    assert not hasattr(worker, "_cleanup_remote_engines")
    worker._mark_remote_engine_invalid = lambda engine_id, now: marked.append(engine_id)
    worker._cleanup_remote_engines = lambda: cleaned.append(set(worker._failed_remote_engines))
    compat.renew_failed_peers(worker)
    worker._cleanup_remote_engines()
    assert (marked, cleaned) == (["lost"], [{"lost", "waits", "never met"}])


def check_a_workers_deadline_is_by_its_own_clock() -> None:
    """The scheduler's clock may be days apart where a worker runs on another machine."""
    for ahead_s in (-0.5 * under_test._clock(), 0.0, 86_400.0):
        now = under_test._clock()
        remotes = [
            SimpleNamespace(blocks_expiry_time=value)
            for value in (compat.read_by(now + ahead_s + 60), 5.0, None)
        ]
        metadata = SimpleNamespace(
            scheduler_clock=now + ahead_s,
            reqs_to_recv={str(at): SimpleNamespace(remote=remote) for at, remote in enumerate(remotes)},
        )
        compat.rebase_reads(metadata)
        assert abs(-remotes[0].blocks_expiry_time - (under_test._clock() + 60)) < 5
        assert [remote.blocks_expiry_time for remote in remotes[1:]] == [5.0, None]


def check_a_mismatch_has_the_holder_told() -> None:
    s = scheduler("kv_producer")
    made = request(offer([9999] * 200), 300, 1)
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    allocated(s, made, 0)
    told = meta(s).reqs_to_recv["r"]
    assert told.remote.request_id == "x"
    assert not any(told.local_block_ids)
    finish(made, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    _, params = s.request_finished(made, blocks_of(made))
    assert params["kvplane"]["outcome"] == "mismatch"


def check_a_failed_read_is_reported() -> None:
    s = scheduler("kv_producer")
    made = request(offer(list(range(200))), 300, 1)
    assert s.get_num_new_matched_tokens(made, 0) == (200, True)
    allocated(s, made, 200)
    s.update_connector_output(KVConnectorOutput(finished_recving={"r"}, invalid_block_ids={8}))
    finish(made, status=RequestStatus.FINISHED_LENGTH_CAPPED)
    _, params = s.request_finished(made, blocks_of(made))
    assert params["kvplane"]["outcome"] == "failed"
    assert params["kvplane"]["reused_tokens"] == 0


def check_a_blocked_request_makes_room() -> None:
    s = scheduler()
    s._pool.get_num_free_blocks = lambda: 2
    made = finish(request(dict(DIRECT), 100, 30, "old"))
    s.request_finished(made, blocks_of(made))
    s.get_num_new_matched_tokens(request(dict(DIRECT), 400, name="new"), 0)
    meta(s)
    assert s._keeper.counts["withdrawn"] == 1


def check_prompt_embeddings_are_not_retained() -> None:
    s = scheduler()
    made = finish(request(dict(DIRECT), 100, 30))
    made.prompt_embeds = torch.zeros(100, 4)
    assert s.request_finished(made, blocks_of(made)) == (False, None)
    assert s._keeper.counts["not_retained:no_fingerprint"] == 1


def check_a_turn_that_ran_through_a_reset_is_not_retained() -> None:
    s = scheduler()
    made = request(dict(DIRECT), 100, 30)
    s.on_new_request(made)
    allocated(s, made)
    s.reset_cache()
    finish(made)
    assert s.request_finished(made, blocks_of(made)) == (False, None)
    assert not s._session.announced
    after = request(dict(DIRECT), 100, 30, name="after")
    s.on_new_request(after)
    allocated(s, after)
    finish(after)
    assert s.request_finished(after, blocks_of(after)) == (True, None)


def check_what_waits_through_a_reset_is_not_pulled_after_it() -> None:
    """Its weights may be new by then. Seen: a read that was planned before was begun after."""
    for planned in (False, True):
        s = scheduler("kv_producer")
        made = request(offer(list(range(200))), 300, 1)
        s.on_new_request(made)
        if planned:
            assert s.get_num_new_matched_tokens(made, 0) == (200, True)  # there is no room yet
        s.reset_cache()
        for _ in range(2):
            assert s.get_num_new_matched_tokens(made, 0) == (0, False)
        allocated(s, made, 0)
        assert "r" not in meta(s).reqs_to_recv
        finish(made, status=RequestStatus.FINISHED_LENGTH_CAPPED)
        _, params = s.request_finished(made, blocks_of(made))
        assert (params["kvplane"]["outcome"], params["kvplane"]["detail"]) == ("cold", "reset")
        assert not s._stale
        after = request(offer(list(range(200))), 300, 1)
        s.on_new_request(after)
        assert s.get_num_new_matched_tokens(after, 0) == (200, True)


def check_a_fault_of_ours_costs_reuse_only() -> None:
    s = scheduler()

    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("broken")

    s._keeper.step = broken
    s._keeper.finish = broken
    made = finish(request(dict(DIRECT), 100, 30))
    assert s.request_finished(made, blocks_of(made)) == (False, None)
    meta(s)
    assert s._faults == {"announce": 1, "step": 1}


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
