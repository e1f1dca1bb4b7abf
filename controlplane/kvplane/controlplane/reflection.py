"""Server reflection, v1 and v1alpha, so that grpcurl and its kind need no proto files."""

from __future__ import annotations

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvplane.controlplane.callers import Access
from kvplane.controlplane.guard import guarded
from kvplane.controlplane.roles import REFLECTION_SERVICES

_METHOD = "ServerReflectionInfo"


def enable(server: grpc.aio.Server, services: tuple[str, ...], access: Access | None = None) -> None:
    """Serve reflection for the named services. Both versions' messages are the same on the wire."""
    servicer = reflection.aio.ReflectionServicer((*services, *REFLECTION_SERVICES))
    for service in REFLECTION_SERVICES:
        behavior = getattr(guarded(servicer, service, access=access, streams={_METHOD}), _METHOD)
        handler = grpc.stream_stream_rpc_method_handler(
            behavior,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler(service, {_METHOD: handler})
        server.add_generic_rpc_handlers((generic,))
