import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
HEALTH = "grpc.health.v1.Health"


@pytest.fixture
async def channel(tmp_path):
    server = rpc.Server([f"unix:{tmp_path}/scheduler.sock"])
    servicer = scheduler_pb2_grpc.SchedulerServiceServicer()
    server.add(servicer, scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, SERVICE)
    await server.start()
    async with rpc.channel(server.addresses[0]) as channel:
        yield channel
    await server.stop()


async def test_health_lists_every_service(channel):
    listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    status = health_pb2.HealthCheckResponse
    assert {name: check.status for name, check in listed.statuses.items()} == {
        "": status.SERVING,
        SERVICE: status.NOT_SERVING,
    }


async def reflected(channel: grpc.aio.Channel, version: str, **asked: str) -> reflection_pb2.ServerReflectionResponse:
    """The messages of v1 are those of v1alpha."""
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(**asked)]))
    return await call.read()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_describes_every_service(channel, version):
    listed = (await reflected(channel, version, list_services="")).list_services_response
    names = {service.name for service in listed.service}
    assert names == {SERVICE, HEALTH, *(f"grpc.reflection.{v}.ServerReflection" for v in ("v1", "v1alpha"))}
    for name in names:
        files = (await reflected(channel, version, file_containing_symbol=name)).file_descriptor_response
        described = [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files.file_descriptor_proto]
        assert name in {f"{file.package}.{service.name}" for file in described for service in file.service}
