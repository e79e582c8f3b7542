"""Health (grpc.health.v1) and reflection (grpc.reflection, v1 and v1alpha) of every server."""

from collections.abc import Sequence
from functools import cache

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as grpc_health_aio
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

_V1ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"


class HealthServicer(grpc_health_aio.HealthServicer):
    """The servicer of grpcio, and List, which that lacks."""

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        checks = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=checks)


def add_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds reflection of these services by full name. Clients try v1 first; older ones know only v1alpha."""
    v1 = _declare_v1()
    servicer = ReflectionServicer([*names, v1, reflection.SERVICE_NAME])
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (v1, reflection.SERVICE_NAME):
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})])


@cache
def _declare_v1() -> str:
    """Declares reflection v1, which grpcio lacks, as a copy of v1alpha, and returns the name of its service."""
    file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name, file.package = file.name.replace("v1alpha", "v1"), _V1
    file.ClearField("options")
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_V1ALPHA, _V1)
            method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    descriptor_pool.Default().Add(file)  # type: ignore[no-untyped-call]
    return f"{_V1}.{file.service[0].name}"
