"""A control plane that has engines' registration and stream only, and does as it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvplane.client import convert
from kvplane.v1 import common_pb2, engine_pb2, engine_pb2_grpc

ACCEPTED = common_pb2.ANNOUNCE_OUTCOME_ACCEPTED
RELEASED = common_pb2.RELEASE_OUTCOME_RELEASED


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for something that other tasks bring about, and that stays so."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - it may come true on another thread
            await asyncio.sleep(0.002)


class AttachPlane(engine_pb2_grpc.EngineServiceServicer):
    """Takes registrations and streams, records what it hears, and answers.

    Attributes:
        heard: every message, in order, over all streams.
        streams: number of streams opened.
        epochs: epochs given so far.
        acknowledging: while cleared, messages are heard but not answered.
        announce_outcome, withdraw_outcome: by request id, else the default.
        refuse: (code, reason) that ends streams, and registrations if `refuse_registration`.
    """

    def __init__(self, *, lease_ttl_s: float = 10.0, claim_timeout_s: float = 30.0) -> None:
        self.lease_ttl_s = lease_ttl_s
        self.claim_timeout_s = claim_timeout_s
        self.heard: list[engine_pb2.AttachEngineRequest] = []
        self.registrations: list[engine_pb2.RegisterEngineRequest] = []
        self.deregistered: list[int] = []
        self.streams = 0
        self.epochs: list[int] = []
        self.acknowledging = asyncio.Event()
        self.acknowledging.set()
        self.announce_outcome: dict[str, int] = {}
        self.withdraw_outcome: dict[str, int] = {}
        self.refuse: tuple[grpc.StatusCode, str] | None = None
        self.port = 0
        self._server: grpc.aio.Server | None = None
        self._orders: asyncio.Queue[engine_pb2.AttachEngineResponse] | None = None
        self._cut: asyncio.Event = asyncio.Event()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """Be gone at once."""
        if self._server is not None:
            server, self._server = self._server, None
            self._cut.set()
            await server.stop(None)
            del server
            await asyncio.sleep(0.01)  # gRPC puts the end of a dropped server off to the loop
            self._cut = asyncio.Event()

    def cut(self) -> None:
        """End all streams as a lost connection would."""
        self._cut.set()
        self._cut = asyncio.Event()

    def order(self, request_id: str, reason: int = engine_pb2.RELEASE_REASON_SUPERSEDED) -> None:
        """Send a release order on the current stream."""
        assert self._orders is not None
        order = engine_pb2.ReleaseOrder(request_id=request_id, reason=_reason(reason))
        self._orders.put_nowait(engine_pb2.AttachEngineResponse(release_orders=[order]))

    def want(self, request_id: str, ttl_s: float) -> None:
        """Send a renewal order on the current stream."""
        assert self._orders is not None
        order = engine_pb2.RenewalOrder(request_id=request_id, ttl=convert.duration(ttl_s))
        self._orders.put_nowait(engine_pb2.AttachEngineResponse(renewal_orders=[order]))

    def answer_renewal(self, request_id: str, *, renewed: bool) -> None:
        """Answer a renewal on the current stream."""
        assert self._orders is not None
        result = common_pb2.RenewalResult(request_id=request_id, renewed=renewed)
        self._orders.put_nowait(engine_pb2.AttachEngineResponse(renewals=[result]))

    def drain(self) -> None:
        """Tell the engine to drain."""
        assert self._orders is not None
        self._orders.put_nowait(engine_pb2.AttachEngineResponse(draining=True))

    # What was heard

    def announced(self) -> list[common_pb2.Announcement]:
        return [announcement for message in self.heard for announcement in message.announcements]

    def withdrawn(self) -> list[str]:
        return [withdrawal.request_id for message in self.heard for withdrawal in message.withdrawals]

    def renewed(self) -> list[tuple[str, float]]:
        return [(r.request_id, convert.seconds(r.ttl)) for message in self.heard for r in message.renewals]

    def freed(self) -> Counter[str]:
        return Counter(freed.request_id for message in self.heard for freed in message.freed)

    # The service

    async def RegisterEngine(  # noqa: N802 - the protos name it
        self, request: engine_pb2.RegisterEngineRequest, context: Any
    ) -> engine_pb2.RegisterEngineResponse:
        self.registrations.append(request)
        epoch = len(self.epochs) + 1
        self.epochs.append(epoch)
        return engine_pb2.RegisterEngineResponse(
            engine_epoch=epoch,
            lease_ttl=convert.duration(self.lease_ttl_s),
            max_location_ttl=convert.duration(480),
            claim_timeout=convert.duration(self.claim_timeout_s),
        )

    async def DeregisterEngine(  # noqa: N802 - the protos name it
        self, request: engine_pb2.DeregisterEngineRequest, context: Any
    ) -> engine_pb2.DeregisterEngineResponse:
        self.deregistered.append(request.engine_epoch)
        return engine_pb2.DeregisterEngineResponse()

    async def _unimplemented(self, request: object, context: Any) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this fake")

    RenewEngine = DrainEngine = ListEngines = _unimplemented

    async def AttachEngine(  # noqa: N802 - the protos name it
        self, request_iterator: AsyncIterator[engine_pb2.AttachEngineRequest], context: Any
    ) -> AsyncIterator[engine_pb2.AttachEngineResponse]:
        self.streams += 1
        if self.refuse is not None:
            await refuse(context, *self.refuse)
        answers: asyncio.Queue[engine_pb2.AttachEngineResponse] = asyncio.Queue()
        self._orders = answers
        cut = asyncio.create_task(self._cut.wait())
        reading = asyncio.create_task(self._read(request_iterator, answers))
        answer = asyncio.create_task(answers.get())
        try:
            while True:
                await asyncio.wait({answer, cut}, return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
                yield answer.result()
                answer = asyncio.create_task(answers.get())
        finally:
            for task in (reading, cut, answer):
                task.cancel()

    async def _read(
        self,
        requests: AsyncIterator[engine_pb2.AttachEngineRequest],
        answers: asyncio.Queue[engine_pb2.AttachEngineResponse],
    ) -> None:
        async for message in requests:
            self.heard.append(message)
            await self.acknowledging.wait()
            answers.put_nowait(self._answer(message))

    def _answer(self, message: engine_pb2.AttachEngineRequest) -> engine_pb2.AttachEngineResponse:
        answer = engine_pb2.AttachEngineResponse(acknowledged_sequence=message.sequence)
        for announcement in message.announcements:
            answer.announcements.add(
                request_id=announcement.request_id,
                outcome=_announce(self.announce_outcome.get(announcement.request_id, ACCEPTED)),
                granted_ttl=announcement.ttl,
            )
        for withdrawal in message.withdrawals:
            answer.withdrawals.add(
                request_id=withdrawal.request_id,
                outcome=_release(self.withdraw_outcome.get(withdrawal.request_id, RELEASED)),
            )
        for renewal in message.renewals:
            answer.renewals.add(request_id=renewal.request_id, renewed=True, granted_ttl=renewal.ttl)
        return answer


async def refuse(context: Any, code: grpc.StatusCode, reason: str) -> None:
    """Abort as the control plane does: a status with a reason."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="kvplane"))
    status = status_pb2.Status(code=code.value[0], message=reason, details=[detail])
    context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
    await context.abort(code, reason)


def _reason(value: int) -> engine_pb2.ReleaseReason:
    return engine_pb2.ReleaseReason.Name(value) and value  # type: ignore[return-value]


def _announce(value: int) -> common_pb2.AnnounceOutcome:
    return value  # type: ignore[return-value]


def _release(value: int) -> common_pb2.ReleaseOutcome:
    return value  # type: ignore[return-value]
