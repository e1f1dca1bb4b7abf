from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplane.client.model import ConversationKey
from kvplane.connector.asking import Asker
from kvplane.connector.envelope import MEMBER, read_envelope
from kvplane.connector.pull import PullPlan
from kvplane.connector.reader import Reader
from tests.connector.asked import CHUNK, LAYOUT, Session, location, question

HISTORY = list(range(1000, 1200))
PROMPT = [*HISTORY, 5, 6, 7]


def key(name: str) -> ConversationKey:
    return ConversationKey("t", "m", name)


class Rig:
    """The prefill side as the scheduler uses it: one conversation per request, each held by d0."""

    def __init__(self) -> None:
        self.now = 100.0
        self.session = Session()
        self.client = self.session.client
        self.reader = Reader(lambda: self.now)
        self.reader.asker = self.asker = Asker(
            self.session,
            engine_id="p0",
            layout=LAYOUT,
            chunk_tokens=CHUNK,
            timeout_s=0.3,
            monotonic=lambda: self.now,
        )
        self.params: dict[str, dict[str, Any]] = {}

    def arrive(self, name: str, **params: Any) -> None:
        self.client.locations[key(name)] = location(HISTORY, key=key(name))
        self.params[name] = {"do_remote_decode": True, "do_remote_prefill": False, **params}
        self.reader.ledger.arrive(name)

    def match(self, name: str, local: int = 0) -> int | None:
        """What the scheduler does when it asks how much is to be pulled."""
        held = self.reader.breaker.held()
        params = self.params[name]
        make = lambda: question(PROMPT, key(name), local_tokens=local, avoided=held)  # noqa: E731
        if not self.reader.settle(name, params, make):
            return None
        tokens = 0
        if self.reader.ledger.may_pull(name) and params.get("remote_block_ids"):
            tokens = max(0, params["remote_num_tokens"] - local)
        self.reader.ledger.asked(name, local, tokens)
        return tokens

    def pull(self, name: str) -> None:
        """Bring a request to where its read is under way."""
        self.arrive(name)
        assert self.match(name) is None
        self.session.finish()
        assert self.match(name) == 200
        self.reader.allocated(name, 200, {1, 2})

    def end(self, name: str, *, aborted: bool = False) -> dict[str, Any] | None:
        del self.params[name]
        if aborted:
            self.reader.forget(name)
            return None
        return self.reader.report(name, len(PROMPT))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.session.close()


def test_a_pull_from_question_to_report(rig: Rig) -> None:
    rig.pull("a")
    assert rig.params["a"]["remote_engine_id"] == "d0"
    rig.reader.received({"a"}, set(), set())
    rig.session.finish()
    assert rig.client.unfinished() == [], "finished once it is read"
    report = rig.end("a")
    assert report is not None
    assert (report["outcome"], report["reused_tokens"], report["prompt_tokens"]) == ("pulled", 200, 203)
    envelope = read_envelope({MEMBER: report})
    assert envelope is not None
    assert (envelope.key, envelope.turn) == (key("a"), 101)
    assert (report["turn_index"], report["idle_s"], report["lease_class"]) == (3, 12.5, 7)
    assert len(rig.asker) == len(rig.reader.ledger) == 0


def test_a_cold_turn_has_an_envelope_too(rig: Rig) -> None:
    rig.arrive("a")
    rig.client.locations.clear()
    rig.match("a")
    rig.session.finish()
    assert rig.match("a") == 0
    rig.reader.allocated("a", 0, ())
    report = rig.end("a")
    assert report is not None
    assert (report["outcome"], report["detail"]) == ("cold", "unknown_conversation")
    assert read_envelope({MEMBER: report}) is not None


def test_what_a_router_of_ours_sent_is_not_asked_about(rig: Rig) -> None:
    rig.arrive("a", kvplane={"router": True})
    assert rig.match("a") == 0
    assert rig.session.running == []
    report = rig.end("a")
    assert report is not None
    assert read_envelope({MEMBER: report}) is None


def test_a_failed_read_ends_the_location_at_once(rig: Rig) -> None:
    rig.pull("a")
    rig.reader.received({"a"}, {"a"}, set())
    rig.session.finish()
    assert rig.client.unfinished() == []
    assert rig.match("a") == 0, "computed again, nothing is pulled a second time"
    rig.reader.allocated("a", 0, ())
    report = rig.end("a")
    assert report is not None
    assert (report["outcome"], report["detail"], report["reused_tokens"]) == ("failed", "read_failed", 0)


def test_of_several_ranks_one_says_early_that_the_read_failed(rig: Rig) -> None:
    rig.pull("a")
    rig.reader.received(set(), set(), {2})
    rig.reader.received({"a"}, set(), set())
    assert rig.reader.counts == {"read_failed": 1}


def test_a_failed_read_of_a_request_that_was_ended_for_it(rig: Rig) -> None:
    """With kv_load_failure_policy "fail" the request ends before the read is said to be over."""
    rig.pull("a")
    assert rig.end("a", aborted=True) is None
    rig.session.finish()
    assert len(rig.client.unfinished()) == 1, "it may still be read"
    rig.reader.received({"a"}, set(), {1})
    rig.session.finish()
    assert rig.client.unfinished() == []
    assert rig.reader.counts["read_failed"] == 1
    assert len(rig.asker) == 0
    assert not rig.reader.ledger.reading("a")


def test_three_failures_and_the_peer_is_left_alone(rig: Rig) -> None:
    for name in "abc":
        rig.pull(name)
        rig.reader.received({name}, {name}, set())
        rig.end(name)
    assert rig.reader.counts == {"read_failed": 3, "breaker_opened": 1}
    rig.session.finish()
    rig.client.claimed.clear()
    rig.arrive("d")
    rig.match("d")
    rig.session.finish()
    assert rig.match("d") == 0
    assert rig.client.claimed == {}
    report = rig.end("d")
    assert report is not None
    assert (report["outcome"], report["detail"]) == ("cold", "peer_breaker")
    rig.now += 10
    rig.pull("probe")
    rig.reader.received({"probe"}, set(), set())
    rig.pull("e")
    rig.pull("f")


def test_of_two_that_would_be_the_probe_one_gives_its_claim_back(rig: Rig) -> None:
    for name in "abc":
        rig.pull(name)
        rig.reader.received({name}, {name}, set())
    rig.now += 10
    for name in "de":
        rig.arrive(name)
        rig.match(name)
    rig.session.finish()
    assert [rig.match(name) for name in "de"] == [200, 0]
    rig.session.finish()
    assert len(rig.client.unfinished()) == 1


def test_a_probe_that_reads_nothing_makes_way(rig: Rig) -> None:
    for name in "abc":
        rig.pull(name)
        rig.reader.received({name}, {name}, set())
    rig.now += 10
    rig.arrive("d")
    rig.match("d")
    rig.session.finish()
    rig.match("d")
    rig.reader.allocated("d", 0, ())  # in its own cache by now
    rig.pull("e")


def test_a_routers_claim_on_a_peer_that_fails_is_not_read(rig: Rig) -> None:
    for name in "abc":
        rig.pull(name)
        rig.reader.received({name}, {name}, set())
    plan = rig.reader.admitted("x", PullPlan(200, [[1]]), "d0")
    assert (plan.tokens, plan.block_ids, plan.detail) == (0, None, "peer_breaker")
    assert rig.reader.admitted("x", PullPlan(200, [[1]]), "d1").tokens == 200
    assert rig.reader.admitted("x", PullPlan(200, [[1]]), ["d0"]).tokens == 200


class PrefillSide(RuleBasedStateMachine):
    """Requests in all states at once, answers at any moment: no claim is lost, none is finished too early."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.names = (f"r{number}" for number in itertools.count())
        self.waiting: set[str] = set()
        self.reading: set[str] = set()  # of live and of aborted requests
        self.running: set[str] = set()
        self.claim_of: dict[str, str] = {}

    def _some(self, names: set[str], choice: int) -> str:
        return sorted(names)[choice % len(names)]

    @precondition(lambda self: len(self.rig.params) < 4)
    @rule()
    def arrive(self) -> None:
        name = next(self.names)
        self.rig.arrive(name)
        self.waiting.add(name)

    @precondition(lambda self: self.waiting)
    @rule(choice=st.integers(0, 9), local=st.sampled_from([0, 0, 64, 192, 200]), room=st.booleans())
    def schedule(self, choice: int, local: int, room: bool) -> None:
        self._schedule(self._some(self.waiting, choice), local, room)

    @precondition(lambda self: len(self.rig.params) < 4)
    @rule()
    def arrive_and_be_answered(self) -> None:
        name = next(self.names)
        self.rig.arrive(name)
        self.waiting.add(name)
        self._schedule(name, 0, True)
        self.rig.session.finish()
        if name in self.waiting:
            self._schedule(name, 0, True)

    def _schedule(self, name: str, local: int, room: bool) -> None:
        tokens = self.rig.match(name, local)
        if tokens is None or not room:
            return
        self.waiting.remove(name)
        self.rig.reader.allocated(name, tokens, {1})
        if tokens:
            claims = [c for c, claim in self.rig.client.granted.items() if claim.location.key == key(name)]
            assert len(claims) == 1, "nothing is read without a claim"
            assert not self.rig.client.finished[claims[0]]
            self.claim_of[name] = claims[0]
            self.reading.add(name)
        else:
            self.running.add(name)

    @precondition(lambda self: self.rig.session.running)
    @rule(choices=st.lists(st.integers(0, 9), min_size=1, max_size=8))
    def session_runs(self, choices: list[int]) -> None:
        for choice in choices:
            if self.rig.session.running:
                self.rig.session.step(choice % len(self.rig.session.running))

    @rule(seconds=st.sampled_from([0.01, 0.2, 5.0]), passes=st.sampled_from([False, False, False, True]))
    def time_passes(self, seconds: float, passes: bool) -> None:
        if passes:
            self.rig.now += seconds

    @precondition(lambda self: self.reading)
    @rule(choice=st.integers(0, 9), fails=st.booleans())
    def read_ends(self, choice: int, fails: bool) -> None:
        name = self._some(self.reading, choice)
        self.reading.remove(name)
        self.rig.reader.received({name}, {name} if fails else set(), set())
        if name in self.rig.params:
            (self.waiting if fails else self.running).add(name)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def preempt(self, choice: int) -> None:
        name = self._some(self.running, choice)
        self.running.remove(name)
        self.waiting.add(name)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def complete(self, choice: int) -> None:
        name = self._some(self.running, choice)
        self.running.remove(name)
        assert self.rig.end(name) is not None

    @precondition(lambda self: self.rig.params)
    @rule(choice=st.integers(0, 9))
    def abort(self, choice: int) -> None:
        name = self._some(set(self.rig.params), choice)
        self.waiting.discard(name)
        self.running.discard(name)
        self.rig.end(name, aborted=True)

    @rule(attached=st.sampled_from([False, True, True, True]))
    def the_control_plane_comes_and_goes(self, attached: bool) -> None:
        self.rig.session.attached = attached

    @invariant()
    def nothing_is_finished_while_it_is_read(self) -> None:
        for name in self.reading:
            assert not self.rig.client.finished[self.claim_of[name]]

    @invariant()
    def each_claim_is_finished_once_at_most(self) -> None:
        assert all(times == 1 for times in self.rig.client.finished.values())

    def teardown(self) -> None:
        for name in list(self.rig.params):
            self.rig.end(name, aborted=True)
        for name in self.reading:
            self.rig.reader.received({name}, set(), set())
        self.rig.session.finish()
        assert self.rig.client.unfinished() == []
        assert len(self.rig.asker) == len(self.rig.reader.ledger) == 0


TestPrefillSide = PrefillSide.TestCase
TestPrefillSide.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
