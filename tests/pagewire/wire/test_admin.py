"""The reports of a service when the service behind it does not answer."""

import socket
from pathlib import Path

import grpc

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.admin import AdminServicer, Neighbour


async def test_metrics_come_in_time_when_the_service_behind_hangs(tmp_path: Path) -> None:
    """Else one stopped executor would take the metrics of the scheduler along, which say that it has stopped."""
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(f"{tmp_path}/executor")
        hanging.listen()  # but never accepts
        async with rpc.channel(f"unix:{tmp_path}/executor") as behind:
            neighbour = Neighbour("executor", "e", behind)
            server = grpc.aio.server()
            servicer = AdminServicer("scheduler", lambda: [neighbour], lambda: True, lambda status, maps: None)
            admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
            server.add_insecure_port(f"unix:{tmp_path}/scheduler")
            await server.start()
            try:
                async with rpc.channel(f"unix:{tmp_path}/scheduler") as channel:
                    stub = admin_pb2_grpc.AdminServiceStub(channel)
                    answer = await stub.GetMetrics(admin_pb2.GetMetricsRequest(), timeout=1.0)
            finally:
                await server.stop(0)
    assert [one.service for one in answer.services] == ["scheduler"]
