"""The scheduler's port for clients asks for keys; the one for tokenizer services does not."""

from pathlib import Path

import grpc
import pytest

from pagewire.services.scheduler.main import make_public_server
from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc
from tests.fakes import FakeExecutorServicer
from tests.services.public_doors import check_doors
from tests.services.scheduler.service_line import ServiceLine, generate_request


async def test_every_public_rpc_but_health_refuses_without_a_key(tmp_path: Path) -> None:
    config = {"public_listen": f"unix:{tmp_path}/public.sock", "api_key": "secret"}
    async with ServiceLine(tmp_path, FakeExecutorServicer(), **config).running() as line:
        server = make_public_server(line.config, line.engine)
        await server.start()
        async with rpc.channel(line.config.public_listen) as channel:
            assert "/pagewire.v1.SchedulerService/Generate" in await check_doors(channel, "secret")
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            request = generate_request([1, 2, 3], max_tokens=2)
            with pytest.raises(grpc.aio.AioRpcError, match="missing or wrong API key"):
                await stub.Generate(request).read()
            call = stub.Generate(request, metadata=(("authorization", "Bearer secret"),))
            assert [token for response in [r async for r in call] for token in response.token_ids]
        assert await line.stub.GetLoad(scheduler_pb2.GetLoadRequest()), "tokenizer services send no key"
        await server.stop()
