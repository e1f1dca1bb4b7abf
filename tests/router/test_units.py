"""Identity, policy, settings, bodies and what is learned, without any engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.client.logs import hashed
from kvplane.client.model import ConversationKey
from kvplane.router import openai
from kvplane.router.app import APIS
from kvplane.router.chat import ChatCompletions, Completions
from kvplane.router.identity import IdentityError, conversation_id, tenant_of
from kvplane.router.learned import Average, Memory, RateBook
from kvplane.router.policy import Holder, Path, PathMode, Rates, Thresholds, TurnFacts, decide
from kvplane.router.settings import RouterSettings, SettingsError, engine_url
from kvplane.router.tenancy.caller import Caller

CHAT, COMPLETIONS = ChatCompletions(), Completions()
KEY = ConversationKey("t", "m", "c")
LIMITS = Thresholds()
HELD = TurnFacts(1000, held_tokens=900, holder=Holder(True))
CHANGED = replace(HELD, history_changed=True)


# Identity


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"conversation_id": "a", "conversation": "b"}, {"X-Session-ID": "z"}, "a"),
        ({"conversation": "b", "prompt_cache_key": "k"}, {}, "b"),
        ({"conversation": {"id": "b"}}, {}, "b"),
        ({"prompt_cache_key": "k", "session_id": "s"}, {}, "k"),
        ({"session_id": "s"}, {"X-Conversation-ID": "z"}, "s"),
        ({}, {"X-Session-ID": "y", "X-Conversation-ID": "z"}, "z"),
        ({}, {"x-claude-code-session-id": "y", "session-id": "z"}, "y"),
        ({}, {"session_id": "z"}, "z"),
        ({"conversation_id": None, "conversation": None}, {}, None),
        ({"previous_response_id": "r"}, {}, None),
    ],
)
def test_the_first_source_that_is_there_counts(
    body: dict[str, Any], headers: dict[str, str], expected: str | None
) -> None:
    assert conversation_id(body, headers)[0] == expected


@pytest.mark.parametrize(
    ("body", "headers", "field"),
    [
        ({"conversation_id": ""}, {}, "conversation_id"),
        ({"conversation": {}}, {}, "conversation.id"),
        ({"conversation": {"id": 3}}, {}, "conversation.id"),
        ({"prompt_cache_key": 5, "session_id": "ok"}, {}, "prompt_cache_key"),
        ({}, {"X-Session-ID": ""}, "header X-Session-ID"),
        ({}, {"X-Conversation-ID": "\udcff"}, "header X-Conversation-ID"),
    ],
)
def test_unusable_ids_name_their_source(body: dict[str, Any], headers: dict[str, str], field: str) -> None:
    with pytest.raises(IdentityError) as caught:
        conversation_id(body, headers)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


@given(st.text())
def test_an_id_is_taken_as_it_is_or_refused(text: str) -> None:
    try:
        assert conversation_id({"conversation_id": text}, {}) == (text, "conversation_id")
        assert 0 < len(text.encode()) <= 256
    except IdentityError:
        assert not text or len(text.encode("utf-8", "surrogatepass")) > 256


def test_hashes_keep_tenants_apart() -> None:
    assert hashed("a", "bc") != hashed("ab", "c")
    assert tenant_of(None, "default") == "default"
    assert tenant_of(Caller("acme"), "default") == "acme"


# Policy


@pytest.mark.parametrize(
    ("facts", "path", "reason"),
    [
        (TurnFacts(1000), Path.COLD, "unknown_conversation"),
        (TurnFacts(1000, miss="plane_unavailable"), Path.COLD, "plane_unavailable"),
        (HELD, Path.DIRECT, "new_text_short"),
        (replace(HELD, prompt_tokens=900 + 2048), Path.DIRECT, "new_text_short"),
        (replace(HELD, prompt_tokens=900 + 2049), Path.PULL, "new_text_long"),
        (replace(HELD, holder=Holder(False)), Path.PULL, "holder_unusable"),
        (replace(HELD, holder=Holder(True, outstanding=64)), Path.PULL, "decode_busy"),
        (replace(HELD, holder=Holder(True, outstanding=63)), Path.DIRECT, "new_text_short"),
        (replace(HELD, holder=Holder(True, waiting=16)), Path.PULL, "decode_busy"),
        (replace(HELD, held_tokens=63, prompt_tokens=5000), Path.COLD, "below_threshold"),
        (replace(HELD, held_tokens=64, prompt_tokens=5000), Path.PULL, "new_text_long"),
        (replace(HELD, prefill_available=False, prompt_tokens=9000), Path.DIRECT, "no_prefill_engine"),
        (replace(HELD, prefill_available=False, holder=Holder(False)), Path.COLD, "no_prefill_engine"),
        (replace(HELD, prefill_verifies=False, prompt_tokens=9000), Path.COLD, "prefill_cannot_verify"),
        (replace(HELD, prefill_verifies=False), Path.DIRECT, "new_text_short"),
        (CHANGED, Path.DIRECT, "new_text_short"),
        (
            replace(HELD, history_changed=True, prompt_tokens=8000, held_tokens=7900),
            Path.PULL,
            "history_changed",
        ),
        (replace(HELD, mode=PathMode.COLD), Path.COLD, "forced"),
        (replace(HELD, mode=PathMode.PULL), Path.PULL, "forced"),
        (replace(HELD, mode=PathMode.PULL, prefill_verifies=False), Path.COLD, "prefill_cannot_verify"),
        (replace(HELD, mode=PathMode.PULL, prefill_available=False), Path.COLD, "no_prefill_engine"),
        (replace(HELD, mode=PathMode.DIRECT, prompt_tokens=9000), Path.DIRECT, "forced"),
        (replace(HELD, mode=PathMode.DIRECT, holder=Holder(False)), Path.COLD, "holder_unusable"),
        (replace(HELD, mode=PathMode.PULL, held_tokens=None), Path.COLD, "unknown_conversation"),
    ],
)
def test_decisions(facts: TurnFacts, path: Path, reason: str) -> None:
    decision = decide(facts, LIMITS)
    assert (decision.path, decision.reason) == (path, reason)


def test_learned_rates_move_the_threshold_but_not_without_bound() -> None:
    fast = Rates(prefill=1000, decode_prefill=1000, transfer=1e6)
    large = replace(HELD, prompt_tokens=900 + 5000, rates=fast)
    assert decide(large, LIMITS).path is Path.DIRECT
    assert decide(replace(large, prompt_tokens=900 + 9000), LIMITS).path is Path.PULL
    busy = replace(large, prompt_tokens=900 + 1000, holder=Holder(True, outstanding=20))
    assert decide(busy, LIMITS).path is Path.PULL
    assert decide(replace(busy, prompt_tokens=900 + 512), LIMITS).path is Path.PULL
    assert decide(replace(busy, prompt_tokens=900 + 128), LIMITS).path is Path.DIRECT
    some = replace(busy, holder=Holder(True, outstanding=3))
    assert decide(replace(some, prompt_tokens=900 + 512), LIMITS).path is Path.DIRECT
    # Where nothing can be pulled, computing it all again is what direct is compared with.
    alone = replace(busy, prompt_tokens=900 + 5000, prefill_verifies=False)
    assert decide(alone, LIMITS).path is Path.COLD
    assert decide(replace(alone, prompt_tokens=900 + 100), LIMITS).path is Path.DIRECT
    assert dict(decide(large, LIMITS).costs)[Path.COLD] == pytest.approx(5.9, abs=0.01)


def test_a_pull_that_is_slower_than_computing_is_left() -> None:
    slow = Rates(prefill=10_000, transfer=1000)
    facts = replace(HELD, holder=Holder(False), rates=slow)
    assert decide(facts, LIMITS).reason == "pull_not_worth_it"


@given(
    st.integers(0, 10**6),
    st.none() | st.integers(0, 10**6),
    st.booleans(),
    st.builds(Holder, st.booleans(), st.integers(0, 1000), st.integers(0, 1000)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(PathMode),
)
def test_no_decision_is_impossible(
    prompt: int, held: int | None, changed: bool, holder: Holder, there: bool, verifies: bool, mode: PathMode
) -> None:
    facts = TurnFacts(
        prompt,
        held,
        history_changed=changed,
        holder=holder,
        prefill_available=there,
        prefill_verifies=verifies,
        mode=mode,
    )
    decision = decide(facts, LIMITS)
    assert decision.reason
    assert decision.new_tokens >= 0
    if decision.path is Path.PULL:
        assert held is not None
        assert there
        assert verifies
    if decision.path is Path.DIRECT:
        assert holder.usable
        assert held is not None
    if mode is PathMode.COLD:
        assert decision.path is Path.COLD


# What is learned


def text(*contents: str) -> openai.PromptText:
    return CHAT.prompt_text({"messages": [{"role": "user", "content": c} for c in contents]})


def test_estimates_follow_what_engines_counted() -> None:
    memory = Memory()
    assert memory.estimate(KEY, text("x" * 384)) == 100
    memory.remember(KEY, text("x" * 384), 200)
    assert memory.estimate(KEY, text("x" * 784)) == 400
    other = ConversationKey("t", "m", "other")
    assert memory.estimate(other, text("x" * 784)) == 400
    memory.remember(KEY, text("x" * 784), None)
    assert memory.estimate(KEY, text("x" * 784)) == 400
    assert memory.estimate(KEY, COMPLETIONS.prompt_text({"prompt": [1, 2, 3]})) == 3


def test_wild_ratios_are_bounded() -> None:
    memory = Memory()
    memory.remember(KEY, text("x" * 1_000_000), 1)
    assert memory.estimate(KEY, text("x" * 1584)) == 100


def test_history_is_known_to_change_only_where_it_did() -> None:
    memory = Memory()
    assert not memory.history_changed(KEY, text("a"))
    memory.remember(KEY, text("a", "b"), 10)
    assert not memory.history_changed(KEY, text("a", "b", "c"))
    assert memory.history_changed(KEY, text("a", "B", "c"))
    assert memory.history_changed(KEY, text("b", "c"))
    memory.remember(KEY, COMPLETIONS.prompt_text({"prompt": "once upon"}), 10)
    assert not memory.history_changed(KEY, COMPLETIONS.prompt_text({"prompt": "once upon a time"}))
    assert memory.history_changed(KEY, COMPLETIONS.prompt_text({"prompt": "Once upon a time"}))


def test_history_of_token_ids_is_known_to_change_too() -> None:
    def ids(*values: object) -> openai.PromptText:
        return COMPLETIONS.prompt_text({"prompt": list(values)})

    memory = Memory()
    memory.remember(KEY, ids(*range(30_000)), None)
    assert not memory.history_changed(KEY, ids(*range(30_000), 1, 2))
    assert memory.history_changed(KEY, ids(*range(29_999)))
    assert memory.history_changed(KEY, ids(7, *range(1, 30_000)))
    assert memory.history_changed(KEY, ids(*range(29_999), 7, 8))
    assert memory.history_changed(KEY, ids(1, {}, []))
    assert memory.history_changed(KEY, COMPLETIONS.prompt_text({"prompt": "once"}))
    memory.remember(KEY, COMPLETIONS.prompt_text({"prompt": "once"}), None)
    assert memory.history_changed(KEY, ids(1, 2))


def test_memory_is_bounded_case_35() -> None:
    memory = Memory(capacity=10)
    for index in range(1000):
        memory.remember(ConversationKey("t", f"m{index}", str(index)), text("x"), 5)
    assert len(memory) == 10


def test_averages_are_unknown_at_first() -> None:
    average = Average()
    for sample in (10.0, 20.0):
        average.add(sample)
        assert average.value is None
    average.add(30.0)
    assert average.value == pytest.approx(20.0)


def test_rates_are_learned_per_pair() -> None:
    book = RateBook()
    for _ in range(3):
        book.computed("p", 1000, 1.0)
        book.computed("p", 10, 1.0)
        book.computed("d", 2000, 1.0)
    for _ in range(3):
        book.pulled("d", "p", 5000, 500, 1.0)
    rates = book.rates("p", "d")
    assert (rates.prefill, rates.decode_prefill) == (1000, 2000)
    assert rates.transfer == pytest.approx(10_000)
    assert book.rates("p", None) == Rates(1000, None, None)


# Settings


@pytest.mark.parametrize(
    ("value", "url"),
    [
        ("http://Host:8100/", "http://host:8100"),
        ("http://host", "http://host"),
        ("https://host:443", "https://host"),
        (" http://[FD00::7]:8200 ", "http://[fd00::7]:8200"),
    ],
)
def test_urls_have_one_spelling_case_37(value: str, url: str) -> None:
    assert engine_url(value) == url


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("localhost:8100", "write it as http://localhost:8100"),
        ("10.0.0.1", "write it as http://10.0.0.1:8100, with the port"),
        ("host:", "write it as http://host:8100, with the port"),
        ("fd00::7", "write it as http://[fd00::7]:8100, with the port"),
        ("[fd00::7]", "write it as http://[fd00::7]:8100, with the port"),
        ("[fd00::7]:8200", "write it as http://[fd00::7]:8200"),
        ("", "write it as http://HOST:PORT"),
        ("ftp://h", "speak http or https"),
        ("http://", "host is missing"),
        ("http://h:99999", "host and port cannot be read"),
        ("http://fd00::7:8200", "in brackets"),
        ("http://u:p@h", "only scheme, host and port"),
        ("http://h/v1", "leave out the path /v1"),
    ],
)
def test_wrong_urls_name_flag_and_remedy(value: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RouterSettings(prefill_urls=(value,), decode_urls=("http://d",))
    assert str(caught.value).startswith(f"--prefill {value}:")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "--decode is missing"),
        ({"decode_urls": ("http://d", "http://D/")}, "named twice"),
        ({"decode_urls": ("http://d",), "port": 70000}, "--port 70000"),
        ({"decode_urls": ("http://d",), "tenant_id": ""}, "--tenant"),
        ({"decode_urls": ("http://d",), "prefill_timeout_s": 0}, "prefill_timeout_s"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        RouterSettings(**settings)


# Streams


CHAT_ERROR = b'data: {"error": {"message": "x", "code": 500}}\n\n'
RESPONSES_FIRST = b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n"
RESPONSES_FAILED = b"event: response.failed\ndata: {}\n\n"
ANTHROPIC_ERROR = b'event: error\ndata: {"type": "error"}\n\n'


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("/v1/chat/completions", CHAT_ERROR),
        ("/v1/completions", CHAT_ERROR),
        ("/v1/responses", CHAT_ERROR),
        ("/v1/responses", RESPONSES_FIRST + RESPONSES_FAILED),
        ("/v1/messages", CHAT_ERROR),
        ("/v1/messages", ANTHROPIC_ERROR),
    ],
)
def test_an_error_at_the_beginning_of_a_stream_is_one_wherever_it_is_cut(path: str, stream: bytes) -> None:
    api = APIS[path]
    assert [cut for cut in range(len(stream)) if api.begun(stream[:cut])] == []
    assert api.begun(stream)
    assert api.stream_error(stream) is not None


@pytest.mark.parametrize("path", APIS)
def test_what_is_no_error_is_passed_on_at_once(path: str) -> None:
    first = RESPONSES_FIRST + b"event: response.x\n\n" if path == "/v1/responses" else b'data: {"id'
    assert APIS[path].begun(first)
    assert APIS[path].stream_error(first) is None
