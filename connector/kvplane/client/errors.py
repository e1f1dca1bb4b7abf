"""What the client raises, and how a gRPC status becomes one of these."""

from __future__ import annotations

import contextlib

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2


class ControlPlaneError(Exception):
    """Base: the control plane refused or failed. `reason` is ErrorInfo.reason, "" if none came."""

    def __init__(self, message: str, *, reason: str = "", metadata: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = metadata or {}


class ControlPlaneUnavailableError(ControlPlaneError):
    """No answer in time, or none at all. The outcome of a write is unknown; the same call may be repeated."""


class InvalidFieldError(ControlPlaneError):
    """A field was refused; `field` names it. The same call will never work."""

    @property
    def field(self) -> str:
        """The first field that was refused, "" if none was named."""
        return self.metadata.get("field", "")


class UnknownEngineError(ControlPlaneError):
    """The engine has no lease: it was never registered or the lease ended. Register again."""


class StaleEpochError(ControlPlaneError):
    """A newer incarnation of the engine is registered; this one is over."""


class EngineDrainingError(ControlPlaneError):
    """The engine drains and takes nothing new."""


class NotOwnerError(ControlPlaneError):
    """The claim belongs to somebody else."""


class UnknownCallerError(ControlPlaneError):
    """The control plane wants to know who calls, and neither certificate nor token tells it."""


class NotAllowedError(ControlPlaneError):
    """The caller is known, and this is not its to ask: its role, its engines, its tenants."""


class LimitExceededError(ControlPlaneError):
    """A limit was reached; less, or later."""


class RevisionGoneError(ControlPlaneError):
    """The revision to watch from is compacted or another store's: list again."""


_BY_REASON: dict[str, type[ControlPlaneError]] = {
    "UNKNOWN_ENGINE": UnknownEngineError,
    "STALE_EPOCH": StaleEpochError,
    "ENGINE_DRAINING": EngineDrainingError,
    "NOT_CLAIM_OWNER": NotOwnerError,
    "REVISION_GONE": RevisionGoneError,
}
_BY_CODE: dict[grpc.StatusCode, type[ControlPlaneError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidFieldError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceededError,
    grpc.StatusCode.UNAUTHENTICATED: UnknownCallerError,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowedError,
    grpc.StatusCode.UNAVAILABLE: ControlPlaneUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: ControlPlaneUnavailableError,
    grpc.StatusCode.CANCELLED: ControlPlaneUnavailableError,
}


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def from_status(code: int, message: str, reason: str) -> ControlPlaneError:
    """Return the exception that a status by number stands for; what it names of ids is in the message."""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(
        _CODES.get(code, grpc.StatusCode.UNKNOWN), ControlPlaneError
    )
    return kind(message or reason, reason=reason)


def from_rpc_error(error: grpc.aio.AioRpcError) -> ControlPlaneError:
    """Return the exception that an RPC's status stands for, with the ids it carries."""
    reason, metadata = "", dict[str, str]()
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        with contextlib.suppress(DecodeError):  # what is no detail tells no more than the status
            for detail in status_pb2.Status.FromString(value).details:
                info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
                if detail.Unpack(info):
                    reason, metadata = info.reason, {**metadata, **info.metadata}
                elif detail.Unpack(bad) and bad.field_violations:
                    metadata["field"] = bad.field_violations[0].field
    kind = _BY_REASON.get(reason) or _BY_CODE.get(error.code(), ControlPlaneError)
    return kind(error.details() or error.code().name, reason=reason, metadata=metadata)
