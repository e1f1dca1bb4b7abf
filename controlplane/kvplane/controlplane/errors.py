"""What the control plane refuses, and the one table from each refusal to its gRPC status."""

from __future__ import annotations

import math

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from kvplane.store import errors as store_errors

DOMAIN = "kvplane"
REASON_KEY = "kvplane-error-reason"
"""Trailer with the reason alone, for proxies, which do not read the status's details."""


class DomainError(Exception):
    """Base of all refusals. `ids` go to the caller: never another tenant's, never secrets."""

    def __init__(self, message: str, **ids: str) -> None:
        super().__init__(message)
        self.ids = ids


class InvalidFieldError(DomainError):
    """A field is missing, malformed or above its limit. Names the field as in the protos."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}", field=field)
        self.field = field
        self.problem = problem

    def within(self, outer: str) -> InvalidFieldError:
        """Return the error of the same field as part of an outer one."""
        return InvalidFieldError(f"{outer}.{self.field}", self.problem)


class UnreadableMessageError(DomainError):
    """What arrived is no message of the API, or larger than any may be."""


class UnknownEngineError(DomainError):
    """The engine has no lease. It must register (again)."""

    def __init__(self, engine_id: str) -> None:
        super().__init__("engine is not registered or its lease has ended; register it", engine_id=engine_id)


class StaleEpochError(DomainError):
    """A newer incarnation of the engine is registered."""

    def __init__(self, engine_id: str, engine_epoch: int, current: int) -> None:
        message = f"engine epoch {engine_epoch} is over; {current} is registered"
        super().__init__(message, engine_id=engine_id, current_epoch=str(current))


class LateRegistrationError(DomainError):
    """A registration that its process has followed by another already."""

    def __init__(self, engine_id: str, current: int) -> None:
        message = f"registration was followed by another of the same process; {current} is registered"
        super().__init__(message, engine_id=engine_id, current_epoch=str(current))


class EngineDrainingError(DomainError):
    """The engine drains: nothing new is put on record for it."""

    def __init__(self, engine_id: str) -> None:
        super().__init__("engine is draining", engine_id=engine_id)


class NotClaimOwnerError(DomainError):
    """Somebody else's claim."""

    def __init__(self, claim_id: str) -> None:
        super().__init__("claim belongs to another owner", claim_id=claim_id)


class UnknownCallerError(DomainError):
    """Neither certificate nor token is of anyone in the access file."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"caller is not known: {problem}")


class RoleNotAllowedError(DomainError):
    """The caller's role does not have this call."""

    def __init__(self, caller: str, role: str, call: str) -> None:
        super().__init__(f"{caller} has the role {role}, which may not call {call}", caller=caller, role=role)


def _shown(text: str) -> str:
    """Return what of a text goes into an answer and a log: callers are looked at before their fields are."""
    return text if len(text) <= 128 else f"{text[:128]}..."


class EngineNotAllowedError(DomainError):
    """The caller may not speak for this engine."""

    def __init__(self, caller: str, engine_id: str) -> None:
        engine_id = _shown(engine_id)
        message = (
            f"{caller} may not speak for the engine {engine_id!r}: see its engine_ids in the access file"
        )
        super().__init__(message, caller=caller, engine_id=engine_id)


class AddressNotAllowedError(DomainError):
    """The caller may not have others call, or read from, this host."""

    def __init__(self, caller: str, host: str) -> None:
        message = f"{caller} may not register the host {_shown(host)!r}: see its addresses in the access file"
        super().__init__(message, caller=caller)


class TenantNotAllowedError(DomainError):
    """The caller may not act for this tenant, whether or not there is one."""

    def __init__(self, caller: str) -> None:
        message = f"{caller} may not act for this tenant: see its tenants in the access file"
        super().__init__(message, caller=caller)


class ContentionError(DomainError):
    """Others changed the same records each time it was tried. Read again and redo."""

    def __init__(self) -> None:
        super().__init__("too many concurrent changes of the same conversation; try again")


class RevisionGoneError(DomainError):
    """The revision cannot be watched from: list again."""

    def __init__(self, revision: int) -> None:
        super().__init__(f"revision {revision} cannot be watched from; list again", revision=str(revision))


class TooManyStreamsError(DomainError):
    """This replica serves as many streams of the kind as it may: call another one, or end some."""

    def __init__(self, what: str, most: int, *, caller: str = "") -> None:
        whose = f"as many {what} of {caller}'s as it may, of {most}" if caller else f"{most} {what}"
        super().__init__(f"this control plane serves {whose} already; end some, or call another one")


class SupersededStreamError(DomainError):
    """The engine attached again: this stream is over."""

    def __init__(self, engine_id: str) -> None:
        super().__init__("the engine attached again on another stream", engine_id=engine_id)


class QuotaExceededError(DomainError):
    """The tenant has asked for more operations than it may; it may again in `retry_s` seconds."""

    def __init__(self, retry_s: float) -> None:
        super().__init__("the tenant asks for more operations per second than it may")
        self.retry_s = retry_s


class ShuttingDownError(DomainError):
    """This replica is about to stop: call another one."""

    def __init__(self) -> None:
        super().__init__("this control plane is shutting down")


_Code = grpc.StatusCode
_TABLE: dict[type[Exception], tuple[grpc.StatusCode, str]] = {
    InvalidFieldError: (_Code.INVALID_ARGUMENT, "INVALID_FIELD"),
    UnreadableMessageError: (_Code.INVALID_ARGUMENT, "UNREADABLE_MESSAGE"),
    UnknownEngineError: (_Code.NOT_FOUND, "UNKNOWN_ENGINE"),
    StaleEpochError: (_Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    LateRegistrationError: (_Code.FAILED_PRECONDITION, "STALE_EPOCH"),
    EngineDrainingError: (_Code.FAILED_PRECONDITION, "ENGINE_DRAINING"),
    NotClaimOwnerError: (_Code.PERMISSION_DENIED, "NOT_CLAIM_OWNER"),
    UnknownCallerError: (_Code.UNAUTHENTICATED, "UNKNOWN_CALLER"),
    RoleNotAllowedError: (_Code.PERMISSION_DENIED, "ROLE_NOT_ALLOWED"),
    EngineNotAllowedError: (_Code.PERMISSION_DENIED, "ENGINE_NOT_ALLOWED"),
    AddressNotAllowedError: (_Code.PERMISSION_DENIED, "ADDRESS_NOT_ALLOWED"),
    TenantNotAllowedError: (_Code.PERMISSION_DENIED, "TENANT_NOT_ALLOWED"),
    ContentionError: (_Code.ABORTED, "CONTENTION"),
    SupersededStreamError: (_Code.ABORTED, "STREAM_SUPERSEDED"),
    QuotaExceededError: (_Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"),
    TooManyStreamsError: (_Code.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS"),
    RevisionGoneError: (_Code.OUT_OF_RANGE, "REVISION_GONE"),
    ShuttingDownError: (_Code.UNAVAILABLE, "SHUTTING_DOWN"),
    store_errors.StoreUnavailableError: (_Code.UNAVAILABLE, "STORE_UNAVAILABLE"),
    store_errors.StoreClosedError: (_Code.UNAVAILABLE, "SHUTTING_DOWN"),
    store_errors.StoreFullError: (_Code.RESOURCE_EXHAUSTED, "STORE_FULL"),
    store_errors.InvalidStoreRequestError: (_Code.INVALID_ARGUMENT, "TOO_LARGE_FOR_STORE"),
}
_RETRY_DELAY_MS = 200


def refusals() -> dict[str, tuple[grpc.StatusCode, list[str]]]:
    """Return every reason there is, with its status and what it means: what the API reference is made of."""
    found: dict[str, tuple[grpc.StatusCode, list[str]]] = {}
    for kind, (code, reason) in _TABLE.items():
        meaning = " ".join((kind.__doc__ or "").split())
        found.setdefault(reason, (code, []))[1].append(meaning)
    found["INTERNAL"] = (_Code.INTERNAL, ["A fault of the control plane's, whose log has the request_id."])
    return found


def status_of(error: Exception, request_id: str) -> tuple[grpc.StatusCode, str, str, bytes]:
    """Return (code, message, reason, serialized google.rpc.Status) for any exception of a handler.

    What is not in the table is INTERNAL and tells the caller nothing but `request_id`.
    """
    code, reason = _TABLE.get(type(error), (_Code.INTERNAL, "INTERNAL"))
    if code is _Code.INTERNAL:
        message, ids = f"internal error; see the control plane's log for request {request_id}", {}
    elif isinstance(error, DomainError):
        message, ids = str(error), error.ids
    else:
        message, ids = str(error) or reason.lower().replace("_", " "), {}
    info = error_details_pb2.ErrorInfo(
        reason=reason, domain=DOMAIN, metadata={**ids, "request_id": request_id}
    )
    status = status_pb2.Status(code=code.value[0], message=message, details=[_pack(info)])
    if isinstance(error, InvalidFieldError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
        status.details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if code is _Code.UNAVAILABLE or isinstance(error, QuotaExceededError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(
            math.ceil(error.retry_s * 1000) if isinstance(error, QuotaExceededError) else _RETRY_DELAY_MS
        )
        status.details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return code, message, reason, status.SerializeToString()


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
