"""A process that answers its own gRPC calls and prints how often they woke threads of gRPC's own: run by test_rpc.

`python -m tests.pagewire.wire.grpc_threads CALLS DIRECTORY`
"""

import asyncio
import sys
from pathlib import Path

from pagewire.process import process

process.spare_grpc_threads()

from pagewire.v1 import admin_pb2, admin_pb2_grpc  # noqa: E402
from pagewire.wire import rpc  # noqa: E402  gRPC reads its settings when it is imported


async def main(num_calls: int, address: str) -> None:
    server = rpc.Server([address], shutdown_timeout=0)
    server.add_admin("test")
    await server.start()
    async with rpc.channel(address) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        await stub.GetMetrics(admin_pb2.GetMetricsRequest())
        before = num_wakes()
        for _ in range(num_calls):
            await stub.GetMetrics(admin_pb2.GetMetricsRequest())
        print(num_wakes() - before)
    await server.stop()


def num_wakes() -> int:
    """Returns how often the threads that gRPC names after its event engine woke."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().startswith("event_e")]
    assert tasks, "gRPC names its threads otherwise: this counts nothing"
    lines = [line for task in tasks for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), f"unix:{sys.argv[2]}/s.sock"))
