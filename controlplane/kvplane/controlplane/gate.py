"""Callers told by tokens are looked at before what they send is read.

gRPC reads the one message of a unary call, however large, before a handler can say no. Which handler is to
have a call is asked before that: for who is nobody it is one that reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc

from kvplane.controlplane.callers import Access
from kvplane.controlplane.guard import Counted, refusing

Refusals = Mapping[str, Any]
"""Handlers by the full names of methods."""


class Gate:
    """Stands before the services of a server on which nobody has a certificate."""

    def __init__(self, access: Access, counted: Counted | None) -> None:
        self._access = access
        self._counted = counted

    def before(self, service: str, handlers: dict[str, Any]) -> grpc.GenericRpcHandler:
        """Return what finds the handlers of a service, by the names of its methods, for callers it knows."""
        refusals: Refusals = {
            f"/{service}/{name}": grpc.stream_stream_rpc_method_handler(
                refusing(f"/{service}/{name}", self._access, self._counted)
            )
            for name, handler in handlers.items()
            if not handler.request_streaming  # a stream is read by its handler, which looks first
        }
        return _Gated(grpc.method_handlers_generic_handler(service, handlers), refusals, self._access)


class _Gated(grpc.GenericRpcHandler):
    def __init__(self, handlers: grpc.GenericRpcHandler, refusals: Refusals, access: Access) -> None:
        self._find = handlers.service
        self._refusals = refusals
        self._knows = access.knows

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call."""
        refusal = self._refusals.get(handler_call_details.method)
        if refusal is None or self._knows(handler_call_details.invocation_metadata):
            return self._find(handler_call_details)
        return refusal
