from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplane.client.model import MissReason
from kvplane.connector.asking import Asker
from kvplane.connector.envelope import Outcome
from kvplane.connector.inquiry import Answer, Question
from tests.connector.asked import CHUNK, KEY, LAYOUT, Session, location, question

HISTORY = list(range(1000, 1200))
PROMPT = [*HISTORY, 5, 6, 7]


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.session = Session()
        self.session.client.locations[KEY] = location(HISTORY)
        self.asker = Asker(
            self.session,
            engine_id="p0",
            layout=LAYOUT,
            chunk_tokens=CHUNK,
            timeout_s=0.3,
            monotonic=lambda: self.now,
        )
        self.made = 0

    def settle(self, request_id: str = "r") -> Answer | None:
        return self.asker.settle(request_id, self._make)

    def _make(self) -> Question:
        self.made += 1
        return question(PROMPT)

    @property
    def unfinished(self) -> list[str]:
        return self.session.client.unfinished()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.session.close()


def test_an_answer_is_waited_for_and_then_stays(rig: Rig) -> None:
    assert rig.settle() is None
    while rig.session.running:
        assert rig.settle() is None
        rig.session.step()
    answer = rig.settle()
    assert answer is not None
    assert answer.claim is not None
    assert rig.settle() is answer, "preempted, it is asked about again"
    assert rig.made == 1
    assert rig.asker.begun("r") is answer.begun
    assert rig.asker.counts == {"asked": 1, "answered": 1}


def test_a_claim_is_finished_once(rig: Rig) -> None:
    rig.settle()
    rig.session.finish()
    rig.settle()
    assert len(rig.unfinished) == 1
    rig.asker.finish("r")
    rig.asker.finish("r")
    rig.asker.end("r")
    rig.session.finish()
    assert rig.unfinished == []
    assert list(rig.session.client.finished.values()) == [1]
    assert len(rig.asker) == 0


def test_nobody_waits_longer_than_the_deadline(rig: Rig) -> None:
    rig.settle()
    rig.now += 0.29
    assert rig.settle() is None
    rig.now += 0.01
    answer = rig.settle()
    assert answer is not None
    assert (answer.begun, answer.claim) == (None, None)
    assert (answer.plan.outcome, answer.plan.detail) == (Outcome.COLD, "ask_timeout")
    rig.session.finish()
    assert rig.settle() is answer
    assert rig.session.client.claimed == {}


@pytest.mark.parametrize("steps", range(6))
def test_a_late_answer_leaves_no_claim(rig: Rig, steps: int) -> None:
    rig.settle()
    for _ in range(steps):
        if rig.session.running:
            rig.session.step()
    rig.now += 1
    answer = rig.settle()
    assert answer is not None
    rig.session.finish()
    rig.asker.end("r")
    rig.session.finish()
    assert rig.unfinished == []
    assert len(rig.asker) == 0


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_moment_leaves_no_claim(rig: Rig, steps: int, looks: bool) -> None:
    rig.settle()
    for _ in range(steps):
        if rig.session.running:
            rig.session.step()
        if looks:
            rig.settle()
    rig.asker.end("r")
    rig.session.finish()
    assert rig.unfinished == []
    assert len(rig.asker) == 0


def test_a_claim_outlives_its_request_while_it_is_read(rig: Rig) -> None:
    rig.settle()
    rig.session.finish()
    rig.settle()
    rig.asker.end("r", reading=True)
    rig.session.finish()
    assert len(rig.unfinished) == 1
    rig.asker.finish("r")
    rig.asker.end("r")
    rig.session.finish()
    assert rig.unfinished == []
    assert len(rig.asker) == 0


@pytest.mark.parametrize("how", ["detached", "unregistered", "full"])
def test_without_a_control_plane_it_is_cold_at_once(rig: Rig, how: str) -> None:
    rig.session.attached = how != "detached"
    rig.session.takes = how != "full"
    if how == "unregistered":
        rig.session.registration = None
    answer = rig.settle()
    assert answer is not None
    assert (answer.begun, answer.plan.detail) == (None, "no_control_plane")


def test_nothing_to_ask(rig: Rig) -> None:
    answer = rig.asker.settle("r", lambda: None)
    assert answer is not None
    assert (answer.begun, answer.plan.outcome) == (None, Outcome.COLD)
    assert rig.session.running == []


def test_requests_do_not_disturb_each_other(rig: Rig) -> None:
    rig.settle("a")
    rig.settle("b")
    rig.session.step(1)
    rig.session.step(1)
    rig.session.finish()
    won = [answer.claim for name in "ab" if (answer := rig.settle(name)) is not None]
    assert [claim is not None for claim in won].count(True) == 1
    rig.asker.end("a")
    rig.asker.end("b")
    rig.asker.end("never there")
    rig.session.finish()
    assert rig.unfinished == []


def test_a_lost_claim_is_not_finished(rig: Rig) -> None:
    rig.session.client.refuse_claims = MissReason.CLAIMED
    rig.settle()
    rig.session.finish()
    answer = rig.settle()
    assert answer is not None
    assert answer.begun is not None
    rig.asker.end("r")
    assert rig.session.running == []
