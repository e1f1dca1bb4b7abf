"""Of which trace the work at hand is. Passed on in the W3C header `traceparent`, recorded nowhere.

A span is work that has a beginning and an end. The plain ones here only know under which `traceparent` they
are, so that everything a request causes says whose it is: headers, logs. What records them is in `otel`.
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar
from types import TracebackType

HEADER = "traceparent"
"""Name of the header, and of the gRPC metadata."""
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def checked(value: str) -> str:
    """Return a `traceparent` if it is one, of the version known here or a later one, else ""."""
    if len(value) < 55:
        return ""
    if len(value) > 55 and (value.startswith("00") or value[55] != "-"):
        return ""
    return value[:55] if _VALID.fullmatch(value[:55]) else ""


def trace_id_of(value: str) -> str:
    """Return the trace's id of a `traceparent`, "" if it is none."""
    return checked(value)[3:35]


def new_traceparent() -> str:
    """Return a `traceparent` of a new trace, which nobody has decided to record."""
    drawn = os.urandom(24).hex()
    return f"00-{drawn[:32]}-{drawn[32:]}-00"


class Span:
    """Work that is under way. This kind passes its `traceparent` on as it is.

    `made_up`: nobody records the trace, it is for our own logs. Engines are not told of it: they would take
    it for somebody's decision on whether they are to record.
    """

    __slots__ = ("made_up", "traceparent")

    def __init__(self, traceparent: str, *, made_up: bool = False) -> None:
        self.traceparent = traceparent
        self.made_up = made_up

    @property
    def trace_id(self) -> str:
        """The trace's id: 32 hex digits."""
        return self.traceparent[3:35]

    def child(self, name: str, **attributes: object) -> Span:
        """Begin what is a part of this and asked of others: an engine, the control plane, a store."""
        return self

    def tell(self, **attributes: object) -> None:
        """Add what has become known. None: not known."""

    def end(self, problem: str = "") -> None:
        """The work is over; `problem` says why it failed."""


CURRENT: ContextVar[Span | None] = ContextVar("kvplane_span", default=None)
"""The span of the work at hand; None outside of any trace."""


class Tracer:
    """Begins spans. This kind records none."""

    records = False
    """Whether anybody will see the spans; if not, they may be left out where every microsecond counts."""

    def begin(self, name: str, given: str = "", **attributes: object) -> Span:
        """Begin serving a request, of the trace that it was `given`, else of a new one."""
        given = checked(given)
        return Span(given) if given else Span(new_traceparent(), made_up=True)

    def join(self, name: str, given: str, **attributes: object) -> Span | None:
        """Begin serving what another process of ours asks for; None if it gave no trace."""
        given = checked(given)
        return Span(given) if given else None

    def close(self) -> None:
        """Send what has been recorded. May wait for seconds; idempotent."""


class Within:
    """A context manager: what is done in it is a child of the span at hand, if there is one.

    It gives the child, or None. What is raised in it is the child's problem. Enter and leave it in one task.
    """

    __slots__ = ("_attributes", "_before", "_name", "_span")

    def __init__(self, name: str, **attributes: object) -> None:
        self._name = name
        self._attributes = attributes
        self._before: Span | None = None
        self._span: Span | None = None

    def __enter__(self) -> Span | None:
        before = self._before = CURRENT.get()
        if before is not None:
            self._span = before.child(self._name, **self._attributes)
            if self._span is not before:
                CURRENT.set(self._span)
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is not None and self._span is not self._before:
            CURRENT.set(self._before)
            self._span.end("" if kind is None else kind.__name__)
