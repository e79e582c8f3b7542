"""Calls every RPC of a server that clients reach, whatever it serves."""

from collections.abc import Iterator, Sequence

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Of services that clients reach, but not for them.
BETWEEN_SERVICES = {"/pagewire.v1.AdminService/ReplaceWeights"}
REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


async def served_methods(channel: grpc.aio.Channel) -> list[str]:
    """The methods of all services except the health service, which needs no key."""
    health = health_pb2_grpc.HealthStub(channel)
    listed = await health.List(health_pb2.HealthListRequest())
    return [*_methods([name for name in listed.statuses if name]), *(f"/{n}/ServerReflectionInfo" for n in REFLECTION)]


def _methods(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        service = descriptor_pool.Default().FindServiceByName(name)
        yield from (f"/{name}/{method.name}" for method in service.methods)


async def status_of(channel: grpc.aio.Channel, method: str, **metadata: str) -> grpc.StatusCode:
    """Returns the status of a call with an empty message; OK as soon as there is an answer."""
    # As if any call took one message, which is the same on the wire. A message written to a stream by itself makes its
    # status INTERNAL where the server has refused it already.
    call = channel.unary_stream(method)(b"", metadata=list(metadata.items()), timeout=10)
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    if answer is grpc.aio.EOF:
        return await call.code()
    call.cancel()
    return grpc.StatusCode.OK


async def check_doors(channel: grpc.aio.Channel, key: str) -> list[str]:
    """No RPC is answered without the key, and every one with it. Their names."""
    methods = await served_methods(channel)
    for method in methods:
        for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}, {"x-api-key": "wrong"}):
            status = await status_of(channel, method, **wrong)
            assert status is grpc.StatusCode.UNAUTHENTICATED, (method, status)
        let_in = await status_of(channel, method, authorization=f"Bearer {key}")
        assert let_in is not grpc.StatusCode.UNAUTHENTICATED, method
        assert (let_in is grpc.StatusCode.UNIMPLEMENTED) == (method in BETWEEN_SERVICES), method
    return methods
