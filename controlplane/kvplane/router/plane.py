"""The control plane as a request sees it: quick, or not there. Never raises into a request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from kvplane.client.errors import (
    ControlPlaneError,
    InvalidFieldError,
    LimitExceededError,
    NotAllowedError,
    UnknownCallerError,
)
from kvplane.client.model import (
    BegunTurn,
    Claim,
    ConversationKey,
    Engine,
    Location,
    MissReason,
    ReleaseOutcome,
    Touched,
)
from kvplane.router.metrics import RouterMetrics
from kvplane.tracing.context import Within

log = structlog.get_logger("kvplane.router")
T = TypeVar("T")
L = TypeVar("L")

_FAILURES_TO_OPEN = 2
_MIN_HOLD_S, _MAX_HOLD_S = 0.5, 10.0
_QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
_CONTENTION = "CONTENTION"
_NEVER_ANSWERED = (
    "it has not answered yet: --plane takes the gRPC port of kvplane serve, no HTTP server's; where that has"
    " TLS, --plane-ca, --plane-cert and --plane-key, and a name of its certificate (--plane-server-name)"
)


_NOT_IN_TIME = (
    "no answer came in time: it may wait for its store, which kvplane doctor tells, or a firewall takes what"
    " is sent; --plane takes the gRPC port of kvplane serve"
)


def _is_late(error: Exception) -> bool:
    """Tell whether a call's time was over; what is no control plane mostly hangs up before."""
    cause = error.__cause__
    return isinstance(cause, grpc.RpcError) and cause.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class TurnsClient(Protocol):
    """What the router asks for each turn: of kvplane.client's TurnsStream or ControlPlaneClient."""

    async def lookup_location(
        self, key: ConversationKey, *, timeout_s: float | None = None, turn_group: str = ""
    ) -> Location | MissReason:
        """See ControlPlaneClient."""

    async def begin_turn(
        self,
        key: ConversationKey,
        request_id: str,
        *,
        wait_s: float | None = None,
        timeout_s: float | None = None,
        turn_group: str = "",
    ) -> BegunTurn:
        """See ControlPlaneClient."""

    async def claim_location(
        self,
        key: ConversationKey,
        request_id: str,
        owner: str,
        *,
        reader_engine_id: str = "",
        turn: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Claim | MissReason:
        """See ControlPlaneClient."""

    async def finish_claim(self, claim_id: str, owner: str) -> ReleaseOutcome:
        """See ControlPlaneClient."""

    async def end_conversation(self, key: ConversationKey) -> ReleaseOutcome:
        """See ControlPlaneClient."""

    async def touch_conversation(
        self, key: ConversationKey, ttl_s: float, *, turn: int = 0, timeout_s: float | None = None
    ) -> Touched:
        """See ControlPlaneClient."""


class PlaneClient(TurnsClient, Protocol):
    """What the router uses of kvplane.client.ControlPlaneClient."""

    async def list_engines(self) -> list[Engine]:
        """See ControlPlaneClient."""


class Plane:
    """Wraps a client with deadlines and a circuit breaker; an answer of None means unavailable.

    While the breaker is open no request waits for anything; `run` polls the registry and closes it again.
    `owner` is the name under which it claims.
    """

    def __init__(
        self,
        client: PlaneClient,
        turns: TurnsClient,
        *,
        owner: str,
        timeout_s: float,
        wait_s: float,
        poll_interval_s: float,
        metrics: RouterMetrics,
        monotonic: Callable[[], float],
    ) -> None:
        self._client = client
        self._turns = turns
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._poll_interval_s = poll_interval_s
        self._metrics = metrics
        self._monotonic = monotonic
        self._owner = owner
        self._open = False
        self._failures = 0
        self._hold_s = _MIN_HOLD_S
        self._hold_until = 0.0
        self._answered = False
        self._denied: set[tuple[str, str]] = set()  # what was refused to this router, by call and reason
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def available(self) -> bool:
        """False while the breaker is open."""
        return not self._open

    async def begin_turn(
        self, key: ConversationKey, *, wait_s: float | None = None, group: str = ""
    ) -> BegunTurn | None:
        """Number a turn and learn what is known, after a wait for one in flight.

        All that is asked for one turn, in a `group` of its own, is counted as one turn there. Where the
        tenant asks for more than it may, it gets no number: `turn` is 0.
        """
        call = self._turns.begin_turn
        wait = self._wait_s if wait_s is None else wait_s
        return await self._ask(
            "begin_turn",
            lambda: call(
                key, uuid.uuid4().hex, wait_s=wait, timeout_s=self._timeout_s + wait, turn_group=group
            ),
            limited=BegunTurn(0, None, MissReason.QUOTA, key),
        )

    async def lookup(self, key: ConversationKey, *, group: str = "") -> Location | MissReason | None:
        """Learn what is known without beginning a turn; `group` as in `begin_turn`."""
        return await self._ask(
            "lookup_location",
            lambda: self._turns.lookup_location(key, timeout_s=self._timeout_s, turn_group=group),
            limited=MissReason.QUOTA,
        )

    async def claim(
        self, key: ConversationKey, location: Location, reader_engine_id: str
    ) -> Claim | MissReason | None:
        """Claim exactly this location.

        A caller that is cancelled meanwhile, or gets no answer, leaves no claim behind: what may have been
        granted is finished in the background, since nobody was told of it.
        """
        claim_id = uuid.uuid4().hex

        def call() -> Coroutine[Any, Any, Claim | MissReason]:
            return self._turns.claim_location(
                key,
                claim_id,
                self._owner,
                reader_engine_id=reader_engine_id,
                turn=location.turn,
                wait_s=0.0,
                timeout_s=self._timeout_s,
            )

        task = self._spawn(self._ask("claim_location", call, limited=MissReason.QUOTA))
        try:
            answer = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._finish_unused)
            raise
        if answer is None and self.available:
            self._spawn(self._finish(claim_id))
        outcome = "won" if isinstance(answer, Claim) else "lost" if answer is not None else "unavailable"
        self._metrics.claims.labels(outcome).inc()
        return answer

    def _finish_unused(self, task: asyncio.Task[Claim | MissReason | None]) -> None:
        if not task.cancelled() and isinstance(claim := task.result(), Claim):
            self.finish(claim)

    def finish(self, claim: Claim) -> None:
        """Say in the background that a claim's reader is done or never began."""
        self._spawn(self._finish(claim.claim_id))

    async def _finish(self, claim_id: str) -> None:
        await self._ask("finish_claim", lambda: self._turns.finish_claim(claim_id, self._owner))

    async def end(self, key: ConversationKey) -> bool:
        """End a conversation; tells whether the control plane has answered."""
        return await self._ask("end_conversation", lambda: self._turns.end_conversation(key)) is not None

    def end_later(self, key: ConversationKey) -> None:
        """End a conversation in the background."""
        self._spawn(self.end(key))

    async def touch(self, key: ConversationKey, ttl_s: float) -> Touched | None:
        """Ask for a conversation to be kept for so long; tells what there is to keep."""
        return await self._touch(key, ttl_s, 0)

    def touch_later(self, key: ConversationKey, ttl_s: float, turn: int) -> None:
        """Ask for a turn's location to be kept for so long, in the background."""
        self._spawn(self._touch(key, ttl_s, turn))

    async def _touch(self, key: ConversationKey, ttl_s: float, turn: int) -> Touched | None:
        call = self._turns.touch_conversation
        return await self._ask(
            "touch_conversation",
            lambda: call(key, ttl_s, turn=turn, timeout_s=self._timeout_s),
            limited=Touched(False),
        )

    async def _ask(
        self, call: str, ask: Callable[[], Coroutine[Any, Any, T]], *, limited: L | None = None
    ) -> T | L | None:
        """Ask, and say None where there is no answer; `limited` where the tenant has asked too often."""
        if self._open:
            self._metrics.plane_calls.labels(call, "skipped").inc()
            return None
        began = self._monotonic()
        try:
            with Within(call):
                answer = await ask()
        except (InvalidFieldError, LimitExceededError) as error:
            if error.reason == _QUOTA_EXCEEDED:  # the tenant's doing: counted, not logged
                self._metrics.plane_calls.labels(call, "quota").inc()
                return limited
            log.warning("control_plane_refused", call=call, problem=str(error), reason=error.reason)
            self._metrics.plane_calls.labels(call, "refused").inc()
            return None
        except NotAllowedError as error:
            self._metrics.plane_calls.labels(call, "refused").inc()
            if (call, error.reason) not in self._denied:  # each request would be told the same
                self._denied.add((call, error.reason))
                log.error("control_plane_denied", call=call, problem=str(error), reason=error.reason)
            return None
        except ControlPlaneError as error:
            if error.reason == _CONTENTION:  # it is there: many turns of one conversation come at once
                self._metrics.plane_calls.labels(call, "contended").inc()
                return None
            self._metrics.plane_calls.labels(call, "unavailable").inc()
            self._answered = self._answered or bool(error.reason)
            self._note_failure(str(error), is_late=_is_late(error))
            return None
        except Exception:
            # Reuse is an optimization: whatever is wrong with it, the request is served.
            log.exception("control_plane_call_broke", call=call)
            self._metrics.plane_calls.labels(call, "broken").inc()
            return None
        self._failures, self._answered = 0, True
        self._hold_s = _MIN_HOLD_S
        self._metrics.plane_answered(call, self._monotonic() - began)
        return answer

    def _note_failure(self, problem: str, *, is_late: bool) -> None:
        self._failures += 1
        if self._open or self._failures < _FAILURES_TO_OPEN:
            return
        self._open = True
        self._metrics.plane_up.set(0)
        self._hold_until = self._monotonic() + self._hold_s
        # A plane that answers polls but not requests is asked ever less often.
        self._hold_s = min(_MAX_HOLD_S, self._hold_s * 2)
        # An HTTP server's port is a mistake that gRPC's words do not tell.
        hint = {} if self._answered else {"hint": _NOT_IN_TIME if is_late else _NEVER_ANSWERED}
        log.warning("control_plane_unavailable", problem=problem, **hint)

    async def poll(self) -> Sequence[Engine] | None:
        """Ask for the registry once and note whether the plane is there; None if it is not."""
        try:
            engines = await self._client.list_engines()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._failures = max(self._failures, _FAILURES_TO_OPEN - 1)
            # A server that refuses us, or says why it cannot, is the right one.
            refused = isinstance(error, UnknownCallerError | NotAllowedError)
            said_why = isinstance(error, ControlPlaneError) and bool(error.reason)
            self._answered = self._answered or refused or said_why
            self._note_failure(f"{type(error).__name__}: {error}", is_late=_is_late(error))
            return None
        self._answered = True
        if not self._open:
            self._metrics.plane_up.set(1)
        elif self._monotonic() >= self._hold_until:
            self._open, self._failures = False, 0
            self._metrics.plane_up.set(1)
            log.info("control_plane_available")
        return engines

    async def run(self, on_engines: Callable[[Sequence[Engine]], None]) -> None:
        """Poll until cancelled."""
        while True:
            engines = await self.poll()
            if engines is not None:
                on_engines(engines)
            # Also the way back after an outage, so it must not back off beyond about a second.
            await asyncio.sleep(self._poll_interval_s if self.available else min(0.5, self._poll_interval_s))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def aclose(self) -> None:
        """Let background calls end, which have deadlines. Idempotent; the client stays open."""
        if self._background:
            await asyncio.wait(self._background, timeout=self._timeout_s * 4)
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
