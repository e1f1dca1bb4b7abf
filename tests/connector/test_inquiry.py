from __future__ import annotations

from typing import Any, cast

import pytest

from kvplane.client.client import ControlPlaneClient
from kvplane.client.errors import ControlPlaneUnavailableError, InvalidFieldError
from kvplane.client.model import ConversationKey, MissReason
from kvplane.client.slot import Slot
from kvplane.connector import inquiry
from kvplane.connector.envelope import Outcome, read_promise
from kvplane.connector.fingerprint import Context
from kvplane.connector.inquiry import Answer, Inquirer, Question
from tests.connector.asked import CHUNK, KEY, LAYOUT, UNNAMED, Client, location, question

HISTORY = list(range(1000, 1200))
PROMPT = [*HISTORY, 5, 6, 7]


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def inquirer() -> Inquirer:
    return Inquirer("p0", LAYOUT, CHUNK, 0.3)


async def ask(
    inquirer: Inquirer, client: Client, asked: Question, slot: Slot[Answer] | None = None
) -> Answer:
    slot = slot or Slot[Answer]()
    await inquirer.inquire(cast(ControlPlaneClient, client), asked, "p0@5", slot)
    answer = slot.take()
    assert answer is not None
    return answer


async def test_what_is_worth_it_is_claimed(inquirer: Inquirer, client: Client) -> None:
    client.locations[KEY] = location(HISTORY)
    answer = await ask(inquirer, client, question(PROMPT))
    assert answer.begun is not None
    assert answer.begun.key == KEY
    assert answer.claim is not None
    assert answer.claim.location.token_count == 200
    assert (answer.plan.tokens, answer.plan.outcome) == (200, None)
    assert answer.params is not None
    assert answer.params["remote_engine_id"] == "d0"
    assert answer.params["remote_blocks_expiry_time"] == 1234.5
    assert (answer.params["do_remote_decode"], answer.params["do_remote_prefill"]) == (True, False)
    promise = read_promise(answer.params)
    assert promise is not None
    assert promise.token_count == 200
    assert client.unfinished() == [answer.claim.claim_id]
    assert client.begun == [(KEY, None)], "with an id the prompt's fingerprint is not sent"
    assert len(set(client.request_ids)) == 2


async def test_a_changed_history_is_claimed_up_to_the_change(inquirer: Inquirer, client: Client) -> None:
    client.locations[KEY] = location([*HISTORY[:100], 1, *HISTORY[101:]])
    answer = await ask(inquirer, client, question(PROMPT))
    assert answer.claim is not None
    assert answer.plan.tokens == 96


@pytest.mark.parametrize(
    ("changes", "outcome", "detail"),
    [
        ({"local_tokens": 200}, Outcome.LOCAL_HIT, ""),
        ({"local_tokens": 192}, Outcome.BELOW_THRESHOLD, ""),
        ({"local_tokens": 185}, Outcome.BELOW_THRESHOLD, ""),
        ({"local_tokens": 184}, None, ""),
        ({"least_tokens": 0}, Outcome.COLD, "not_readable"),
        ({"least_tokens": 201}, Outcome.BELOW_THRESHOLD, ""),
        ({"avoided": frozenset({"d0"})}, Outcome.COLD, "peer_breaker"),
        ({"tokens": [1, *PROMPT]}, Outcome.MISMATCH, "other_tokens"),
        ({"context": Context("m", cache_salt="other")}, Outcome.MISMATCH, "other_tokens"),
    ],
)
async def test_what_is_not_worth_it_is_not_claimed(
    inquirer: Inquirer, client: Client, changes: dict[str, Any], outcome: Outcome | None, detail: str
) -> None:
    client.locations[KEY] = location(HISTORY)
    given = {"tokens": PROMPT, "context": Context("m"), **changes}
    asked = Question(KEY, given.pop("context"), given.pop("tokens"), **{"least_tokens": 16, **given})
    answer = await ask(inquirer, client, asked)
    assert (answer.plan.outcome, answer.plan.detail) == (outcome, detail)
    assert answer.begun is not None
    assert bool(client.claimed) == (outcome is None)
    if outcome is not None:
        assert (answer.claim, answer.params, answer.plan.block_ids) == (None, None, None)


async def test_the_own_location_is_not_pulled(inquirer: Inquirer, client: Client) -> None:
    client.locations[KEY] = location(HISTORY, engine_id="p0")
    answer = await ask(inquirer, client, question(PROMPT))
    assert (answer.plan.detail, answer.claim) == ("own_location", None)


async def test_what_cannot_be_pulled_is_not_claimed(inquirer: Inquirer, client: Client) -> None:
    for changes in ({"remote_port": 0}, {"remote_block_ids": [[1]]}, {"transfer_mode": "push"}):
        client.locations[KEY] = location(HISTORY, **changes)
        answer = await ask(inquirer, client, question(PROMPT))
        assert answer.plan.outcome is not None
        assert answer.claim is None


async def test_a_miss_begins_the_turn_and_says_why(inquirer: Inquirer, client: Client) -> None:
    answer = await ask(inquirer, client, question(PROMPT))
    assert answer.begun is not None
    assert (answer.plan.outcome, answer.plan.detail) == (Outcome.COLD, "unknown_conversation")


async def test_a_claim_that_another_won(inquirer: Inquirer, client: Client) -> None:
    client.locations[KEY] = location(HISTORY)
    client.refuse_claims = MissReason.CLAIMED
    answer = await ask(inquirer, client, question(PROMPT))
    assert answer.begun is not None
    assert (answer.claim, answer.plan.detail) == (None, "claim_lost_claimed")


@pytest.mark.parametrize("lost", [False, True], ids=["not done", "done, answer lost"])
@pytest.mark.parametrize("call", ["begin_turn", "claim_location"])
async def test_a_silent_control_plane(inquirer: Inquirer, client: Client, call: str, lost: bool) -> None:
    client.locations[KEY] = location(HISTORY)
    client.fails[call] = ControlPlaneUnavailableError("deadline exceeded")
    client.lost = {call} if lost else set()
    answer = await ask(inquirer, client, question(PROMPT))
    assert (answer.claim, answer.plan.detail) == (None, "control_plane_silent")
    assert (answer.begun is not None) == (call == "claim_location")
    assert client.unfinished() == []
    assert sum(client.finished.values()) == (call == "claim_location"), "it may have been granted"


async def test_a_refusal_is_no_error(inquirer: Inquirer, client: Client) -> None:
    client.fails["begin_turn"] = InvalidFieldError("no")
    answer = await ask(inquirer, client, question(PROMPT))
    assert (answer.begun, answer.plan.detail) == (None, "control_plane_refused")


async def test_a_fault_is_no_error(inquirer: Inquirer, client: Client) -> None:
    client.locations[KEY] = location(HISTORY)
    answer = await ask(inquirer, client, question([2**31, *PROMPT], UNNAMED))
    assert (answer.begun, answer.plan.detail) == (None, "fault")


async def test_an_answer_nobody_waits_for_leaves_no_claim(inquirer: Inquirer, client: Client) -> None:
    client.locations[KEY] = location(HISTORY)
    early = Slot[Answer]()
    early.give_up()
    await inquirer.inquire(cast(ControlPlaneClient, client), question(PROMPT), "p0@5", early)
    assert client.claimed == {}, "given up before the claim: none is made"

    late = Slot[Answer]()

    async def give_up_once_claimed() -> None:
        if client.claimed:
            late.give_up()

    client.gate = give_up_once_claimed
    await inquirer.inquire(cast(ControlPlaneClient, client), question(PROMPT), "p0@5", late)
    assert len(client.claimed) == 1
    assert client.unfinished() == []


async def test_finishing_is_repeated(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "_FINISH_AGAIN_S", 0.0)
    client.fails["finish_claim"] = ControlPlaneUnavailableError("down")
    tries = 0

    async def count() -> None:
        nonlocal tries
        tries += 1
        if tries == 3:
            client.fails.clear()

    client.gate = count
    await inquiry.finish_claim(cast(ControlPlaneClient, client), "claim", "p0@5")
    assert client.finished == {"claim": 1}
    client.fails["finish_claim"] = ControlPlaneUnavailableError("down")
    tries = 10
    await inquiry.finish_claim(cast(ControlPlaneClient, client), "claim", "p0@5")
    assert tries == 13
    client.fails["finish_claim"] = InvalidFieldError("no")
    await inquiry.finish_claim(cast(ControlPlaneClient, client), "claim", "p0@5")
    assert tries == 14


# Conversations without an id


async def test_found_by_its_prompt(inquirer: Inquirer, client: Client) -> None:
    key = ConversationKey("t", "m", "auto/1")
    client.by_prompt = location(HISTORY, key=key)
    answer = await ask(inquirer, client, question(PROMPT, UNNAMED))
    assert answer.begun is not None
    assert answer.begun.key == key
    assert answer.claim is not None
    ((asked, fingerprint),) = client.begun
    assert asked == UNNAMED
    assert fingerprint is not None
    assert (fingerprint.chunk_tokens, len(fingerprint.chain)) == (CHUNK, 8 * 13)


async def test_a_long_beginning_in_common_is_not_the_same_conversation(
    inquirer: Inquirer, client: Client
) -> None:
    other = location([*HISTORY[:195], 1, 2, 3], key=ConversationKey("t", "m", "auto/1"))
    client.by_prompt = other  # all twelve whole chunks are equal, what follows is not
    answer = await ask(inquirer, client, question(PROMPT, UNNAMED))
    assert answer.begun is not None
    assert answer.begun.key.conversation_id not in ("", "auto/1")
    assert answer.begun.key.conversation_id.startswith("auto/")
    assert client.claimed == {}


async def test_the_next_turn_is_known_by_the_prompt_before(inquirer: Inquirer, client: Client) -> None:
    first = await ask(inquirer, client, question(PROMPT, UNNAMED))
    assert first.begun is not None
    client.locations[first.begun.key] = location([*PROMPT, 70, 71, 72], key=first.begun.key)
    # The reply comes back as other tokens, and the control plane cannot find it.
    second = await ask(inquirer, client, question([*PROMPT, 80, 81, 82, 83], UNNAMED))
    assert second.begun is not None
    assert second.begun.key == first.begun.key
    assert second.claim is not None
    assert second.plan.tokens == 192
    branch = await ask(inquirer, client, question([*PROMPT, 90, 91], UNNAMED))
    assert branch.begun is not None
    assert branch.begun.key != first.begun.key, "it went on already"


async def test_anothers_prompt_is_not_gone_on_with(inquirer: Inquirer, client: Client) -> None:
    first = await ask(inquirer, client, question(PROMPT, UNNAMED))
    assert first.begun is not None
    others = ConversationKey("another", "m", "")
    second = await ask(inquirer, client, question([*PROMPT, 80], others))
    assert second.begun is not None
    assert second.begun.key.tenant_id == "another"
    assert second.begun.key.conversation_id != first.begun.key.conversation_id
