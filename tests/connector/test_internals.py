from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvplane.connector.internals import Need, VersionError, attributes_of, check


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


class Base:
    declared: int

    def __init__(self) -> None:
        self._reqs_need_send: dict[str, float] = {}

    def request_finished(self, request: object, block_ids: object) -> None:
        pass


class Scheduler(Base):
    @wrapped
    def __init__(self) -> None:
        super().__init__()
        self.late = 1

    @property
    def computed(self) -> int:
        return 1

    def anything(self, *args: object) -> None:
        pass


@dataclass
class Output:
    finished_sending: set[str] = field(default_factory=set)


def test_attributes_come_from_the_class_its_fields_and_what_init_sets() -> None:
    assert {"_reqs_need_send", "late", "computed", "declared", "request_finished"} <= attributes_of(Scheduler)
    assert "finished_sending" in attributes_of(Output)
    assert "never" not in attributes_of(Scheduler)


def test_what_is_there_is_no_trouble() -> None:
    need = Need(
        Scheduler,
        "serve",
        {"request_finished": ("request", "block_ids"), "anything": ("a", "b")},
        ("_reqs_need_send", "missing|late", "computed"),
    )
    check([need, Need(f"{__name__}:Output", "read")], version="1", known=["1"])


@pytest.mark.parametrize(
    ("need", "name"),
    [
        (Need(Scheduler, "x", {"gone": ()}), "Scheduler.gone"),
        (
            Need(Scheduler, "x", {"request_finished": ("request", "blocks")}),
            "Scheduler.request_finished(request, blocks) (no blocks at its place)",
        ),
        (
            Need(Scheduler, "x", {"request_finished": ("block_ids", "request")}),
            "Scheduler.request_finished(block_ids, request) (no block_ids at its place)",
        ),
        (Need(Scheduler, "x", {"anything": (), "computed": ()}), "Scheduler.computed"),
        (Need(Scheduler, "x", attributes=("_reqs_in_batch",)), "Scheduler._reqs_in_batch"),
        (Need(Scheduler, "x", attributes=("a|b",)), "Scheduler.a or b"),
        (Need("no.such.module:Thing", "x"), "no.such.module.Thing"),
        (Need(f"{__name__}:Nothing", "x"), f"{__name__}.Nothing"),
    ],
)
def test_what_is_missing_is_named_with_the_version(need: Need, name: str) -> None:
    with pytest.raises(VersionError) as raised:
        check([need], version="0.99.1", known=["0.21.0", "0.32.0"])
    assert str(raised.value).splitlines() == [
        f"vLLM 0.99.1 lacks {name}, which kvplane needs to x",
        "Run with these versions of vLLM: 0.21.0, 0.32.0",
    ]


def test_all_that_is_missing_is_named_at_once() -> None:
    needs = [Need(Base, "retain", attributes=("a", "b")), Need(Output, "learn", attributes=("c",))]
    with pytest.raises(VersionError) as raised:
        check(needs, version="2", known=[])
    assert [line.split(",")[0] for line in str(raised.value).splitlines()[:3]] == [
        "vLLM 2 lacks Base.a",
        "vLLM 2 lacks Base.b",
        "vLLM 2 lacks Output.c",
    ]
