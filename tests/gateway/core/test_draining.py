"""The shutdown of a gateway while clients and their load balancer still send requests."""

import asyncio
from pathlib import Path
from ssl import SSLContext, create_default_context
from typing import Any

import grpc
import httpx
import pytest

from pagewire.wire.health import grpc_problem
from tests.gateway.conftest import eventually, plain_http, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.generation.test_streams import TEXT, text_of
from tests.makers.certificates import Authority


async def until_nothing_listens(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(ConnectionRefusedError):
            while True:
                _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
                writer.close()


async def until_not_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/readyz")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_connections_are_taken_until_balancers_know(fake: FakeTokenizer, address: str) -> None:
    leave = asyncio.Event()
    async with running_gateway(address, leave, drain_delay=1.0, shutdown_timeout=20) as client:
        await wait_ready(client)
        known = await client.get("/v1/models")
        assert "connection" not in known.headers
        fake.running.clear()
        stream = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "seed": 1, "stream": True}))
        await eventually(lambda: fake.live)
        leave.set()
        await until_not_ready(client)
        taken = await client.get("/v1/models")
        assert (taken.status_code, taken.headers["connection"]) == (200, "close")
        async with asyncio.timeout(10):
            with pytest.raises(httpx.ConnectError):
                while True:
                    await client.get("/v1/models")
        fake.running.set()
        assert text_of(await stream) == expected_text("p", 1, 16)


async def test_a_connection_that_is_open_gets_its_answer_though_the_gateway_drains(
    fake: FakeTokenizer, address: str
) -> None:
    leave = asyncio.Event()
    async with running_gateway(address, leave, shutdown_timeout=20) as client:
        await wait_ready(client)
        async with asyncio.timeout(20), plain_http(str(client.base_url)) as another:
            assert (await another.get("/v1/models")).status_code == 200
            fake.running.clear()
            stream = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "seed": 1, "stream": True}))
            await eventually(lambda: fake.live)
            leave.set()
            await until_nothing_listens(client)
            late = asyncio.create_task(another.post(TEXT, json={"prompt": "q", "seed": 1, "stream": True}))
            await eventually(lambda: len(fake.live) == 2)
            fake.running.set()
            assert text_of(await late) == expected_text("q", 1, 16)
            assert (await late).headers["connection"] == "close"
            assert text_of(await stream) == expected_text("p", 1, 16)


async def asked_anew(client: httpx.AsyncClient, ssl: SSLContext | None = None) -> str:
    """The status of an answer over a connection of its own."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port, ssl=ssl)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer.decode().partition("\r\n")[0]


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("num_streams", [0, 8])
async def test_new_connections_go_to_a_sibling_at_once(
    fake: FakeTokenizer, address: str, tmp_path: Path, tls: bool, num_streams: int
) -> None:
    """Two gateways share a port. Of the clients that come and go as one of them stops, each has its answer."""
    leave = asyncio.Event()
    issued = Authority(tmp_path).issue("gateway") if tls else None
    flags = {"reuse_port": True, "shutdown_timeout": 20} | (issued.flags if issued else {})
    context = create_default_context(cafile=str(issued.ca_certs)) if issued else None
    async with running_gateway(address, leave, **flags) as stops:  # noqa: SIM117 - the second needs the port of the first
        async with running_gateway(address, **flags, port=stops.base_url.port) as stays:
            url = str(stays.base_url).replace("http:", "https:") if tls else str(stays.base_url)
            async with httpx.AsyncClient(base_url=url, verify=context or False, timeout=20) as client:
                await wait_ready(client)
                fake.running.clear()
                body = {"prompt": "p", "seed": 1, "stream": True}
                streams = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(num_streams)]  # at both
                await eventually(lambda: len(fake.received) == num_streams)
                clients = []
                for number in range(200):
                    if number == 20:
                        leave.set()
                    clients.append(asyncio.create_task(asked_anew(client, context)))
                    await asyncio.sleep(0.001)
                assert set(await asyncio.gather(*clients)) == {"HTTP/1.1 200 OK"}
                fake.running.set()
                for stream in streams:
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
