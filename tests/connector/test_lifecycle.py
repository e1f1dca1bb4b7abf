from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvplane.connector.lifecycle import EngineState, LifeCycle
from kvplane.connector.retention import Retention, State


class Engine:
    def __init__(self, shutdown_timeout_s: float = 0.0) -> None:
        self.now = 100.0
        self.state = EngineState.SERVING
        self.retention = Retention(100, monotonic=lambda: self.now)
        self.life = LifeCycle(
            lambda: self.state, monotonic=lambda: self.now, shutdown_timeout_s=shutdown_timeout_s
        )
        for number, name in enumerate("abc"):
            self.retention.retain(name, name, [number])

    def step(self, *, live: bool = False) -> list[str]:
        return self.life.step(self.retention, live=live)

    def states(self) -> Iterable[State | None]:
        return [self.retention.state(name) for name in "abc"]


def test_a_serving_engine_is_left_alone() -> None:
    engine = Engine()
    assert engine.step() == []
    assert engine.life.refusal == ""
    assert set(engine.states()) == {State.RETAINED}


@pytest.mark.parametrize("state", [EngineState.PAUSED, EngineState.STOPPING])
def test_everything_is_asked_back_once_and_nothing_retained(state: EngineState) -> None:
    engine = Engine(60)
    engine.state = state
    assert engine.life.refusal == f"engine_{state}"
    assert engine.step() == []
    assert engine.retention.take_withdrawals() == ["a", "b", "c"]
    assert engine.step() == []
    assert engine.retention.take_withdrawals() == []


def test_after_a_pause_turns_are_retained_again() -> None:
    engine = Engine()
    engine.state = EngineState.PAUSED
    engine.step()
    engine.state = EngineState.SERVING
    assert engine.life.refusal == ""
    engine.retention.retain("d", "d", [7])
    assert engine.step() == []
    assert engine.retention.state("d") is State.RETAINED


def test_a_paused_engine_waits_for_readers_as_long_as_they_take() -> None:
    engine = Engine()
    engine.retention.claimed("a")
    engine.state = EngineState.PAUSED
    engine.step()
    engine.now += 3600
    assert engine.step() == []


def test_an_ending_engine_gives_readers_half_the_time_it_has() -> None:
    engine = Engine(20)
    engine.retention.claimed("a")
    engine.state = EngineState.STOPPING
    assert engine.step() == []
    engine.now += 9.9
    assert engine.step() == []
    engine.now += 0.1
    assert engine.step(live=True) == []  # they could be given the blocks and write into them
    assert engine.step() == ["a", "b", "c"]
    assert engine.step() == []


def test_an_engine_with_no_time_to_end_in_waits_for_nobody() -> None:
    engine = Engine(0)
    engine.state = EngineState.STOPPING
    assert engine.step() == ["a", "b", "c"]


def test_readers_get_half_a_minute_at_most() -> None:
    engine = Engine(3600)
    engine.state = EngineState.STOPPING
    assert engine.step() == []
    engine.now += 30
    assert engine.step() == ["a", "b", "c"]


def test_an_ending_engine_with_nothing_held_frees_nothing() -> None:
    engine = Engine(0)
    for name in "abc":
        engine.retention.freed(name)
    engine.state = EngineState.STOPPING
    assert engine.step() == []
