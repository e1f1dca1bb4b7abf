"""The three paths over whole conversations, and what is told about them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvplane.client.model import EngineRole, MissReason
from kvplane.router.policy import PathMode
from tests.fakes import kv
from tests.fakes.core import EngineConfig
from tests.router.rig import chat, expected_reply, long_text, rig, until


async def test_first_turn_is_cold_and_the_next_goes_direct() -> None:
    async with rig() as r:
        first = await r.say(long_text(200))
        assert (first.path, first.reason, first.reused) == ("cold", "unknown_conversation", "0")
        assert float(first.headers["x-kvplane-prefill-ms"]) > 0
        second = await r.say("and now")
        assert (second.path, second.reason) == ("direct", "new_text_short")
        assert int(second.reused or 0) >= 192
        assert len(r.p.requests) == 1
        # A direct turn is retained like any other.
        assert (await r.say("more")).path == "direct"


async def test_much_new_text_is_pulled() -> None:
    async with rig() as r:
        await r.say(long_text(300))
        reply = await r.say(long_text(5000, "new"))
        assert (reply.path, reply.reason) == ("pull", "pulled")
        assert int(reply.reused or 0) >= 256
        await until(lambda: r.plane.finished)
        owner, reader = r.plane.claim_requests[0]
        assert owner.startswith("router-")
        assert reader == r.p.engine_id


@pytest.mark.parametrize("path", ["cold", "pull", "direct"])
@pytest.mark.parametrize("by", ["header", "setting"])
async def test_a_path_can_be_forced(path: str, by: str) -> None:
    forced: dict[str, Any] = {"path": path} if by == "header" else {}
    settings: dict[str, Any] = {"path": PathMode(path)} if by == "setting" else {}
    async with rig(**settings) as r:
        await r.say(long_text(200), **forced)
        reply = await r.say("next", **forced)
        assert reply.path == path
        assert reply.reason == ("pulled" if path == "pull" else "forced")


async def test_the_header_counts_only_where_it_is_allowed() -> None:
    async with rig(allow_path_header=False) as r:
        await r.say(long_text(200))
        assert (await r.say("next", path="cold")).path == "direct"


async def test_a_wrong_path_header_is_a_400() -> None:
    async with rig() as r:
        reply = await r.post(chat("hello"), path="fastest")
        assert reply.status == 400
        assert reply.body["error"]["param"] == "x-kvplane-path"


async def test_edited_history_reuses_only_what_is_equal() -> None:
    async with rig() as r:
        r.said["c1"] = []
        await r.say(long_text(300))
        r.said["c1"][0] = "EDITED " + r.said["c1"][0]
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason, reply.reused) == ("pull", "mismatch", "0")
        # The other way round: direct, where the engine's own cache does the comparing.
        r.said["c1"][0] = "AGAIN " + r.said["c1"][0]
        assert (await r.say("next", path="direct")).path == "direct"


async def test_changed_history_is_not_sent_direct_when_it_is_long() -> None:
    async with rig() as r:
        await r.say(long_text(6000))
        r.said["c1"][0] = "EDITED " + r.said["c1"][0]
        assert (await r.say("next")).reason == "mismatch"


async def test_a_single_use_handle_has_one_reader() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        r.plane.refuse_claims = MissReason.CLAIMED
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason, reply.reused) == ("cold", "claim_lost", "0")
        handles = [b["kv_transfer_params"]["remote_block_ids"] for b in r.p.requests]
        assert handles == [None, None]


async def test_an_incompatible_reader_is_told_apart() -> None:
    async with rig() as r:
        await r.say(long_text(200))
        r.plane.refuse_claims = MissReason.INCOMPATIBLE_ENGINE
        assert (await r.say("next", path="pull")).reason == "incompatible_engine"


async def test_only_an_engine_that_verifies_is_told_to_pull() -> None:
    stock = EngineConfig(EngineRole.PREFILL, connector=False)
    async with rig(prefill=[stock]) as r:
        await r.say(long_text(200))
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason) == ("cold", "prefill_cannot_verify")


async def test_without_an_id_nothing_is_kept() -> None:
    async with rig(identity_sources=("conversation_id",)) as r:
        reply = await r.post(chat("hello", conversation=None))
        assert (reply.path, reply.reason, reply.reused) == ("cold", "no_conversation_id", "0")
        # Nobody has looked how long it is.
        assert not {"x-kvplane-new-tokens", "x-kvplane-expected-tokens"} & reply.headers.keys()
        assert "kvplane" not in r.d.requests[0]["kv_transfer_params"]
        assert not r.plane.locations
        assert not r.plane.calls["begin_turn"]


async def test_first_token_ends_the_reply_case_20() -> None:
    async with rig() as r:
        body = chat(long_text(100) + " " + kv.STOP_WORD)
        reply = await r.post(body)
        assert reply.status == 200
        assert reply.text == ""
        params = r.d.requests[0]["kv_transfer_params"]
        assert {name: params[name] for name in ("do_remote_prefill", "do_remote_decode")} == {
            "do_remote_prefill": False,
            "do_remote_decode": False,
        }
        assert params["kvplane"]["conversation_id"] == "c1"
        assert "remote_block_ids" not in params
        assert (await r.metric("kvplane_router_prefill_without_params_total"))[""] == 1
        # The same while pulling: the claimed params never go on to the decode engine.
        r.said["c1"] = [body["messages"][0]["content"], reply.text]
        again = await r.post(chat(*r.said["c1"], "x " + kv.STOP_WORD), path="pull")
        assert again.status == 200
        assert "remote_block_ids" not in r.d.requests[1]["kv_transfer_params"]


async def test_envelope_tells_the_decode_engine_whose_turn_it_is() -> None:
    async with rig(tenant_id="acme") as r:
        await r.post(chat("hello", conversation="c9"))
        envelope = r.d.requests[0]["kv_transfer_params"]["kvplane"]
        turn = envelope.pop("turn")
        assert turn > 0
        assert envelope == {
            "tenant_id": "acme",
            "model": "fake",
            "adapter": "",
            "conversation_id": "c9",
            "endpoint": r.d.url,
            "turn_index": 1,
        }


async def test_no_own_field_reaches_an_engine_and_no_params_a_client_case_33() -> None:
    async with rig() as r:
        body = chat("hello", kv_transfer_params={"remote_host": "10.0.0.1"}, conversation=None)
        reply = await r.post({**body, "conversation_id": "c1", "session_id": "s"})
        assert "kv_transfer_params" not in reply.body
        for leg in (r.p.requests[0], r.d.requests[0]):
            assert "conversation_id" not in leg
            assert leg["session_id"] == "s"
            assert leg["kv_transfer_params"].get("remote_host") != "10.0.0.1"


async def test_tenants_models_and_ids_are_apart_case_32() -> None:
    async with rig(decode=[EngineConfig(EngineRole.DECODE, model="fake")]) as r:
        await r.say(long_text(100), "one")
        assert (await r.post(chat("hi", conversation="two"))).reason == "unknown_conversation"


async def test_many_turns_at_once_each_get_their_own_answer() -> None:
    async with rig(prefill=2, decode=2) as r:

        async def conversation(name: str) -> None:
            for turn in range(4):
                await r.say(long_text(80, f"{name}.{turn}."), name, path=("pull", "auto")[turn % 2])

        await asyncio.gather(*(conversation(f"c{index}") for index in range(12)))


async def test_a_rank_behind_a_shared_address_gets_its_turns_case_36() -> None:
    config = EngineConfig(EngineRole.DECODE, data_parallel_rank=3)
    async with rig(decode=[config]) as r:
        await r.say(long_text(100))
        await r.say("next", headers={"X-data-parallel-rank": "1"})
        ranks = [headers.get("X-data-parallel-rank") for headers in r.d.headers]
        assert ranks == [None, "3"]


async def test_decoder_pressure_is_agreed_with_the_plane() -> None:
    small = EngineConfig(EngineRole.DECODE, total_blocks=60)
    async with rig(decode=[small]) as r:
        for index in range(20):
            body = chat(long_text(150, f"c{index}."), conversation=f"c{index}")
            reply = await r.post(body)
            assert reply.text == expected_reply(body)
        assert len(r.plane.locations) < 8


async def test_what_is_kept_leaves_room_for_requests_whatever_the_control_plane_says() -> None:
    """Fake engines, as the real one: full of conversations when the control plane goes, they still serve."""
    small = EngineConfig(EngineRole.DECODE, total_blocks=60)
    async with rig(decode=[small]) as r:
        for index in range(10):
            await r.say(long_text(150, f"c{index}."), f"c{index}")
        r.plane.down = True
        for index in range(10):
            await r.say(long_text(150, f"d{index}."), f"d{index}")


async def test_completions_too() -> None:
    async with rig() as r:
        prompt = long_text(200)
        for extra, path in (("", "cold"), (" and more", "direct")):
            body = {"model": "fake", "prompt": prompt + extra, "max_tokens": 4, "conversation_id": "c"}
            reply = await r.post(body, to="/v1/completions")
            assert reply.path == path
            text = reply.body["choices"][0]["text"]
            assert text == expected_reply(body)
            prompt += extra + " " + text


async def test_a_prefill_engine_that_does_not_read_from_the_holder_now_says_so() -> None:
    p = EngineConfig(EngineRole.PREFILL, prefix_caching=False, reads_refused="peer_breaker")
    async with rig(prefill=[p]) as r:
        await r.say(long_text(200))
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason, reply.reused) == ("pull", "peer_breaker", "0")


async def test_a_prefill_engine_that_has_it_all_pulls_nothing() -> None:
    async with rig(prefill=[EngineConfig(EngineRole.PREFILL)]) as r:
        await r.say(long_text(200))
        reply = await r.say("next", path="pull")
        assert (reply.path, reply.reason, reply.reused) == ("pull", "below_threshold", "0")
        # It told the decode engine so, which keeps the newer turn only.
        assert len(r.d.held) == 1
