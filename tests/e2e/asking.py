"""Turns asked by token-exact clients: of the router, of an engine alone, or by a router of the test's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvplane.client.model import Location
from tests.e2e.edits import History, chat, tokens
from tests.e2e.truth import Circumstances

_NOTHING_TO_PULL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NotAnsweredError(Exception):
    """A request came back with an error; the text has status and body."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: the reply in text and token ids, the prompt's token ids, and how it was served."""

    text: str
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    path: str = ""
    reason: str = ""
    reused_tokens: int | None = None
    gaps: tuple[float, ...] = ()
    """Between the logprobs of the two best tokens, by place in the reply."""

    def gap_at(self, place: int) -> float | None:
        """Return the gap at a place of the reply, None beyond its end."""
        return self.gaps[place] if place < len(self.gaps) else None


@dataclass(frozen=True, slots=True)
class Question:
    """One request: a history under its circumstances, over the API it is held in."""

    history: History
    as_tokens: bool
    circumstances: Circumstances
    max_tokens: int = 8

    @property
    def path(self) -> str:
        """The API's path."""
        return "/v1/completions" if self.as_tokens else "/v1/chat/completions"

    def body(self, **more: object) -> dict[str, Any]:
        """Return the request's body, greedy and of fixed length."""
        prompt: dict[str, Any] = {"messages": chat(self.history), "logprobs": True, "top_logprobs": 2}
        if self.as_tokens:
            prompt = {"prompt": tokens(self.history), "logprobs": 2}
        salt = {"cache_salt": self.circumstances.salt} if self.circumstances.salt else {}
        return {
            "model": self.circumstances.model,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **prompt,
            **salt,
            **more,
        }


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    question: Question,
    *,
    headers: Mapping[str, str] | None = None,
    **more: object,
) -> Reply:
    """Ask and read the answer. Raises NotAnsweredError unless it is 200."""
    return _reply(*await _post(session, f"{url}{question.path}", question.body(**more), headers or {}))


async def ask_with_offer(
    session: aiohttp.ClientSession, prefill_url: str, decode_url: str, question: Question, location: Location
) -> Reply:
    """Serve a turn as a careless router might: offer the location to whatever request comes.

    The reply's `reason` and `reused_tokens` are what the prefill engine reports.
    """
    fingerprint = location.fingerprint
    offer = {
        **json.loads(location.kv_transfer_params),
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "kvplane": {
            "fingerprint": {"chunk_tokens": fingerprint.chunk_tokens, "chain": fingerprint.chain.hex()},
            "token_count": location.token_count,
        },
    }
    first, _ = await _post(
        session,
        f"{prefill_url}{question.path}",
        {**question.body(), "max_tokens": 1, "kv_transfer_params": offer},
        {},
    )
    params = dict(first["kv_transfer_params"])
    report = params.pop("kvplane")
    answer, headers = await _post(
        session, f"{decode_url}{question.path}", question.body(kv_transfer_params=params), {}
    )
    reply = _reply(answer, headers)
    return Reply(
        reply.text, reply.tokens, reply.prompt, "pull", report["outcome"], int(report["reused_tokens"])
    )


async def prefilled(
    session: aiohttp.ClientSession,
    prefill_url: str,
    path: str,
    body: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Have P compute a prompt, as the plainest proxy does; returns the params that go to D as they are.

    `params` are more members of P's kv_transfer_params.
    """
    leg = {**body, "max_tokens": 1, "kv_transfer_params": {**_NOTHING_TO_PULL, **(params or {})}}
    answer, _ = await _post(session, f"{prefill_url}{path}", leg, {})
    return dict(answer["kv_transfer_params"])


async def _post(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> tuple[dict[str, Any], Mapping[str, str]]:
    async with session.post(url, json=body, headers=headers) as answer:
        raw = await answer.read()
        if answer.status != 200:
            raise NotAnsweredError(f"{answer.status} from {url}: {raw[:500].decode(errors='replace')}")
        parsed: dict[str, Any] = json.loads(raw)
        return parsed, answer.headers


def _reply(answer: Mapping[str, Any], headers: Mapping[str, str]) -> Reply:
    (choice,) = answer["choices"]
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids") or ()
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    logprobs = choice.get("logprobs") or {}
    best = [[top["logprob"] for top in entry["top_logprobs"]] for entry in logprobs.get("content") or ()]
    best = best or [list(top.values()) for top in logprobs.get("top_logprobs") or ()]
    path, reused = headers.get("x-kvplane-path", ""), headers.get("x-kvplane-reused-tokens")
    return Reply(
        text=text or "",
        tokens=tuple(choice["token_ids"]),
        prompt=tuple(prompt),
        path=path,
        reason=headers.get("x-kvplane-reason", ""),
        reused_tokens=int(reused) if reused is not None else None,
        gaps=tuple(sorted(top)[-1] - sorted(top)[-2] if len(top) > 1 else 0.0 for top in best),
    )
