"""The OpenAI and Anthropic SDKs as they are, on every API: streams, tools, reasoning, parts, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import anthropic
import openai
import pydantic
import pytest

from tests.router.rig import Rig, expected_reply, long_text, rig

C = TypeVar("C", openai.AsyncOpenAI, anthropic.AsyncAnthropic)
IMAGE = "data:image/png;base64,iVBORw0KGgo="
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@asynccontextmanager
async def _client(make: Callable[..., C], url: str) -> AsyncIterator[C]:
    # SDKs look at files of the machine while they are set up.
    client = await asyncio.to_thread(make, base_url=url, api_key="none", max_retries=0)
    async with client:
        yield client


def openai_sdk(r: Rig) -> Any:
    return _client(openai.AsyncOpenAI, f"{r.url}/v1")


def anthropic_sdk(r: Rig) -> Any:
    return _client(anthropic.AsyncAnthropic, r.url)


def reply_to(messages: list[Any], limit: int = 6) -> str:
    return expected_reply({"messages": messages, "max_tokens": limit})


# Chat Completions


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat_with_tools(stream: bool) -> None:
    async with rig() as r, openai_sdk(r) as client:
        messages: list[Any] = [{"role": "user", "content": long_text(100)}]
        for path in ("cold", "direct"):
            asked = client.chat.completions.with_raw_response.create(
                model="fake",
                messages=messages,
                max_completion_tokens=6,
                tools=[{"type": "function", "function": WEATHER}],
                tool_choice="required",
                stream=stream,
            )
            raw = await asked
            assert raw.headers["x-kvplane-path"] == path
            said, ends = "", None
            calls: list[Any] = []
            if stream:
                async for chunk in raw.parse():
                    for choice in chunk.choices:
                        said += choice.delta.content or ""
                        calls += choice.delta.tool_calls or []
                        ends = choice.finish_reason or ends
            else:
                choice = raw.parse().choices[0]
                said, calls, ends = choice.message.content, choice.message.tool_calls, choice.finish_reason
            assert ends == "tool_calls"
            assert calls[0].function.arguments == '{"city": "Oslo"}'
            call = {"name": "weather", "arguments": calls[0].function.arguments}
            called = [{"id": "call_1", "type": "function", "function": call}]
            messages += [
                {"role": "assistant", "content": said, "tool_calls": called},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ]


async def test_openai_chat_with_logprobs_choices_and_reasoning() -> None:
    async with rig() as r, openai_sdk(r) as client:
        completion = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=4,
            n=2,
            logprobs=True,
            top_logprobs=2,
            reasoning_effort="low",
        )
        assert len(completion.choices) == 2
        for choice in completion.choices:
            assert [token.logprob for token in choice.logprobs.content] == [-0.5] * 4
            assert choice.message.reasoning == "let me think"
        assert not r.p.requests


async def test_openai_chat_with_parts_and_a_schema() -> None:
    class City(pydantic.BaseModel):
        name: str

    async with rig() as r, openai_sdk(r) as client:
        parts = [
            {"type": "text", "text": "what is this"},
            {"type": "image_url", "image_url": {"url": IMAGE}},
        ]
        with pytest.raises(openai.LengthFinishReasonError):
            # What the fake was asked for is what counts.
            await client.chat.completions.parse(
                model="fake", messages=[{"role": "user", "content": parts}], response_format=City
            )
        for leg in (r.p.requests[0], r.d.requests[0]):
            assert leg["response_format"]["json_schema"]["name"] == "City"
            assert leg["messages"][0]["content"] == parts


# Responses


async def test_openai_responses_and_their_history() -> None:
    async with rig() as r, openai_sdk(r) as client:
        items: list[Any] = [{"role": "user", "content": long_text(100)}]
        for path in ("cold", "direct", "direct"):
            raw = await client.responses.with_raw_response.create(
                model="fake",
                input=items,
                instructions="be brief",
                max_output_tokens=6,
                reasoning={"effort": "low"},
                tools=[{"type": "function", **WEATHER, "strict": False}],
            )
            response = raw.parse()
            assert raw.headers["x-kvplane-path"] == path
            expected = [
                {"role": "system", "content": "be brief"},
                *(item for item in items if item.get("role")),
            ]
            body = {"messages": expected, "max_tokens": 6, "tools": r.d.requests[-1]["tools"]}
            assert response.output_text == expected_reply(body)
            assert response.output[0].type == "reasoning"
            assert response.usage.output_tokens == 6
            said = {"role": "assistant", "content": response.output_text}
            items += [said, {"role": "user", "content": "and?"}]


async def test_openai_responses_stream() -> None:
    async with rig() as r, openai_sdk(r) as client:
        items: list[Any] = [{"role": "user", "content": long_text(100)}]
        for _ in range(2):
            async with client.responses.stream(
                model="fake", input=items, max_output_tokens=6, tool_choice="required"
            ) as stream:
                said = "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])
                final = await stream.get_final_response()
            assert said == final.output_text == reply_to(items)
            assert [item.type for item in final.output] == ["message", "function_call"]
            items += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
        assert len(r.p.requests) == 1


async def test_openai_responses_by_previous_id() -> None:
    async with rig(decode=3) as r, openai_sdk(r) as client:
        previous = None
        for index in range(4):
            response = await client.responses.create(
                model="fake", input=f"hello {index}", max_output_tokens=6, previous_response_id=previous
            )
            stored = await client.responses.retrieve(response.id)
            assert stored.output_text == response.output_text
            previous = response.id
        assert sum(bool(engine.requests) for engine in r.decode) == 1


# Other things OpenAI's SDK asks for


async def test_openai_models_and_embeddings() -> None:
    async with rig() as r, openai_sdk(r) as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
        embeddings = await client.embeddings.create(model="fake", input="x", encoding_format="float")
        assert embeddings.data[0].embedding == [0.5, 1.0]


async def test_openai_errors_are_its_own() -> None:
    async with rig() as r, openai_sdk(r) as client:
        said: Any = [{"role": "user", "content": "x"}]
        asks: list[Callable[..., Any]] = [
            partial(client.responses.create, input="x"),
            partial(client.chat.completions.create, messages=said),
        ]
        for ask in asks:
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await ask(model="other")
            with pytest.raises(openai.BadRequestError, match="conversation_id must be"):
                await ask(model="fake", extra_body={"conversation_id": []})
            r.d.faults += ["500", "500"]
            with pytest.raises(openai.InternalServerError, match="decode engine failed"):
                await ask(model="fake")
            r.p.faults.append("429")
            with pytest.raises(openai.RateLimitError, match="fault 429"):
                await ask(model="fake")
            r.d.faults += ["error_stream", "error_stream"]
            with pytest.raises(openai.InternalServerError):
                await ask(model="fake", stream=True)


# Messages


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages_with_tools(stream: bool) -> None:
    tool = {"name": "weather", "input_schema": WEATHER["parameters"]}
    async with rig() as r, anthropic_sdk(r) as client:
        messages: list[Any] = [{"role": "user", "content": long_text(100)}]
        told: list[Any] = [{"role": "system", "content": "be brief"}, *messages]
        for _ in range(3):
            asked = {
                "model": "fake",
                "system": "be brief",
                "messages": messages,
                "max_tokens": 6,
                "tools": [tool],
                "tool_choice": {"type": "any"},
            }
            if stream:
                async with client.messages.stream(**asked) as events:
                    said = "".join([text async for text in events.text_stream])
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
                said = message.content[0].text
            assert message.stop_reason == "tool_use"
            assert message.content[-1].input == {"city": "Oslo"}
            body = {"messages": told, "max_tokens": 6, "tools": r.d.requests[-1]["tools"]}
            assert said == message.content[0].text == expected_reply(body)
            assert message.usage.output_tokens == 6
            result = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}
            messages += [
                {"role": "assistant", "content": [part.model_dump() for part in message.content]},
                {"role": "user", "content": [result]},
            ]
            told = [{"role": "system", "content": "be brief"}]
            told += [
                {**m, "content": [p for p in m["content"] if "text" in p]}
                if isinstance(m["content"], list)
                else m
                for m in messages
            ]
        # A reply without an id of a conversation, three times, and one prompt computed.
        assert len(r.p.requests) == 1
        assert {leg["max_tokens"] for leg in r.p.requests} == {1}


async def test_anthropic_thinking_parts_and_counts() -> None:
    async with rig() as r, anthropic_sdk(r) as client:
        source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": "what is this"}]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        message = await client.messages.create(
            model="fake",
            max_tokens=2048,
            messages=[{"role": "user", "content": parts}],
            thinking=thinking,
            stop_sequences=["x"],
        )
        assert [part.type for part in message.content] == ["thinking", "text"]
        for leg in (r.p.requests[0], r.d.requests[0]):
            assert leg["messages"][0]["content"] == parts
            assert leg["thinking"] == thinking
        counted = await client.messages.count_tokens(
            model="fake", messages=[{"role": "user", "content": "x"}]
        )
        assert counted.input_tokens == 7


async def test_anthropic_errors_are_its_own() -> None:
    async with rig() as r, anthropic_sdk(r) as client:

        async def ask(**more: Any) -> Any:
            messages = [{"role": "user", "content": "x"}]
            return await client.messages.create(
                **{"model": "fake", "max_tokens": 6, **more}, messages=messages
            )

        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await ask(model="other")
        with pytest.raises(anthropic.BadRequestError, match="conversation_id must be"):
            await ask(extra_body={"conversation_id": 5})
        r.d.faults += ["500", "500"]
        with pytest.raises(anthropic.InternalServerError, match="decode engine failed"):
            await ask()
        r.p.faults.append("429")
        with pytest.raises(anthropic.RateLimitError, match="fault 429"):
            await ask()
        r.d.faults += ["error_stream", "error_stream"]
        with pytest.raises(anthropic.InternalServerError):
            await ask(stream=True)
