"""The shutdown of a gateway while clients and their load balancer still send requests."""

import asyncio
from typing import Any

import grpc
import httpx

from pagewire.wire.health import grpc_problem
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.generation.test_streams import TEXT, text_of


async def until_not_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/readyz")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_requests_are_taken_until_balancers_know(fake: FakeTokenizer, address: str) -> None:
    leave = asyncio.Event()
    async with running_gateway(address, leave, drain_delay=1.0, shutdown_timeout=20) as client:
        await wait_ready(client)
        kept = await client.get("/v1/models")
        assert "connection" not in kept.headers
        fake.running.clear()
        stream = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "seed": 1, "stream": True}))
        await eventually(lambda: fake.live)
        leave.set()
        await until_not_ready(client)
        taken = await client.get("/v1/models")
        assert (taken.status_code, taken.headers["connection"]) == (200, "close")
        async with asyncio.timeout(10):
            while (refused := await client.get("/v1/models")).status_code == 200:
                pass
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        fake.running.set()
        assert text_of(await stream) == expected_text("p", 1, 16)


async def test_ctrl_c_does_not_wait(fake: FakeTokenizer, address: str) -> None:
    leave = asyncio.Event()
    async with running_gateway(address, leave, drains=False, drain_delay=600, shutdown_timeout=600) as client:
        await wait_ready(client)
        stream = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "stream": True, "max_tokens": 900}))
        await eventually(lambda: any(live.num_done for live in fake.live.values()))
        fake.running.clear()
        leave.set()
        assert "shutting down" in (await stream).text


async def test_a_tokenizer_service_that_drains_is_as_good_as_ever(
    fake: FakeTokenizer, client: httpx.AsyncClient, address: str
) -> None:
    """A tokenizer service that drains is not ready for clients, but gateways that it serves stay ready."""
    ended = asyncio.Event()
    stopping = asyncio.create_task(fake.stop(ended.wait))
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(grpc_problem, address, "pagewire.v1.InferenceService"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (await client.get("/readyz")).status_code == 200
    answer = await client.post(TEXT, json={"prompt": "p", "seed": 1, "stream": True})
    assert text_of(answer) == expected_text("p", 1, 16)
    ended.set()
    await stopping


async def test_a_call_that_the_tokenizer_service_ends_under_is_made_again(
    address: str,
) -> None:
    class Slow(FakeTokenizer):
        begun = asyncio.Event()

        async def Tokenize(self, request: Any, context: Any) -> Any:
            self.begun.set()
            await asyncio.sleep(600)

    slow, successor = Slow(), FakeTokenizer()
    await slow.start(address)
    async with running_gateway(address) as client:
        await wait_ready(client)
        answer = asyncio.create_task(client.post("/tokenize", json={"prompt": "p"}))
        await slow.begun.wait()
        await slow.stop()
        await successor.start(address)
        assert (await answer).json()["tokens"] == [ord("^"), ord("p")]
    await successor.stop()


async def test_a_call_that_arrives_as_the_tokenizer_service_stops_is_made_again(address: str) -> None:
    class Stopping(FakeTokenizer):
        has_refused = False

        async def Tokenize(self, request: Any, context: Any) -> Any:
            if not self.has_refused:
                self.has_refused = True
                await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")  # as gRPC does
            return await super().Tokenize(request, context)

    fake = Stopping()
    await fake.start(address)
    async with running_gateway(address) as client:
        await wait_ready(client)
        assert (await client.post("/tokenize", json={"prompt": "p"})).json()["tokens"] == [ord("^"), ord("p")]
    await fake.stop()
