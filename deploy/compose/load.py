"""Conversations with fake engines through the whole topology, each answer checked word by word."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.fakes import kv

_TURNS = 6
_PAUSE_S = 0.05
_DEADLINE_S = 120.0
_STREAMED = 0.75
"""Share of requests that are streamed."""
_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Tally:
    """What became of the requests.

    Attributes:
        requests: answered or not, streams included.
        streams: those that were streamed.
        failed: no answer, or another status than 200; one line each.
        broken: streams that began and did not come to their end.
        wrong: answers to another prompt than the one sent.
        paths: how requests were served, by the router's word.
        open_streams: streams under way now.
        slowest_s: longest wait for an answer's first byte.
    """

    requests: int = 0
    streams: int = 0
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    paths: Counter[str] = field(default_factory=Counter)
    open_streams: int = 0
    slowest_s: float = 0.0

    @property
    def clean(self) -> bool:
        """Whether something was asked, and everything was answered whole and right."""
        return self.requests > 0 and not (self.failed or self.broken or self.wrong)

    def report(self) -> str:
        """Return the figures for people."""
        paths = ", ".join(f"{name} {count}" for name, count in self.paths.most_common())
        lines = [
            f"requests {self.requests} ({self.streams} streamed; {paths})",
            f"slowest first byte {self.slowest_s:.2f} s",
            f"failed {len(self.failed)}, broken streams {len(self.broken)}, wrong answers {len(self.wrong)}",
        ]
        return "\n".join([*lines, *self.failed[:5], *self.broken[:5], *self.wrong[:5]])


def expected(body: dict[str, Any]) -> str:
    """Return what a fake engine says to a request, whatever way it was served."""
    last, words = kv.chain(kv.prompt_tokens(body))[-1], list[str]()
    for _ in range(body["max_tokens"]):
        token = kv.reply_token(last)
        words.append(kv.word_of(token))
        last = kv.next_kv(last, token)
    return " ".join(words)


class Load:
    """`conversations` at a time against the router at `url`, until `ending` is set."""

    def __init__(self, url: str, conversations: int, seed: int = 1) -> None:
        self.tally = Tally()
        self.ending = asyncio.Event()
        self._url = f"{url}/v1/chat/completions"
        self._conversations = conversations
        self._seed = seed

    async def run(self) -> None:
        """Talk. Returns when the last answer has come."""
        limits = aiohttp.ClientTimeout(total=_DEADLINE_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=limits, connector=connector) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._conversations):
                group.create_task(self._talk(http, number))

    async def _talk(self, http: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        conversation, messages = 0, list[dict[str, str]]()
        while not self.ending.is_set():
            if len(messages) >= 2 * _TURNS:
                conversation, messages = conversation + 1, []
            text = " ".join(f"w{chance.randrange(100_000)}" for _ in range(chance.randint(5, 150)))
            messages.append({"role": "user", "content": text})
            body = {
                "model": "fake",
                "conversation_id": f"{number}-{conversation}",
                "messages": messages,
                "max_tokens": chance.randint(5, 60),
                "stream": chance.random() < _STREAMED,
            }
            reply = await self._ask(http, body)
            if reply is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": reply})
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> str | None:
        """Ask once, as a client that repeats nothing; return the answer if it is good."""
        tally, streamed = self.tally, body["stream"]
        tally.requests += 1
        tally.streams += streamed
        tally.open_streams += streamed
        began, answered = time.monotonic(), False
        try:
            async with http.post(self._url, json=body) as response:
                tally.slowest_s = max(tally.slowest_s, time.monotonic() - began)
                if response.status != 200:
                    tally.failed.append(f"{response.status}: {(await response.text())[:200]}")
                    return None
                answered = True
                tally.paths[response.headers.get("x-kvplane-path", "none")] += 1
                text = _text(await response.read(), streamed=streamed)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            (tally.broken if answered and streamed else tally.failed).append(repr(error))
            return None
        finally:
            tally.open_streams -= streamed
        if text is None:
            tally.broken.append("a stream ended before [DONE]")
        elif text != expected(body):
            tally.wrong.append(f"{body['conversation_id']}: {text[:80]}")
        else:
            return text
        return None


def _text(data: bytes, *, streamed: bool) -> str | None:
    """Return an answer's words; None for a stream without its end."""
    if not streamed:
        return str(json.loads(data)["choices"][0]["message"]["content"])
    if not data.endswith(_DONE):
        return None
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one.get("choices"))
