"""Requests that name no conversation: found by their history, on any router, without taking from others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.app import APIS
from kvplane.router.history import Trace, trace
from kvplane.router.response_id import new_response_id, read_response_id
from tests.router.rig import Rig, chat, expected_reply, long_text, rig
from tests.router.test_clients import real_plane
from tests.router.test_surface import EVERY, RESPONSES, Wire

CHAT_API = APIS["/v1/chat/completions"]
Body = dict[str, Any]


def nameless(*turns: str, **more: Any) -> Body:
    return chat(*turns, conversation=None, **more)


async def ask(r: Rig, *turns: str, path: str | None = None, to: Rig | None = None, **more: Any) -> Any:
    body = nameless(*turns, **more)
    reply = await (to or r).post(body, path=path)
    assert reply.status == 200, reply.body
    assert reply.text == expected_reply(body)
    return reply


@pytest.mark.parametrize("path", [None, "pull", "direct"])
async def test_every_turn_after_the_first_reuses(path: str | None) -> None:
    async with rig() as r:
        said = [long_text(200)]
        reply = await ask(r, *said, path=path)
        assert (reply.path, reply.reason) == ("cold", "unknown_conversation")
        for index in range(5):
            said += [reply.text, f"and then {index}"]
            reply = await ask(r, *said, path=path)
            assert reply.path == (path or "direct")
            assert int(reply.reused or 0) > 190


@EVERY
async def test_every_api_finds_its_history(api: Wire) -> None:
    async with rig() as r:
        said = [long_text(200)]
        for wanted in ("cold", "direct", "direct"):
            body = api.ask(*said)
            del body["conversation_id"]
            reply = await r.post(body, to=api.path)
            assert (reply.status, reply.path) == (200, wanted)
            said += [api.text(reply.body), "next"]


async def test_several_routers_find_what_another_began() -> None:
    async with real_plane() as (_, plane), rig(plane=plane) as r:
        urls: dict[str, Any] = {
            "prefill_urls": tuple(e.url for e in r.prefill),
            "decode_urls": tuple(e.url for e in r.decode),
        }
        async with rig(plane=plane, prefill=0, decode=0, static=False, **urls) as other:
            said = [long_text(200)]
            for index in range(6):
                reply = await ask(r, *said, to=other if index % 2 else r)
                assert reply.path == ("direct" if index else "cold"), reply.reason
                said += [reply.text, "next"]


async def test_the_next_turn_may_come_at_once() -> None:
    async with real_plane() as (_, plane), rig(plane=plane) as r:
        said, paths = [long_text(100)], []
        for _ in range(20):
            reply = await ask(r, *said)
            paths.append(reply.path)
            said += [reply.text, "on"]
        assert paths == ["cold"] + ["direct"] * 19


async def test_branches_both_find_where_they_came_from() -> None:
    async with rig() as r:
        first = await ask(r, long_text(200))
        root = (long_text(200), first.text)
        left = [*root, "left"]
        right = [*root, "right"]
        for _ in range(3):
            for branch in (left, right):
                reply = await ask(r, *branch)
                assert reply.path == "direct"
                assert int(reply.reused or 0) > 190
                branch += [reply.text, "more"]
        # The newest turn of each is kept, the other's never replaced it.
        assert len({location.request_id for location in r.plane.locations.values()}) == 7


async def test_of_two_branches_that_pull_one_wins_and_none_breaks_case_15() -> None:
    async with rig() as r:
        first = await ask(r, long_text(200))
        root = (long_text(200), first.text)
        replies = await asyncio.gather(
            *(ask(r, *root, word, path="pull") for word in ("left", "right", "straight"))
        )
        assert sorted(reply.reason for reply in replies).count("pulled") == 1
        handles = [
            leg["kv_transfer_params"].get("remote_request_id")
            for leg in r.p.requests
            if leg["kv_transfer_params"].get("remote_request_id")
        ]
        assert len(handles) == len(set(handles)) == 1


async def test_a_regenerated_turn_takes_nothing_from_the_first_answer() -> None:
    async with rig() as r:
        first = await ask(r, long_text(200))
        turn = (long_text(200), first.text, "tell me")
        one = await ask(r, *turn)
        kept = set(r.plane.locations)
        again = await ask(r, *turn)
        assert again.path == "direct"
        assert kept < set(r.plane.locations)
        # Said again where it cannot be used in place: computed, not taken away.
        forced = await ask(r, *turn, path="pull")
        assert not r.plane.claims or forced.reason != "pulled" or kept <= set(r.plane.locations)
        reply = await ask(r, *turn, one.text, "go on")
        assert (reply.path, int(reply.reused or 0) > 190) == ("direct", True)


async def test_two_users_with_one_first_prompt_do_not_fight() -> None:
    prompt = long_text(200)
    async with rig() as r:
        one = await ask(r, prompt)
        two = await ask(r, prompt)
        assert len(r.plane.locations) == 2
        # Its prompt is in the first one's blocks, which it uses in place.
        assert (one.path, two.path) == ("cold", "direct")
        third = await ask(r, prompt, path="pull")
        assert (third.path, third.reason) == ("cold", "same_prompt")
        for name in ("a", "b"):
            reply = await ask(r, prompt, one.text, f"I am {name}", path="pull")
            assert (reply.path, reply.reason) == ("pull", "pulled")
        assert r.plane.claim_requests


async def test_one_prompt_sent_by_many_takes_bounded_places() -> None:
    async with rig() as r:
        for _ in range(7):
            await ask(r, long_text(200))
        assert len(r.plane.locations) == 4


async def test_without_that_source_nothing_is_kept() -> None:
    async with rig(identity_sources=("conversation_id",)) as r:
        for _ in range(2):
            reply = await ask(r, "hello")
            assert (reply.path, reply.reason) == ("cold", "no_conversation_id")
        assert not r.plane.locations
        assert (await r.post(chat("hello"))).reason == "unknown_conversation"


async def test_sources_are_asked_in_the_order_that_is_set() -> None:
    async with rig(identity_sources=("header:X-Thread", "session_id")) as r:
        for body, headers, name in (
            (chat("hello", session_id="s"), {"X-Thread": "t"}, "t"),
            (chat("hello", session_id="s"), {"X-Session-ID": "x"}, "s"),
        ):
            await r.post(body, headers=headers)
            assert name in {key.conversation_id for key in r.plane.locations}


@pytest.mark.parametrize(
    "sources", [("nothing",), ("header:",), ("header:a b",), ("session_id", "session_id")]
)
async def test_sources_that_are_none_are_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--identity"):
        async with rig(identity_sources=sources):
            pass


async def test_previous_response_id_is_mapped_to_its_root_and_its_engine() -> None:
    async with rig(decode=3) as r:
        body = {"model": "fake", "input": long_text(200), "max_output_tokens": 6, "store": True}
        reply = await r.post(body, to=RESPONSES.path)
        holder = next(e for e in r.decode if e.requests)
        for _ in range(3):
            response_id = reply.body["id"]
            assert holder.stored[response_id]
            body = body | {"input": "next", "previous_response_id": response_id}
            reply = await r.post(body, to=RESPONSES.path)
            assert (reply.status, reply.path, reply.reason) == (200, "direct", "stored_response")
        roots = {read_response_id(name).root for name in holder.stored}  # type: ignore[union-attr]
        assert len(roots) == 1
        assert [e for e in r.decode if e.requests] == [holder]
        await holder.stop()
        gone = await r.post(body, to=RESPONSES.path)
        assert gone.status == 503


async def test_an_id_that_the_client_chose_for_a_response_stays() -> None:
    async with rig() as r:
        body = {"model": "fake", "input": "hello", "max_output_tokens": 6, "request_id": "resp_mine"}
        assert (await r.post(body, to=RESPONSES.path)).body["id"] == "resp_mine"
        assert "request_id" not in r.p.requests[0]
        for harmful in ("resp_" + "x" * 124, "", "resp_\n", "résp"):
            body["request_id"] = harmful
            assert read_response_id((await r.post(body, to=RESPONSES.path)).body["id"])


def test_ids_of_responses_are_read_back() -> None:
    first = new_response_id("http://d", "")
    root = read_response_id(first)
    assert root is not None
    again = read_response_id(new_response_id("http://d", root.root))
    assert again == root
    for other in (None, 5, "", "resp_1", first + "\n", first.upper()):
        assert read_response_id(other) is None


# Traces


def traced(*messages: Body, headers: dict[str, str] | None = None, **more: Any) -> Trace:
    found = trace(CHAT_API.history({"messages": list(messages)}), more, headers or {})
    assert found is not None
    return found


def user(content: object) -> Body:
    return {"role": "user", "content": content}


def model(content: object, **more: Any) -> Body:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"role": "tool", "tool_call_id": "1", "content": "7"}


def test_a_turn_is_found_under_the_name_of_the_one_before() -> None:
    one = traced(SYSTEM, user("a"))
    assert one.before is None
    two = traced(SYSTEM, user("a"), model("whatever"), user("b"))
    assert two.before == one.own != two.own
    three = traced(SYSTEM, user("a"), model("x"), user("b"), model(None, tool_calls=[{"id": "1"}]), TOOL)
    assert three.before == two.own
    four = traced(
        SYSTEM, user("a"), model("x"), user("b"), model(None), TOOL, model("y"), user("c"), user("d")
    )
    assert four.before == three.own


def test_what_a_client_does_to_replies_changes_nothing() -> None:
    one = traced(user("a"), model("<think>so</think> yes"), user("b"))
    assert one == traced(user("a"), model(" yes"), user("b"))
    assert one == traced(user("a"), model(None), model("yes"), user("b"))


def test_a_reply_to_be_continued_is_of_the_same_turn() -> None:
    assert (
        traced(user("a"), model("and so")).before
        == traced(user("a")).own
        == traced(user("a"), model("x")).own
    )


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "a"}],
        [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        [{"type": "input_text", "text": "a"}],
    ],
)
def test_the_same_text_in_parts_is_the_same(content: Any) -> None:
    assert traced(user(content)) == traced(user("a"))


def test_what_tells_users_apart_tells_their_turns_apart() -> None:
    names = {
        traced(user("a")).own,
        traced(user("a"), user="u").own,
        traced(user("a"), safety_identifier="u").own,
        traced(user("a"), cache_salt="u").own,
        traced(user("a"), metadata={"user_id": "u"}).own,
        traced(user("a"), headers={"Authorization": "Bearer u"}).own,
        traced(user("a"), headers={"x-api-key": "u"}).own,
        traced(SYSTEM, user("a")).own,
        traced(user(["a"])).own,
        traced(user([{"type": "image_url", "image_url": {"url": "x"}}, {"text": "a"}])).own,
        traced(user("a"), user("")).own,
        traced(user("aa")).own,
    }
    assert len(names) == 11  # A list of one string is that string.


def test_where_nobody_has_said_anything_there_is_no_name() -> None:
    for messages in ([], [SYSTEM], [SYSTEM, model("hello")], [{"role": 5}], ["x"]):
        assert trace(CHAT_API.history({"messages": messages}), {}, {}) is None
    assert trace(APIS["/v1/completions"].history({"prompt": "x"}), {}, {}) is None


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=3)), max_size=8))
def test_each_turn_finds_the_one_before_whatever_was_said(said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in said] + [user("x")]
    one = traced(*messages)
    two = traced(*messages, model("reply"), user("next"))
    assert two.before == one.own
    assert two.own not in (one.own, one.before)
