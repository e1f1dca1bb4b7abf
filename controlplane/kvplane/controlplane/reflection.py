"""Server reflection, v1 and v1alpha, so that grpcurl and its kind need no proto files."""

from __future__ import annotations

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

_V1 = "grpc.reflection.v1.ServerReflection"


def enable(server: grpc.aio.Server, services: tuple[str, ...]) -> None:
    """Serve reflection for the named services. Both versions' messages are the same on the wire."""
    names = (*services, reflection.SERVICE_NAME, _V1)
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(_V1, {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((generic,))
