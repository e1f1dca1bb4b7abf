"""Checks of a prefill engine behind a router that knows nothing of kvplane, on vLLM's own classes.

Runs in vLLM's environment. The session runs what it is given when it is told to; its client has the answers.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvplane.client.model import ConversationKey, Registration
from kvplane.connector import compat
from kvplane.connector import scheduler as under_test
from kvplane.connector.engine import conversation_key
from kvplane.connector.envelope import read_envelope
from tests.connector.asked import Session, location
from tests.vllm.runner import run
from tests.vllm.scheduler_checks import Recorder, allocated, config, finish, layout, meta, scheduler

KEY = ConversationKey("default", "tiny", "c")
STOCK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NAMED = {**STOCK, "conversation_id": "c"}


class AskedRecorder(Recorder):
    """A recorder that can be asked, see Session."""

    def __init__(self, address: str, spec: Any, **more: Any) -> None:
        super().__init__(address, spec, **more)
        self.registration = Registration(5, 10, 480, 30)
        self.asked = Session()

    def submit(self, work: Any) -> bool:
        return self.asked.submit(work)


def prefill(**extra: Any) -> Any:
    """A prefill engine, whose conversation "c" is held by d0 with 150 tokens."""
    under_test.EngineSessionThread = AskedRecorder  # type: ignore[attr-defined, assignment]  # here only
    of = config("kv_producer")
    of.kv_transfer_config.kv_connector_extra_config.update(extra)
    made = under_test.KVPlaneConnectorScheduler(of, "p0", layout())
    made.bind_gpu_block_pool(SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: 60))
    client(made).locations[KEY] = location(
        range(150), key=KEY, context=made._context, remote_block_ids=[[1, 2, 3, 4, 5]]
    )
    return made


def client(s: Any) -> Any:
    return s._session.asked.client


def request(params: dict[str, Any], **more: Any) -> Request:
    sampling = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": dict(params)}, **more.pop("sampling", {})
    )
    return Request("r", list(range(200)), sampling, None, **more)


def answered(s: Any, made: Request, local: int = 0) -> Any:
    """What the scheduler is told once the control plane has answered."""
    s.on_new_request(made)
    assert s.get_num_new_matched_tokens(made, local) == (None, False)
    assert s.get_num_new_matched_tokens(made, local) == (None, False)
    s._session.asked.finish()
    return s.get_num_new_matched_tokens(made, local)


def ended(s: Any, made: Request) -> dict[str, Any]:
    """The request's reply params."""
    made.append_output_token_ids([7])
    finish(made)
    _, params = s.request_finished(made, ([7, 8, 9],))
    s._session.asked.finish()
    assert client(s).unfinished() == []
    assert len(s._reader.asker) == len(s._ledger) == 0
    return dict(params)


def check_it_asks_claims_pulls_and_tells_the_decode_engine() -> None:
    s = prefill()
    made = request(NAMED)
    assert answered(s, made) == (150, True)
    assert s.get_num_new_matched_tokens(made, 0) == (150, True)  # there was no room
    allocated(s, made, 150)
    (read,) = meta(s).reqs_to_recv.values()
    assert (read.remote.engine_id, read.remote.request_id) == ("d0", "c-1")
    assert read.remote.block_ids == [[1, 2, 3, 4, 5]]
    s.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    s._session.asked.finish()
    assert client(s).unfinished() == [], "finished as soon as it is read"
    params = ended(s, made)
    assert (params["do_remote_prefill"], params["remote_engine_id"]) == (True, "p0")
    assert (params["kvplane"]["outcome"], params["kvplane"]["reused_tokens"]) == ("pulled", 150)
    envelope = read_envelope(params)
    assert envelope is not None
    assert (envelope.key, envelope.turn, envelope.turn_index) == (KEY, 101, 3)
    decoder = scheduler("kv_consumer")
    assert decoder._envelope(SimpleNamespace(kv_transfer_params=params)) == envelope


def check_a_first_turn_is_told_on_too() -> None:
    s = prefill()
    client(s).locations.clear()
    made = request(NAMED)
    assert answered(s, made) == (0, False)
    allocated(s, made)
    params = ended(s, made)
    assert params["kvplane"]["detail"] == "unknown_conversation"
    assert read_envelope(params) is not None


def check_conversations_are_named_by_session_or_found_by_prompt() -> None:
    s = prefill()
    assert answered(s, request(STOCK, session_id="c")) == (150, True)
    s = prefill()
    client(s).by_prompt = client(s).locations.pop(KEY)
    assert answered(s, request(STOCK)) == (150, True)
    ((key, fingerprint),) = client(s).begun
    assert key == ConversationKey("default", "tiny", "")
    assert (fingerprint.chunk_tokens, len(fingerprint.chain)) == (64, 8 * 4)


def check_users_told_apart_by_a_salt_do_not_share_a_conversation() -> None:
    def key_of(**more: Any) -> ConversationKey:
        key = conversation_key("default", "tiny", request(more.pop("params", STOCK), **more))
        assert key is not None
        return key

    assert key_of(session_id="c") == KEY == key_of(params=NAMED)
    ours, theirs = (key_of(session_id="c", cache_salt=salt) for salt in ("us", "them"))
    assert len({KEY, ours, theirs}) == 3
    assert ours == key_of(params=NAMED, cache_salt="us")
    assert ours.conversation_id.startswith("c#")
    assert key_of(cache_salt="us").conversation_id == "", "found by its prompt, which the salt is part of"
    s = prefill()
    assert answered(s, request(STOCK, session_id="c", cache_salt="us")) == (0, False)
    assert KEY in client(s).locations


def check_a_router_of_ours_has_asked_already() -> None:
    s = prefill()
    made = request({**STOCK, "kvplane": {"router": True}})
    s.on_new_request(made)
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    allocated(s, made)
    assert read_envelope(ended(s, made)) is None
    assert client(s).begun == []


def check_what_the_own_cache_has_is_not_claimed() -> None:
    for local, outcome in ((160, "local_hit"), (96, "below_threshold")):
        s = prefill()
        made = request(NAMED)
        assert answered(s, made, local) == (0, False)
        allocated(s, made)
        params = ended(s, made)
        assert params["kvplane"]["outcome"] == outcome
        assert read_envelope(params) is not None
        assert client(s).granted == {}


def check_vllm_itself_would_not_read_for_prompt_logprobs() -> None:
    s = prefill()
    made = request(NAMED, sampling={"prompt_logprobs": 1})
    assert answered(s, made) == (0, False)
    assert client(s).granted == {}


def check_the_answer_is_not_waited_for_beyond_the_deadline() -> None:
    s = prefill(kvplane_ask_timeout_s=0.02)
    made = request(NAMED)
    s.on_new_request(made)
    assert s.get_num_new_matched_tokens(made, 0) == (None, False)
    time.sleep(0.03)
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    s._session.asked.finish()
    assert client(s).granted == {}
    allocated(s, made)
    assert ended(s, made)["kvplane"]["detail"] == "ask_timeout"


def check_it_can_be_turned_off_and_is_off_without_a_control_plane() -> None:
    s = prefill(kvplane_ask_timeout_s=0)
    made = request(NAMED)
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    s = prefill()
    s._session.attached = False
    made = request(NAMED)
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    allocated(s, made)
    assert ended(s, made)["kvplane"]["detail"] == "no_control_plane"


def check_what_was_asked_for_before_a_reset_is_not_pulled_after_it() -> None:
    for answers_first in (False, True):
        s = prefill()
        made = request(NAMED)
        if answers_first:
            assert answered(s, made) == (150, True)  # there is no room yet
            s.reset_cache()
        else:
            s.on_new_request(made)
            assert s.get_num_new_matched_tokens(made, 0) == (None, False)
            s.reset_cache()
            s._session.asked.finish()
        assert s.get_num_new_matched_tokens(made, 0) == (0, False)
        s._session.asked.finish()
        assert client(s).unfinished() == [], "its holder need not wait for the claim's end"
        allocated(s, made)
        params = ended(s, made)
        assert (params["kvplane"]["outcome"], params["kvplane"]["detail"]) == ("cold", "reset")
        assert read_envelope(params) is not None


def check_an_abort_at_any_moment_leaves_no_claim() -> None:
    for steps in range(7):
        s = prefill()
        made = request(NAMED)
        s.on_new_request(made)
        s.get_num_new_matched_tokens(made, 0)
        for _ in range(steps):
            if s._session.asked.running:
                s._session.asked.step()
        s.get_num_new_matched_tokens(made, 0)
        made.status = RequestStatus.FINISHED_ABORTED
        assert s.request_finished(made, ([],)) == (False, None)
        s._session.asked.finish()
        assert client(s).unfinished() == []
        assert len(s._reader.asker) == len(s._ledger) == 0


def check_an_abort_while_it_reads_finishes_the_claim_once_it_has_read() -> None:
    s = prefill()
    made = request(NAMED)
    answered(s, made)
    allocated(s, made, 150)
    made.status = RequestStatus.FINISHED_ABORTED
    s.request_finished(made, ([7, 8, 9],))
    s._session.asked.finish()
    assert len(client(s).unfinished()) == 1
    s.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    s._session.asked.finish()
    assert client(s).unfinished() == []
    assert len(s._reader.asker) == 0


def check_a_failed_read_is_computed_and_its_location_finished() -> None:
    s = prefill()
    made = request(NAMED)
    answered(s, made)
    allocated(s, made, 150)
    s.update_connector_output(KVConnectorOutput(finished_recving={"r"}, invalid_block_ids={7}))
    s._session.asked.finish()
    assert client(s).unfinished() == []
    assert s.get_num_new_matched_tokens(made, 0) == (0, False)
    allocated(s, made)
    report = ended(s, made)["kvplane"]
    assert (report["outcome"], report["reused_tokens"]) == ("failed", 0)
    assert s._reader.counts == {"read_failed": 1}


def check_a_waiting_request_asks_no_retained_blocks_back() -> None:
    s = prefill()
    made = request(NAMED)
    s.on_new_request(made)
    s.get_num_new_matched_tokens(made, 0)
    assert s._waiting is None
    s._session.asked.finish()


if __name__ == "__main__":
    sys.exit(run(globals(), compat.vllm_version))
