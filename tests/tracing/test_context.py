"""The W3C header read and passed on."""

from __future__ import annotations

import asyncio

import pytest

from kvplane.tracing.context import CURRENT, Span, Tracer, Within, checked, new_traceparent, trace_id_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (GIVEN, GIVEN),
        (f"01-{TRACE}-{PARENT}-01-more", f"01-{TRACE}-{PARENT}-01"),  # a version to come may say more
        (f"01-{TRACE}-{PARENT}-01", f"01-{TRACE}-{PARENT}-01"),
        (f"00-{TRACE}-{PARENT}-01-more", ""),
        (f"01-{TRACE}-{PARENT}-01more", ""),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (GIVEN.upper(), ""),
        (GIVEN[:-1], ""),
        (f" {GIVEN}", ""),
        (f"00-{TRACE}-{PARENT}-0\n", ""),
        ("", ""),
        ("x" * 10_000, ""),
    ],
)
def test_what_is_a_traceparent(value: str, read: str) -> None:
    assert checked(value) == read
    assert trace_id_of(value) == (TRACE if read else "")


def test_a_new_one_is_one_and_another_each_time() -> None:
    made = {new_traceparent() for _ in range(100)}
    assert len(made) == 100
    assert all(checked(each) == each for each in made)


def test_the_plain_tracer_passes_on_what_it_was_given() -> None:
    span = Tracer().begin("request", GIVEN)
    assert (span.traceparent, span.trace_id, span.made_up) == (GIVEN, TRACE, False)
    assert span.child("leg", engine="e") is span
    made_up = Tracer().begin("request", "nonsense")
    assert made_up.made_up
    assert checked(made_up.traceparent)
    assert Tracer().join("call", "nonsense") is None
    joined = Tracer().join("call", GIVEN)
    assert joined is not None
    assert joined.trace_id == TRACE


class Noted(Span):
    """A span that notes how its children end."""

    def __init__(self, name: str, ended: list[str]) -> None:
        super().__init__(GIVEN)
        self.name, self.ended = name, ended

    def child(self, name: str, **attributes: object) -> Span:
        return Noted(f"{self.name}/{name}", self.ended)

    def end(self, problem: str = "") -> None:
        self.ended.append(f"{self.name}:{problem}")


def test_what_is_done_within_is_a_child_and_afterwards_it_is_as_before() -> None:
    root = Noted("root", [])
    with Within("nobody's") as span:
        assert span is None
    token = CURRENT.set(root)
    try:
        with Within("leg"), Within("part") as inner:
            assert CURRENT.get() is inner
        with pytest.raises(KeyError), Within("failed"):
            raise KeyError
        assert CURRENT.get() is root
    finally:
        CURRENT.reset(token)
    assert root.ended == ["root/leg/part:", "root/leg:", "root/failed:KeyError"]


async def test_a_cancelled_leg_says_so() -> None:
    root = Noted("root", [])
    token = CURRENT.set(root)

    async def leg() -> None:
        with Within("leg"):
            await asyncio.Event().wait()

    task = asyncio.create_task(leg())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert CURRENT.get() is root
    CURRENT.reset(token)
    assert root.ended == ["root/leg:CancelledError"]
